"""Journals of invented runs, written by the real writer."""

from __future__ import annotations

import time
from pathlib import Path

from verbund.observe.events import Journal

MS = 1_000_000


def write_run(
    run_dir: Path,
    *,
    workers: int = 2,
    first: int = 0,
    steps: int = 10,
    generation: int = 1,
    slow: int | None = None,
    hosts: bool = False,
    begin: int | None = None,
    validate_every: int = 5,
    loss: float = 1.0,
) -> int:
    """Writes a run of synchronous steps: 2 ms data, 10 ms compute (20 ms for the worker `slow`), 3 ms communication,
    1 ms more compute. Starting takes 100 ms, a validation 50 ms. Returns the moment of its end (ns)."""
    journals = [Journal(run_dir / "journal", "worker", rank, generation) for rank in range(workers)]
    start = time.monotonic_ns() if begin is None else begin
    now = [start + 100 * MS] * workers
    for journal in journals:
        journal.add("start", 0, start, start + 100 * MS)
    for step in range(first, first + steps):
        arrivals = []
        for rank, journal in enumerate(journals):
            data = now[rank] + 2 * MS
            ready = data + (20 if rank == slow else 10) * MS
            journal.add("data", step, now[rank], data)
            journal.add("compute", step, data, ready)
            arrivals.append(ready)
        done = max(arrivals) + 3 * MS
        for rank, journal in enumerate(journals):
            journal.collective(step, 0, arrivals[rank], arrivals[rank], done)
            journal.add("compute", step, done, done + MS)
            now[rank] = done + MS
        journals[0].step(step, loss / (step + 1), 8.0, 8, 1e-3)
        if (step + 1) % validate_every == 0:
            for rank, journal in enumerate(journals):
                journal.add("validate", step + 1, now[rank], now[rank] + 50 * MS)
                now[rank] += 50 * MS
            metrics = {"loss": loss / (step + 1), "accuracy": 1 - 1 / (step + 2), "confusion_matrix": [[3, 1], [0, 4]]}
            journals[0].event("validation", step=step + 1, metrics=metrics)
    for rank, journal in enumerate(journals):
        journal.totals("links", links={"127.0.0.1:9": [100 * (rank + 1), 50]})
        journal.totals("memory", peak=1_000_000 * (rank + 1))
        journal.flush()
        if hosts:
            text = journal.path.read_text().replace('"host":"', f'"host":"h{rank}-', 1)
            journal.path.write_text(text)
        journal.close()
    return max(now)
