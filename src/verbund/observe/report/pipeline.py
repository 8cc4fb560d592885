"""A pipeline's step as a diagram of stages and micro-batches, as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from verbund.observe.events import ACTIONS
from verbund.observe.journal import ProcessJournal
from verbund.observe.pipeline import Pipelines, pipelines, typical
from verbund.observe.report.lanes import WIDTH
from verbund.observe.report.scale import UNITS, linear_ticks, number, seconds
from verbund.observe.report.text import prose

PASSES = 900
"""Most passes that the diagram shows: the first ones."""
_LANES = 32
_LEFT = 92
_LANE = 26
_DIGIT = 7  # the width of a digit
_WORDS = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
_CLASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}


def pipeline(summary: Mapping[str, Any], journals: Sequence[ProcessJournal]) -> str:
    """One sentence of figures and the diagram of the median step; nothing for a run without a pipeline."""
    measured = summary.get("pipeline")
    found = pipelines(journals)
    if not isinstance(measured, Mapping) or found is None:
        return ""
    return f"<p>{prose(_sentence(measured))}</p>{_diagram(found)}"


def _sentence(measured: Mapping[str, Any]) -> str:
    bubble, rate, first = (measured[key] for key in ("bubble", "samples_per_second", "first_output_seconds"))
    many = "1 micro-batch" if measured["micro_batches"] == 1 else f"{measured['micro_batches']} micro-batches"
    what = f"`{measured['schedule']}`, {measured['stages']} stages on {measured['ranks']} workers, {many}."
    idle = (
        f"Idle {_percent(bubble['measured'])} of a step, as measured; {_percent(bubble['theory'])} by the schedule "
        f"with the times that these stages took, and {_percent(bubble['equal_stages'])} if all stages took the same."
    )
    latency = f" The first micro-batch had left the last stage after {seconds(first)}." if first is not None else ""
    return f"{what} {idle}{latency}" + (f" {number(rate)} samples per second." if rate else "")


def _diagram(found: Pipelines) -> str:
    rows = typical(found)
    if not len(rows):
        return ""
    lanes = min(found.ranks, _LANES)
    total = len(rows)
    step = int(rows[0, 0])
    rows = rows[rows[:, 2] % found.ranks < lanes][:PASSES]
    begin, length = int(rows[:, 4].min()), max(int(rows[:, 5].max() - rows[:, 4].min()), 1)
    room = WIDTH - _LEFT
    parts = []
    for _, kind, stage, micro_batch, start, end in rows.tolist():
        lane, chunk = stage % found.ranks, stage // found.ranks
        letter = ACTIONS[kind]
        x, width = _LEFT + (start - begin) / length * room, max((end - start) / length * room, 0.05)
        words = f"stage {stage}, micro-batch {micro_batch}: {_WORDS[letter]} {seconds((end - start) / 1e9)}"
        # Later chunks of a worker are paler.
        pale = f' fill-opacity="{1 - 0.5 * chunk / (found.chunks - 1):.2f}"' if found.chunks > 1 and chunk else ""
        parts.append(
            f'<rect class="{_CLASSES[letter]}"{pale} x="{x:.2f}" y="{lane * _LANE + 3}" width="{width:.2f}" '
            f'height="{_LANE - 6}"><title>{escape(words)}</title></rect>'
        )
        if width > _DIGIT * len(str(micro_batch)) + 3:
            parts.append(
                f'<text class="inside" x="{x + width / 2:.1f}" y="{lane * _LANE + 17}" text-anchor="middle">'
                f"{micro_batch}</text>"
            )
    for lane in range(lanes):
        own = [str(stage) for stage in range(lane, found.stages, found.ranks)]
        name = f"stage {own[0]}" if len(own) == 1 else f"stages {', '.join(own[:3])}{', …' if len(own) > 3 else ''}"
        parts.append(f'<text class="label" x="{_LEFT - 8}" y="{lane * _LANE + 17}" text-anchor="end">{name}</text>')
    divisor, unit = next((d, u) for d, u in UNITS if length >= d or d == 1.0)
    height = lanes * _LANE + 22
    ticks = "".join(
        f'<text class="tick" x="{_LEFT + value * divisor / length * room:.1f}" y="{height - 5}" '
        f'text-anchor="{"start" if value == 0 else "middle"}">{value:g} {unit}</text>'
        for value in linear_ticks(0, length / divisor * 0.98, 6)
    )
    shown = f"; shown are {len(rows)} of {total} passes" if len(rows) < total else ""
    kinds = [letter for letter in ACTIONS if letter in {ACTIONS[kind] for kind in rows[:, 1].tolist()}]
    legend = "".join(
        f'<li><span class="key {_CLASSES[letter]}"></span><b>{_WORDS[letter]}</b></li>' for letter in kinds
    )
    legend += "<li>paler: a worker's later stages</li>" if found.chunks > 1 else ""
    label = f"Step {step}: which stage took which micro-batch when; {seconds(length / 1e9)} in all"
    return (
        f"<figure><figcaption><b>Step {step}, the median one</b> {seconds(length / 1e9)}; the number is the "
        f"micro-batch's{shown}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}{ticks}</svg>'
        f'</figure><ul class="legend">{legend}</ul>'
    )


def _percent(share: float | None) -> str:
    return "(not measured)" if share is None else f"{100 * share:.1f} %"
