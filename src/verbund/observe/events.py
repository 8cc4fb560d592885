"""The journal's writing side: what a process measured, appended to a file of its own.

A journal file is JSON lines. The first is the `head` (who writes, on which host, clocks); then:

    spans        flat rows [kind, step, start, length]: what this process did; kind indexes `SPANS`
    collectives  flat rows [step, index, arrival, blocked, done]: one collective as this process saw it: when it was
                 ready for it, from when it had nothing else to do, and when it went on
    steps        rows [step, loss, weight, samples, rate]: written by one process of an island
    links        bytes sent and received per peer so far, counted by the kernel
    memory       peak bytes so far
    event        anything rare: membership, checkpoints, failures, notes for the report

Times are nanoseconds of the host's monotonic clock. Wait and transfer are told apart when the journals of all
processes are merged, since only then is it known who arrived last.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SPANS = ("compute", "communicate", "data", "checkpoint", "validate", "start")
_CODES = {name: code for code, name in enumerate(SPANS)}
_FLUSH_SECONDS = 1.0


class Journal:
    """Appends what one process measures to `folder/ROLE-RANK-GENERATION.jsonl`.

    Recording costs well under a microsecond; encoding and writing happen once a second. When the file reaches
    `limit_mb`, spans and collectives are kept only for one step in 2, 4, 8, … and an event says so; steps, links and
    events are always kept.
    """

    def __init__(
        self, folder: Path, role: str, rank: int, generation: int, *, island: int = 0, limit_mb: float = 64.0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{role}-{rank}-{generation}.jsonl"
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._spans: list[int] = []
        self._collectives: list[int] = []
        self._steps: list[list[float]] = []
        self._lock = threading.Lock()
        self._limit = limit_mb * 1e6
        self._stride = 1
        self._due = time.monotonic() + _FLUSH_SECONDS
        self._write(
            {
                "t": "head",
                "role": role,
                "rank": rank,
                "island": island,
                "generation": generation,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "monotonic": time.monotonic_ns(),
                "wall": time.time(),
            }
        )

    def add(self, kind: str, step: int, start: int, end: int) -> None:
        """Records that this process did `kind` from `start` to `end` (`time.monotonic_ns`)."""
        if step % self._stride == 0:
            self._spans += (_CODES[kind], step, start, end - start)

    @contextmanager
    def span(self, kind: str, step: int) -> Iterator[None]:
        """Records the time the `with` block takes."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(kind, step, start, time.monotonic_ns())

    def collective(self, step: int, index: int, arrival: int, blocked: int, done: int) -> None:
        """Records one collective: ready for it at `arrival`, nothing else to do from `blocked`, over at `done`."""
        if step % self._stride == 0:
            self._collectives += (step, index, arrival, blocked, done)

    def step(self, step: int, loss: float, weight: float, samples: int, rate: float) -> None:
        """Records one optimiser step of the island: its global loss, weight, samples and learning rate."""
        self._steps.append([step, loss, weight, samples, rate])

    def event(self, name: str, **fields: Any) -> None:
        """Records something rare and writes it at once. `fields` are JSON values."""
        self._write({"t": "event", "name": name, "at": time.monotonic_ns(), "wall": time.time(), **fields})

    def totals(self, name: str, **fields: Any) -> None:
        """Records running totals (`links`, `memory`); a reader takes the last."""
        self._write({"t": name, "at": time.monotonic_ns(), **fields})

    @property
    def due(self) -> bool:
        """Whether a second has passed since the last flush."""
        return time.monotonic() >= self._due

    def flush(self) -> None:
        """Writes what was recorded."""
        spans, self._spans = self._spans, []
        collectives, self._collectives = self._collectives, []
        steps, self._steps = self._steps, []
        if spans:
            self._write({"t": "spans", "rows": spans})
        if collectives:
            self._write({"t": "collectives", "rows": collectives})
        if steps:
            self._write({"t": "steps", "rows": steps})
        self._due = time.monotonic() + _FLUSH_SECONDS

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
                self._file.flush()
            except (OSError, ValueError):
                return  # a full disk must not end a run; what was not written is missing from the report
            if self._file.tell() > self._limit:
                self._stride *= 2
                self._limit += self._limit / 2 ** min(self._stride, 16)
                self._file.write(
                    json.dumps({"t": "event", "name": "thinned", "at": time.monotonic_ns(), "stride": self._stride})
                    + "\n"
                )
