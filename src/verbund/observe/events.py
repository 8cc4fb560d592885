"""The journal's writing side: what a process measured, appended to a file of its own.

A journal file is JSON lines. The first is the `head` (who writes, on which host, clocks); then:

    spans        flat rows [kind, step, start, length]: what this process did; kind indexes `SPANS`
    collectives  flat rows [step, index, arrival, blocked, done]: one collective as this process saw it: when
                 it was ready for it, from when it had nothing else to do, and when it went on
    actions      flat rows [step, kind, stage, micro-batch, start, length]: one forward or backward pass of a
                 stage of a pipeline; kind indexes `ACTIONS`
    receives     flat rows [step, stage, micro-batch, blocked, done]: a stage had nothing else to do until the
                 message of a neighbour was there
    steps        rows [step, loss, weight, samples, rate]: written by one process of an island
    shares       flat rows [step, samples, weight]: what this worker had of a step; weight is 0 where it does not see
                 the loss
    links        bytes sent and received per peer so far, counted by the kernel; and `shared`, bytes that the process
                 has handed over to collectives through shared memory, which are no network's; and `wire`,
                 those per peer with the headers of all segments, an estimate
    memory       peak bytes so far
    held         bytes of the model's state that the process holds, by kind, and `whole`, those of one process alone
    exchange     how islands that train alone combined what they learnt: `observe.compression` reads it
    compression  what gradients travelled as, and what came of it: `observe.compression` reads it
    served       of a worker that pushes to servers: staleness of its updates, and counts
    server       what a parameter server counts
    energy       joules so far
    event        anything rare: membership, checkpoints, failures, notes for the report
    end          the process closed its journal

Times are nanoseconds of the host's monotonic clock. Wait and transfer are told apart when the journals of all
processes are merged, since only then is it known who arrived last.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verbund.comm.files import Location
from verbund.observe.appended import Appended, appended

SPANS = ("compute", "communicate", "data", "checkpoint", "validate", "start", "garbage")
"""`garbage` lies within the others: long pauses of Python's garbage collection."""
ACTIONS = "FBIW"
"""Forward, backward, backward for the input only, backward for the weights only. They count as compute."""
THINNED = frozenset(("compute", "communicate", "data", "garbage"))
"""Kinds of span that come with every step; when a journal is near its limit, only some steps' are kept."""
PART_BITS = 32
"""The index of a collective of some of the workers only holds, above these bits, how many they are and the lowest rank
among them: see `index_among`."""
RANK_BITS = 16
EXCHANGES = 1 << 21
"""The numbers of collectives from here on are exchanges between islands that train alone."""
NEVER = 1 << 62
"""The stride after the last thinning: no step's spans are kept."""
_CODES = {name: code for code, name in enumerate(SPANS)}
_ACTION_CODES = {name: code for code, name in enumerate(ACTIONS)}
_RARE = frozenset(_CODES) - THINNED
_FLUSH_SECONDS = 1.0
_THINNINGS = 8
_STEPS_KEPT = 1_000_000
"""How many steps at most wait to be written where there is no space."""


def index_among(ranks: Sequence[int], world: int, number: int) -> int:
    """The index of a collective among `ranks` of an island of `world` workers.

    Args:
        ranks: those who take part.
        world: all workers; a collective of all has its number for an index.
        number: below 2^32; the same for all who take part, and another for every other group of theirs.
    """
    if len(ranks) == world:
        return number
    return ((len(ranks) << RANK_BITS | min(ranks)) << PART_BITS) | number


def file_name(role: str, rank: int, generation: int, life: int = 0) -> str:
    """The name of a process's journal; `life` counts those that took its place within the generation."""
    return f"{role}-{rank}-{generation}{f'-{life}' if life else ''}.jsonl"


class Journal:
    """Appends what one process measures to a file of its own, see `file_name`. All methods may be called
    from any thread.

    Recording costs well under a microsecond; encoding and writing happen once a second. Up to half of
    `limit_mb` all is kept. From then on the stride doubles with every further sixteenth: of the kinds in
    `THINNED`, the collectives, actions, receives and shares only one step in 2, 4, 8, …, 256 is kept, and none from
    `limit_mb` on; an event says so each time. So a run of 64 times the steps that fill the first half is still
    covered to its end. Steps, links, events and the rare kinds are always kept.

    What cannot be written (a full disk) is dropped, and counted in an event as soon as there is space again; steps
    are written then.
    """

    def __init__(
        self,
        folder: Location,
        role: str,
        rank: int,
        generation: int,
        *,
        island: int = 0,
        limit_mb: float = 64.0,
        address: str | None = None,
        life: int = 0,
    ) -> None:
        self.path = folder / file_name(role, rank, generation, life)
        self._file: Appended | None = appended(self.path)
        self._size = self._file.size
        self._torn = self._size > 0  # whoever wrote here before may have died within a line
        self._dropped = 0
        # Rows are only ever appended at the end and cut off from the front: both are one operation under the
        # interpreter's lock, so that recording needs none of its own.
        self._spans: list[int] = []
        self._collectives: list[int] = []
        self._actions: list[int] = []
        self._receives: list[int] = []
        self._steps: list[tuple[int, float, float, int, float]] = []
        self._shares: list[int] = []
        self._lock = threading.RLock()
        self._limit = limit_mb * 1e6
        self._stride = 1
        self._thinnings = 0
        self._step = -1
        self._due = time.monotonic() + _FLUSH_SECONDS
        self._write(
            {
                "t": "head",
                "role": role,
                "rank": rank,
                "island": island,
                "generation": generation,
                "life": life,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "address": address,
                "monotonic": time.monotonic_ns(),
                "wall": time.time(),
            }
        )

    def add(self, kind: str, step: int, start: int, end: int) -> None:
        """Records that this process did `kind` from `start` to `end` (`time.monotonic_ns`)."""
        if step % self._stride == 0 or kind in _RARE:
            self._spans.extend((_CODES[kind], step, start, end - start))
        self._step = step

    @contextmanager
    def span(self, kind: str, step: int) -> Iterator[None]:
        """Records the time the `with` block takes."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(kind, step, start, time.monotonic_ns())

    def collective(self, step: int, index: int, arrival: int, blocked: int, done: int) -> None:
        """Records one collective: launched at `arrival`, blocked by it alone from `blocked`, over at
        `done`."""
        if step % self._stride == 0:
            self._collectives.extend((step, index, arrival, blocked, done))

    def action(self, step: int, kind: str, stage: int, micro_batch: int, start: int, end: int) -> None:
        """Records a pass of a stage of a pipeline; `kind` is one of `ACTIONS`. It counts as compute."""
        if step % self._stride == 0:
            self._actions.extend((step, _ACTION_CODES[kind], stage, micro_batch, start, end - start))
        self._step = step

    def received(self, step: int, stage: int, micro_batch: int, blocked: int, done: int) -> None:
        """Records that `stage` needed a neighbour's output or gradient, and had nothing else to do from
        `blocked` until `done`, before the action that takes it started."""
        if step % self._stride == 0:
            self._receives.extend((step, stage, micro_batch, blocked, done))

    def step(self, step: int, loss: float, weight: float, samples: int, rate: float) -> None:
        """Records one optimiser step of the island: its global loss, weight, samples and learning rate."""
        self._steps.append((step, loss, weight, samples, rate))

    def share(self, step: int, samples: int, weight: float) -> None:
        """Records what this worker had of a step: so many samples, which weigh that much in the loss."""
        if step % self._stride == 0:
            self._shares.extend((step, samples, round(weight) if 0 <= weight < 1 << 53 else 0))

    def garbage(self, start: int, end: int) -> None:
        """Records a pause for garbage collection, during or after the last recorded step."""
        if max(self._step, 0) % self._stride == 0:
            self._spans.extend((_CODES["garbage"], max(self._step, 0), start, end - start))

    def event(self, name: str, **fields: Any) -> None:
        """Records something rare and writes it at once. `fields` are JSON values."""
        self._write({"t": "event", "name": name, "at": time.monotonic_ns(), "wall": time.time(), **fields})

    def totals(self, name: str, **fields: Any) -> None:
        """Records running totals (`links`, `memory`, `held`, `energy`); a reader takes the last."""
        self._write({"t": name, "at": time.monotonic_ns(), **fields})

    @property
    def due(self) -> bool:
        """Whether a second has passed since the last flush."""
        return time.monotonic() >= self._due

    def flush(self) -> None:
        """Writes what was recorded."""
        with self._lock:
            for name, rows in (
                ("spans", self._spans),
                ("collectives", self._collectives),
                ("actions", self._actions),
                ("receives", self._receives),
                ("steps", self._steps),
                ("shares", self._shares),
            ):
                if count := len(rows):
                    # Steps are few and small, and what a run is told by: they wait for space.
                    wait = name == "steps" and count < _STEPS_KEPT
                    if self._write({"t": name, "rows": rows[:count]}, wait) or not wait:
                        del rows[:count]
            self._due = time.monotonic() + _FLUSH_SECONDS

    def close(self) -> None:
        """Writes the rest; a second call does nothing, and what is recorded afterwards is lost."""
        with self._lock:
            if self._file is None:
                return
            self.flush()
            self._dropped += bool(self._steps)
            self._write({"t": "end", "at": time.monotonic_ns()})
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any], wait: bool = False) -> bool:
        """Whether the line was written. If not, it counts as lost unless it waits to be written again."""
        raw = json.dumps(line, separators=(",", ":"), default=_plain).encode() + b"\n"
        with self._lock:
            if not self._append(raw):
                self._dropped += not wait
                return False
            if self._dropped:
                lost, self._dropped = self._dropped, 0
                self._event("dropped", lines=lost)
            # The first thinning comes at half of the limit, the last one at the limit.
            if self._size >= self._limit * (0.5 + 0.5 * self._thinnings / _THINNINGS):
                self._thin()
        return True

    def _thin(self) -> None:
        if self._stride == NEVER:
            return
        self._thinnings += 1
        self._stride = 2**self._thinnings if self._thinnings <= _THINNINGS else NEVER
        self._event("thinned", after=self._step, stride=self._stride)

    def _event(self, name: str, **fields: Any) -> None:
        line = {"t": "event", "name": name, "at": time.monotonic_ns(), "wall": time.time(), **fields}
        if not self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n"):
            self._dropped += 1

    def _append(self, raw: bytes) -> bool:
        """Appends a line whole, or leaves a torn one that the next line's newline will end."""
        if self._file is None:
            return False
        if self._torn:
            raw = b"\n" + raw
        rest = memoryview(raw)
        while rest:
            try:
                written = self._file.write(rest)
            except OSError:
                self._torn = len(rest) < len(raw) or self._torn
                return False  # a full disk must not end a run; what was not written is counted
            self._size += written
            rest = rest[written:]
        self._torn = False
        return True


class Unrecorded(Journal):
    """Takes what is measured, and keeps nothing: for what is recorded as a whole by whoever asked for it."""

    def __init__(self) -> None:
        pass

    def add(self, kind: str, step: int, start: int, end: int) -> None:
        """Nothing."""

    def collective(self, step: int, index: int, arrival: int, blocked: int, done: int) -> None:
        """Nothing."""

    def action(self, step: int, kind: str, stage: int, micro_batch: int, start: int, end: int) -> None:
        """Nothing."""

    def received(self, step: int, stage: int, micro_batch: int, blocked: int, done: int) -> None:
        """Nothing."""

    def step(self, step: int, loss: float, weight: float, samples: int, rate: float) -> None:
        """Nothing."""

    def share(self, step: int, samples: int, weight: float) -> None:
        """Nothing."""

    def garbage(self, start: int, end: int) -> None:
        """Nothing."""

    def event(self, name: str, **fields: Any) -> None:
        """Nothing."""

    def totals(self, name: str, **fields: Any) -> None:
        """Nothing."""

    @property
    def due(self) -> bool:
        """Never."""
        return False

    def flush(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _plain(value: Any) -> Any:
    """A value that JSON does not know: numpy's and torch's numbers as Python's, all else as text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 1) == 1:
        return item()
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)
