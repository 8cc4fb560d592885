"""The page of a report, from a run's summary and timeline."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from verbund.errors import RunFailed
from verbund.observe.journal import ProcessJournal, read
from verbund.observe.report import sections
from verbund.observe.report.membership import membership
from verbund.observe.report.network import network
from verbund.observe.report.pipeline import pipeline
from verbund.observe.report.rounds import rounds
from verbund.observe.report.servers import servers
from verbund.observe.report.statistics import statistics
from verbund.observe.report.stragglers import stragglers
from verbund.observe.report.text import section
from verbund.observe.summary import failures, read_settings
from verbund.observe.timeline import Timeline, merge


def write_report(run_dir: Path, summary: Mapping[str, Any], timeline: Timeline | None = None) -> Path:
    """Writes `report.html` into a run's directory, in one step. The page needs nothing but itself.

    Args:
        run_dir: the run.
        summary: what `summarise` gave.
        timeline: if it was merged already.

    Raises:
        RunFailed: if the file cannot be written.
    """
    journals = read(run_dir / "journal")
    timeline = merge(journals) if timeline is None else timeline
    text = page(run_dir.resolve().name, summary, timeline, journals, read_settings(run_dir))
    target = run_dir / "report.html"
    partial = run_dir / ".report.html.partial"
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunFailed(f"cannot be written: {error.strerror or error}", where=str(target)) from None
    return target


def page(
    name: str,
    summary: Mapping[str, Any],
    timeline: Timeline,
    journals: list[ProcessJournal],
    settings: Mapping[str, Any],
) -> str:
    """The whole page as HTML.

    Args:
        name: the run's.
        summary: what `summarise` gave; a field that is missing leaves its part of the page out.
        timeline: where the workers' time went.
        journals: for the tracebacks of failures.
        settings: the run's job as plain values.
    """
    style, script = _asset("style.css"), _asset("script.js")
    parts = [
        sections.heading(name, summary, settings),
        section("What held this run back", sections.verdict(summary)),
        section("Curves", sections.curves(summary)),
        section("Where the time went", sections.time(summary, timeline)),
        section("Stragglers", stragglers(summary)),
        section("Pipeline", pipeline(summary, journals)),
        section("Exchange between islands", sections.exchange(summary)),
        section("Parameter servers", servers(summary)),
        section("Workers that came and went", membership(summary)),
        section("Rounds", rounds(summary)),
        section("How clients' data differ", statistics(summary)),
        section("Compressed gradients", sections.compression(summary)),
        section("Network", network(summary, settings)),
        section("Bytes, memory, energy", sections.costs(summary)),
        section("Failures", sections.trouble(failures(journals, traces=True))),
        section("Notes", sections.notes(summary)),
        section("Not measured", sections.unmeasured(summary)),
        section("Settings", sections.settings(summary, settings)),
    ]
    # Only this very script may run, so that no text of a run can, should one ever pass unescaped.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(name)}: report</title><style>{style}</style></head>\n"
        f"<body><main>{chr(10).join(parts)}</main><script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")
