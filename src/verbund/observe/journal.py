"""The journal's reading side. No torch.

A journal is read while its process still writes, after the process was killed within a line, and from folders
that others wrote. So nothing in it is trusted: lines that are torn or of an unknown kind are passed over and
counted, rows of wrong types are dropped, and sizes are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from verbund.observe.events import ACTIONS, SPANS

FILE_LIMIT = 1 << 30
LINE_LIMIT = 1 << 26
EVENT_LIMIT = 20_000
HELD = ("parameters", "gradients", "optimizer", "ema", "buffers", "compression", "exchange", "whole")
"""What `held` says the bytes of."""
COMPRESSION = ("workers", "steps", "bytes_without", "bytes_with", "seconds", "left_out", "summed")
"""What `compression` and `exchange` count."""
_COUNTS = 64
_FILES_LIMIT = 100_000
_DAMAGE_LIMIT = 1000
_BIG = 1 << 62
STEP_BITS, STAGE_BITS, MICRO_BATCH_BITS = 30, 12, 20
"""Of the actions and receives that are read; larger numbers are taken for damage."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass
class ProcessJournal:
    """What one process of one generation measured. Times are nanoseconds of its host's monotonic clock.

    Args:
        spans: shape [spans, 4]: kind (an index of `events.SPANS`), step, start, length.
        collectives: shape [collectives, 5]: step, index, arrival, blocked, done.
        actions: shape [actions, 6]: step, kind (an index of `events.ACTIONS`), stage, micro-batch, start, length.
        receives: shape [receives, 5]: step, stage, micro-batch, blocked, done.
        steps: shape [steps, 5]: step, loss, weight, samples, rate.
        shares: shape [shares, 3]: step, samples, weight.
        thinned: shape [thinnings, 2]: first step, stride. From that step on, of the kinds in `events.THINNED`,
            the collectives, actions and receives, only the steps that the stride divides were kept.
        events: as written, the oldest first; at most `EVENT_LIMIT`.
        life: how many processes had its role and rank before it in its generation, and were lost.
        address: of its host, in a run over several.
        links: peer to bytes sent and received; None if not measured.
        wire: the same with all headers, estimated.
        shared_bytes: handed over to collectives through shared memory.
        peak_bytes: most memory; None if not measured.
        held: bytes of the model's state by kind, and `whole`; None if not measured.
        compression: what gradients travelled as (`method`) and counts of what came of it; None if as they were.
        exchange: how islands that train alone combined what they learnt (`method`, `compression`), and the same counts.
        served: of a worker that pushes to servers: `staleness` ([value, updates]) and counts.
        server: of a parameter server: its counts.
        joules: energy and how it was measured; None if not measured.
        begin: when the process is first heard of.
        end: when it is last heard of.
        wall: seconds since the epoch at `head`, and the monotonic clock then.
        ended: whether the process closed its journal.
        damaged: lines and rows that could not be used.
        truncated: whether the file is larger than what is read.
    """

    path: Path
    role: str
    rank: int
    generation: int
    island: int = 0
    life: int = 0
    host: str = ""
    address: str = ""
    pid: int = 0
    spans: Ints = field(default_factory=lambda: np.empty((0, 4), np.int64))
    collectives: Ints = field(default_factory=lambda: np.empty((0, 5), np.int64))
    actions: Ints = field(default_factory=lambda: np.empty((0, 6), np.int64))
    receives: Ints = field(default_factory=lambda: np.empty((0, 5), np.int64))
    steps: Floats = field(default_factory=lambda: np.empty((0, 5), np.float64))
    shares: Ints = field(default_factory=lambda: np.empty((0, 3), np.int64))
    thinned: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    events: list[dict[str, Any]] = field(default_factory=list)
    links: dict[str, tuple[int, int]] | None = None
    wire: dict[str, tuple[int, int]] | None = None
    shared_bytes: int | None = None
    peak_bytes: int | None = None
    held: dict[str, int] | None = None
    compression: dict[str, Any] | None = None
    exchange: dict[str, Any] | None = None
    served: dict[str, Any] | None = None
    server: dict[str, float] | None = None
    joules: tuple[float, str] | None = None
    begin: int = 0
    end: int = 0
    wall: tuple[float, int] = (0.0, 0)
    ended: bool = False
    damaged: int = 0
    truncated: bool = False

    @property
    def name(self) -> str:
        """The process in words, e.g. `worker 1`."""
        return f"{self.role} {self.rank}" if self.island == 0 else f"{self.role} {self.rank} of island {self.island}"

    @property
    def last_heard(self) -> float:
        """When the process is last heard of, in seconds since the epoch."""
        return self.wall[0] + (self.end - self.wall[1]) / 1e9


def read(folder: Path, *, file_limit: int = FILE_LIMIT, line_limit: int = LINE_LIMIT) -> list[ProcessJournal]:
    """All journals of a run, by generation, role, island and rank.

    Args:
        folder: the run's `journal/`; if there is none, the result is empty.
        file_limit: bytes of one file that are read; what follows is left out and `truncated` says so.
        line_limit: bytes of one line; longer ones are passed over.

    A file that is unreadable, or has no head, is left out.
    """
    journals = []
    try:
        paths = sorted(folder.glob("*.jsonl"))[:_FILES_LIMIT]
    except OSError:
        return []
    for path in paths:
        journal = _read_file(path, file_limit, line_limit)
        if journal is not None:
            journals.append(journal)
    return sorted(journals, key=lambda j: (j.generation, j.role != "worker", j.role, j.island, j.rank, j.life))


class _Rows:
    """Rows as they come in, line by line, of a fixed number of columns."""

    def __init__(self, columns: int, dtype: type[np.int64] | type[np.float64]) -> None:
        self._columns = columns
        self._dtype = dtype
        self._parts: list[NDArray[Any]] = []

    def add(self, rows: Any) -> bool:
        """Whether `rows` is a list of numbers of the right number of columns and range."""
        if not isinstance(rows, list):
            return False
        try:
            array = np.array(rows) if self._dtype is np.int64 else _floats(rows)
        except (ValueError, TypeError, OverflowError):
            return False
        if not array.size:
            return True
        wanted = "i" if self._dtype is np.int64 else "f"
        if array.dtype.kind != wanted or array.size % self._columns:
            return False
        if array.ndim != (1 if self._dtype is np.int64 else 2):
            return False
        array = array.astype(self._dtype, copy=False).reshape(-1, self._columns)
        if self._dtype is np.int64 and (array.min() < -_BIG or array.max() > _BIG):
            return False
        self._parts.append(array)
        return True

    def array(self) -> NDArray[Any]:
        if not self._parts:
            return np.empty((0, self._columns), self._dtype)
        whole = np.concatenate(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts = [whole]
        return whole


def _floats(rows: list[Any]) -> Floats:
    if not all(isinstance(row, list) and all(isinstance(v, (int, float)) or v is None for v in row) for row in rows):
        raise ValueError("not rows of numbers")
    return np.array(rows, np.float64)


def _read_file(path: Path, file_limit: int, line_limit: int) -> ProcessJournal | None:
    spans, collectives, steps = _Rows(4, np.int64), _Rows(5, np.int64), _Rows(5, np.float64)
    actions, receives, shares = _Rows(6, np.int64), _Rows(5, np.int64), _Rows(3, np.int64)
    rows = {
        "spans": spans,
        "collectives": collectives,
        "actions": actions,
        "receives": receives,
        "steps": steps,
        "shares": shares,
    }
    journal: ProcessJournal | None = None
    heard: list[int] = []
    damaged = 0
    thinned: list[tuple[int, int]] = []
    try:
        with open(path, "rb") as file:
            for raw in _lines(file, file_limit, line_limit):
                line = _parse(raw)
                if line is None:
                    damaged += 1
                    if damaged > _DAMAGE_LIMIT and journal is None:
                        return None
                    continue
                kind = line.get("t")
                if kind == "head":
                    journal = journal or _head(path, line)
                elif kind in rows:
                    damaged += not rows[kind].add(line.get("rows"))
                elif journal is not None and isinstance(kind, str):
                    _record(journal, kind, line, thinned)
                if _time(line.get("at")) is not None:
                    heard.append(line["at"])
                    heard = [min(heard), max(heard)]
            truncated = file.tell() < path.stat().st_size and file.tell() >= file_limit
    except OSError:
        return None
    if journal is None:
        return None
    journal.spans, bad_spans = _sound_spans(spans.array())
    journal.collectives, bad_collectives = _sound_collectives(collectives.array())
    journal.actions, bad_actions = _sound_actions(actions.array())
    journal.receives, bad_receives = _sound_receives(receives.array())
    journal.steps = _sound_steps(steps.array())
    every_share = shares.array()
    journal.shares = every_share[(every_share >= 0).all(axis=1)]
    journal.thinned = np.array(thinned, np.int64).reshape(-1, 2)
    journal.damaged = damaged + bad_spans + bad_collectives + bad_actions + bad_receives
    journal.truncated = truncated
    _bound(journal, heard)
    return journal


def _lines(file: BinaryIO, file_limit: int, line_limit: int) -> Iterator[bytes]:
    """Lines of bounded length, until `file_limit`; of a line too long only what does not parse comes out."""
    left = file_limit
    while left > 0:
        raw = file.readline(min(line_limit, left))
        if not raw:
            return
        left -= len(raw)
        whole = raw.endswith(b"\n")
        while not whole and left > 0:
            rest = file.readline(min(line_limit, left))
            if not rest:
                break
            left -= len(rest)
            raw = b"?"  # too long: counts as damaged
            whole = rest.endswith(b"\n")
        if raw.strip():
            yield raw


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _time(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _BIG else None


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and 0 <= value < _BIG else None


def _head(path: Path, line: dict[str, Any]) -> ProcessJournal | None:
    role, rank, generation = line.get("role"), _count(line.get("rank")), _count(line.get("generation"))
    start = _time(line.get("monotonic"))
    if not isinstance(role, str) or rank is None or generation is None or start is None:
        return None
    wall = line.get("wall")
    return ProcessJournal(
        path,
        role[:64],
        rank,
        generation,
        island=_count(line.get("island")) or 0,
        life=_count(line.get("life")) or 0,
        host=str(line.get("host", ""))[:255],
        address=str(line.get("address") or "")[:255],
        pid=_count(line.get("pid")) or 0,
        begin=start,
        end=start,
        wall=(float(wall) if isinstance(wall, (int, float)) else 0.0, start),
    )


def _record(journal: ProcessJournal, kind: str, line: dict[str, Any], thinned: list[tuple[int, int]]) -> None:
    if kind == "event":
        after, stride = line.get("after"), _count(line.get("stride"))
        if line.get("name") == "thinned" and type(after) is int and -1 <= after < _BIG and stride:
            thinned.append((after + 1, stride))
        if isinstance(line.get("name"), str) and len(journal.events) < EVENT_LIMIT:
            if (at := _time(line.get("at"))) is not None and journal.wall[0]:
                line["wall"] = journal.wall[0] + (at - journal.wall[1]) / 1e9  # whatever was done to the clock since
            journal.events.append(line)
    elif kind == "links":
        journal.links = _links(line.get("links"))
        journal.wire = _links(line.get("wire"))
        journal.shared_bytes = _count(line.get("shared"))
    elif kind == "memory":
        journal.peak_bytes = _count(line.get("peak"))
    elif kind == "held":
        counts = {name: _count(line[name]) for name in HELD if name in line}
        journal.held = {name: count for name, count in counts.items() if count is not None}
    elif kind in ("compression", "exchange"):
        counts = {name: line.get(name) for name in COMPRESSION}
        if all(isinstance(n, (int, float)) and 0 <= n < _BIG for n in counts.values()):
            named = {name: str(line[name])[:64] for name in ("method", "compression") if name in line}
            setattr(journal, kind, {"method": "", **named, **counts})
    elif kind == "served":
        journal.served = {**_counts(line), "staleness": _histogram(line.get("staleness"))}
    elif kind == "server":
        journal.server = _counts(line)
    elif kind == "energy":
        joules = line.get("joules")
        if isinstance(joules, (int, float)) and joules >= 0:
            journal.joules = (float(joules), str(line.get("how", ""))[:1000])
    elif kind == "end":
        journal.ended = True


def _counts(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line that are not negative."""
    found = {}
    for key, value in list(line.items())[:_COUNTS]:
        if key != "at" and type(value) in (int, float) and 0 <= value < _BIG:
            found[str(key)[:64]] = value
    return found


def _histogram(raw: Any) -> list[tuple[int, int]]:
    """Pairs of whole numbers, value and count; what is none is left out."""
    pairs = (
        [pair for pair in raw[:EVENT_LIMIT] if isinstance(pair, list) and len(pair) == 2]
        if isinstance(raw, list)
        else []
    )
    return [(v, n) for v, n in pairs if type(v) is int and type(n) is int and 0 <= v < _BIG and 0 <= n < _BIG]


def _links(raw: Any) -> dict[str, tuple[int, int]] | None:
    if not isinstance(raw, dict):
        return None
    links = {}
    for peer, counts in list(raw.items())[:EVENT_LIMIT]:
        if isinstance(counts, list) and len(counts) == 2:
            sent, received = _count(counts[0]), _count(counts[1])
            if sent is not None and received is not None:
                links[str(peer)[:255]] = (sent, received)
    return links


def _sound_spans(rows: Ints) -> tuple[Ints, int]:
    good = (rows[:, 0] >= 0) & (rows[:, 0] < len(SPANS)) & (rows[:, 2] >= 0) & (rows[:, 3] >= 0)
    good &= rows[:, 2] < _BIG - rows[:, 3]
    return (rows, 0) if good.all() else (rows[good], int((~good).sum()))


def _sound_collectives(rows: Ints) -> tuple[Ints, int]:
    good = (rows[:, 0] >= 0) & (rows[:, 1] >= 0) & (rows[:, 2] >= 0) & (rows[:, 3] >= 0) & (rows[:, 4] >= rows[:, 3])
    return (rows, 0) if good.all() else (rows[good], int((~good).sum()))


def _sound_actions(rows: Ints) -> tuple[Ints, int]:
    step, kind, stage, micro_batch, start, length = rows.T
    good = _sound_place(step, stage, micro_batch) & (kind >= 0) & (kind < len(ACTIONS))
    good &= (start >= 0) & (length >= 0) & (start < _BIG - length)
    return (rows, 0) if good.all() else (rows[good], int((~good).sum()))


def _sound_receives(rows: Ints) -> tuple[Ints, int]:
    step, stage, micro_batch, blocked, done = rows.T
    good = _sound_place(step, stage, micro_batch) & (blocked >= 0) & (done >= blocked)
    return (rows, 0) if good.all() else (rows[good], int((~good).sum()))


def _sound_place(step: Ints, stage: Ints, micro_batch: Ints) -> NDArray[np.bool_]:
    good: NDArray[np.bool_] = (step >= 0) & (step < 1 << STEP_BITS) & (stage >= 0) & (stage < 1 << STAGE_BITS)
    return good & (micro_batch >= 0) & (micro_batch < 1 << MICRO_BATCH_BITS)


def _sound_steps(rows: Floats) -> Floats:
    """Steps are whole numbers; of one recorded twice the last row holds. A loss may be anything, also NaN."""
    with np.errstate(invalid="ignore"):
        rows = rows[(rows[:, 0] >= 0) & (rows[:, 0] < 2**53)]
    if len(rows) > 1 and not (np.diff(rows[:, 0]) > 0).all():
        _, first_from_behind = np.unique(rows[::-1, 0], return_index=True)
        rows = rows[::-1][first_from_behind]
    return rows


def _bound(journal: ProcessJournal, heard: list[int]) -> None:
    """The process's life: from the first to the last thing it recorded."""
    begins, ends = [journal.begin, *heard], [journal.end, *heard]
    if len(journal.spans):
        begins.append(int(journal.spans[:, 2].min()))
        ends.append(int((journal.spans[:, 2] + journal.spans[:, 3]).max()))
    if len(journal.collectives):
        begins.append(int(journal.collectives[:, 3].min()))
        ends.append(int(journal.collectives[:, 4].max()))
    if len(journal.actions):
        begins.append(int(journal.actions[:, 4].min()))
        ends.append(int((journal.actions[:, 4] + journal.actions[:, 5]).max()))
    if len(journal.receives):
        begins.append(int(journal.receives[:, 3].min()))
        ends.append(int(journal.receives[:, 4].max()))
    journal.begin, journal.end = min(begins), max(ends)
