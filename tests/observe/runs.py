"""Journals of invented runs, written by the real writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from verbund.mesh.pipeline.schedule import actions, simulate
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
    _close(journals, hosts)
    return max(now)


def write_pipeline(
    run_dir: Path,
    schedule: str = "1f1b",
    *,
    ranks: int = 2,
    chunks: int = 1,
    micro_batches: int = 4,
    steps: int = 10,
    replicas: int = 1,
    outermost: bool = False,
    costs: Mapping[str, float] | None = None,
    slow: int | None = None,
    message: float = 0.0,
    hosts: bool = False,
) -> None:
    """Writes a run of pipelines: a pass takes the milliseconds that `costs` says (F 2, B 4, I 2, W 2), three times as
    many in the stage `slow`; a message takes `message`. Before a step are 2 ms of data, after it 3 ms of optimiser. The
    first step takes ten times as long.

    Args:
        outermost: whether the ranks of a pipeline are `replicas` apart, instead of next to each other.
    """
    costs = {"F": 2.0, "B": 4.0, "I": 2.0, "W": 2.0, **(costs or {})}
    lists = actions(schedule, ranks, chunks, micro_batches)
    timed = simulate(lists, lambda a: costs[a.kind] * (3 if a.stage == slow else 1), message)
    length = max(t.end for t in timed)
    journals = [Journal(run_dir / "journal", "worker", rank, 1) for rank in range(ranks * replicas)]
    now = time.monotonic_ns()
    for journal in journals:
        journal.add("start", 0, now, now + 100 * MS)
    journals[0].event("pipeline", schedule=schedule, ranks=ranks, chunks=chunks, micro_batches=micro_batches)
    now += 100 * MS
    for step in range(steps):
        unit = MS * (10 if step == 0 else 1)
        begin = now + 2 * MS
        for worker, journal in enumerate(journals):
            rank, replica = (worker // replicas, worker % replicas) if outermost else (worker % ranks, worker // ranks)
            at = begin + replica * MS // 2
            journal.add("data", step, at - 2 * MS, at)
            clock = 0.0
            for _, (kind, stage, micro_batch), start, end in (t for t in timed if t.rank == rank):
                if start > clock:
                    journal.received(step, stage, micro_batch, at + round(clock * unit), at + round(start * unit))
                journal.action(step, kind, stage, micro_batch, at + round(start * unit), at + round(end * unit))
                clock = end
            end_of_step = at + round(length * unit)
            journal.add("compute", step, end_of_step, end_of_step + 3 * MS)
        journals[0].step(step, 1 / (step + 1), 8.0, 8, 1e-3)
        now = begin + round(length * unit) + 4 * MS
    _close(journals, hosts)


def _close(journals: list[Journal], hosts: bool) -> None:
    """Ends them; `hosts`: each as if it were of a host of its own."""
    for rank, journal in enumerate(journals):
        journal.totals("memory", peak=1_000_000 * (rank + 1))
        journal.flush()
        if hosts:
            text = journal.path.read_text().replace('"host":"', f'"host":"h{rank}-', 1)
            journal.path.write_text(text)
        journal.close()
