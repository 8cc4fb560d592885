"""Who took part in a training over time, and what it cost that workers came and went. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from verbund.observe.journal import ProcessJournal

HOW = (
    "of each change the time from the end of the last step to where members went on, of the member that took longest; "
    "of a restart the time from the last thing that its former start recorded to its own first step"
)


def measure(journals: Sequence[ProcessJournal]) -> dict[str, Any] | None:
    """`membership` of a summary; None where nothing is known of it.

    `over_time` is a list of [seconds since the run began, workers], one for each change; `eras` has the same with the
    ranks of the `members`, and `generation` and `era`, its numbers; `replacements` what was replaced and why;
    `recoveries` from where training went on where the mesh divides the model: `how`, `peers` or `mirrors`, after which
    `step`, and how many steps were done `again`; `islands` after which `step` islands that train alone went on without
    those that are `out`, took in those that are `back`, and how many samples of the former the model has not learnt
    from, as nobody had what they had learnt since the last exchange; `seconds_lost` what changes took from training
    (`how`); `steps_redone` counts the steps that were done, and done again after a restart from a checkpoint or from
    mirrors.
    """
    supervisors = [j for j in journals if j.role == "supervisor"]
    eras = []
    for journal in supervisors:
        for event in journal.events:
            workers, at = event.get("workers"), event.get("at")
            if event["name"] != "membership" or type(workers) is not int or type(at) is not int:
                continue
            members = event.get("members")
            eras.append(
                {
                    "seconds": round((at - supervisors[0].begin) / 1e9, 3),
                    "generation": journal.generation,
                    "era": int(event.get("era", 0)),
                    "workers": workers,
                    "members": members if isinstance(members, list) else list(range(workers)),
                }
            )
    if not eras:
        return None
    replacements = [
        {"processes": str(event.get("processes", "")), "why": str(event.get("why", ""))}
        for journal in supervisors
        for event in journal.events
        if event["name"] == "replacement"
    ]
    recoveries: list[dict[str, Any]] = []
    for event in (event for journal in supervisors for event in journal.events if event["name"] == "recovery"):
        how, step, again = event.get("how"), event.get("step"), event.get("again")
        if isinstance(step, int) and isinstance(again, int):
            recoveries.append({"how": str(how), "step": step, "again": again})
    islands: list[dict[str, Any]] = []
    for event in (event for journal in journals for event in journal.events if event["name"] == "islands"):
        step, out, back, lost = (event.get(key) for key in ("step", "out", "back", "samples_lost"))
        if isinstance(step, int) and isinstance(lost, int) and isinstance(out, list) and isinstance(back, list):
            islands.append({"step": step, "out": out, "back": back, "samples_lost": lost})
    pauses, redone = _restarts(journals)
    return {
        "over_time": [[era["seconds"], era["workers"]] for era in eras],
        "eras": eras,
        "replacements": replacements,
        "recoveries": recoveries,
        "islands": sorted(islands, key=lambda each: int(each["step"])),
        "seconds_lost": round(_recovering(journals) + pauses, 3),
        "steps_redone": redone + sum(each["again"] for each in recoveries),
        "how": HOW,
    }


def _recovering(journals: Sequence[ProcessJournal]) -> float:
    """Seconds that members took to meet anew."""
    longest: dict[tuple[int, int], float] = {}
    for journal in journals:
        for event in journal.events:
            era, seconds = event.get("era"), event.get("seconds")
            if event["name"] == "regrouped" and type(era) is int and isinstance(seconds, int | float):
                key = (journal.generation, era)
                longest[key] = max(longest.get(key, 0.0), float(seconds))
    return sum(longest.values())


def _restarts(journals: Sequence[ProcessJournal]) -> tuple[float, int]:
    """Seconds between the starts of a run, and the steps that were done in more than one of them."""
    workers = [j for j in journals if j.role == "worker" and len(j.steps)]
    pauses, redone = 0.0, 0
    numbers = sorted({j.generation for j in workers})
    for former, later in pairwise(numbers):
        before, after = ([j for j in workers if j.generation == number] for number in (former, later))
        first = min(float(j.steps[0, 0]) for j in after)
        done = np.unique(np.concatenate([j.steps[:, 0] for j in before]))
        redone += int((done >= first).sum())
        begins = [int(j.spans[:, 2].min()) for j in after if len(j.spans)]
        if begins and before[0].host == after[0].host:
            pauses += max(0.0, (min(begins) - max(j.end for j in before)) / 1e9)
    return pauses, redone
