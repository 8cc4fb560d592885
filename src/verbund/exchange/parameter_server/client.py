"""A client: pushes to and pulls from whichever servers hold the blocks.

Parts are grouped by the primary of their block in the newest view. What a server has not acknowledged, because it is
gone or another has the block now, is sent again by the next view: servers know what they have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbund.comm.shared_memory.identity import Unavailable
from verbund.comm.wire import Call, Calls, Closed, Credentials, Deadline, Message, Payload, Place, WireError, dial
from verbund.errors import RunFailed, VerbundError
from verbund.exchange.parameter_server import records
from verbund.exchange.parameter_server.exposed import Outbox, Window
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Outcome, Part, Push
from verbund.exchange.parameter_server.row_cache import RowCache
from verbund.exchange.parameter_server.table_runs import TableRuns
from verbund.exchange.parameter_server.view import Seat, View
from verbund.exchange.parameter_server.watch import Watch

_TURN = 0.2  # seconds until who was told `moved` looks again, if no newer view comes
_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class _Request:
    """What goes to one server: of some parts."""

    kind: str
    fields: dict[str, Any]
    arrays: Mapping[str, Payload]
    into: Mapping[str, Place]


class Pending:
    """Requests under way to several servers; `result` must be asked for.

    Args:
        client: whose.
        blocks: of the parts, in order.
        make: the request of some parts, by their places.
        take: what to do with the answer to it.
        seconds: within which all must be answered.
        into: flat tensors by block, of what is pulled whole.
    """

    def __init__(
        self,
        client: Client,
        blocks: Sequence[int],
        make: Callable[[list[int]], _Request],
        take: Callable[[list[int], Message], None],
        seconds: float,
        into: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._client = client
        self._blocks = blocks
        self._make = make
        self._take = take
        self._until = time.monotonic() + seconds
        self._left = set(range(len(blocks)))
        self._view: View = client._watch.newest()
        self._trouble: dict[int, str] = {}
        self._calls: list[tuple[int, list[int], Call]] = []
        self._into = into
        self._windows: dict[int, Window | None] = {}
        self._start()

    def result(self) -> None:
        """Waits until all servers have answered.

        Raises:
            RunFailed: if one did not in time; it says which.
            VerbundError: a server's refusal.
        """
        while True:
            self._collect()
            if not self._left:
                return
            if self._until <= time.monotonic():
                raise self._late()
            # Whoever is gone, or has moved, is replaced by a newer view; a server may be behind it for a moment.
            self._client._watch.newer(self._view.number, min(_TURN, max(self._until - time.monotonic(), 0.0)))
            self._start()

    def _start(self) -> None:
        self._view = view = self._client._watch.newest()
        groups: dict[int, list[int]] = {}
        for place in sorted(self._left):
            groups.setdefault(view.primary(self._blocks[place]), []).append(place)
        for rank, places in groups.items():
            request = self._make(places)
            left = max(self._until - time.monotonic(), 1e-3)
            fields = {
                **request.fields,
                "model": self._client._model,
                "view": view.number,
                "seconds": left - min(1.0, left / 10),  # so that the server's reason is here before the end
            }
            try:
                calls = self._client._to(rank, view.seats[rank])
                arrays = request.arrays
                if (window := self._client._window(rank, view.seats[rank], calls)) is not None:
                    arrays = self._client._by_place(fields, arrays)
                self._windows[rank] = window
                call = calls.start(request.kind, fields, left, request.into, **arrays)
            except WireError as error:
                self._trouble[rank] = str(error)
            else:
                self._calls.append((rank, places, call))

    def _collect(self) -> None:
        calls, self._calls = self._calls, []
        failure: VerbundError | None = None
        for rank, places, call in calls:
            if failure is not None:
                call.give_up()
                continue
            try:
                answer = call.result()
            except Closed as error:
                self._trouble[rank] = str(error)
            except Deadline as error:
                before = f" (before that {self._trouble[rank]})" if rank in self._trouble else ""
                failure = RunFailed(f"{error}{before}", where=self._name(rank))
            except WireError as error:
                failure = RunFailed(f"it cannot be talked to: {error}", where=self._name(rank))
            except VerbundError as error:
                failure = error
            else:
                if answer.kind == "moved":
                    self._trouble[rank] = f"it has other blocks by view {answer.fields.get('view')}"
                    continue
                try:
                    self._look(rank, places, answer)
                except Closed as error:
                    self._trouble[rank] = str(error)
                    continue
                self._take(places, answer)
                self._left.difference_update(places)
        if failure is not None:
            raise failure

    def _look(self, rank: int, places: list[int], answer: Message) -> None:
        """Copies what lies in the server's memory to where it is wanted; its version is the one that it had then."""
        given = answer.fields.get("places")
        window = self._windows.get(rank)
        if window is None or self._into is None or not given:
            return
        wanted = [block for place in places if (block := self._blocks[place]) in self._into]
        for number, (block, place) in enumerate(zip(wanted, given, strict=True)):
            if place is not None:
                replaced = partial(self._replaced, rank, block)
                version = window.copy(block, place, self._into[block], self._until, replaced)
                answer.fields["versions"][number] = version

    def _replaced(self, rank: int, block: int) -> bool:
        newest = self._client._watch.newest()
        return newest.seats[rank] != self._view.seats[rank] or newest.primary(block) != rank

    def _late(self) -> RunFailed:
        block = self._blocks[min(self._left)]
        rank = self._view.primary(block)
        name = self._client._plan.blocks[block].name
        why = self._trouble.get(rank, "nothing came")
        what = f"block {block} (`{name}`) could not be reached in time by view {self._view.number}: {why}"
        return RunFailed(what, where=self._name(rank))

    def _name(self, rank: int) -> str:
        return _name(rank, self._view.seats[rank])


@dataclass(frozen=True)
class _Run:
    """Rows of one block that are pulled: which, where they stand among those wanted, and where they are received to."""

    table: str
    block: int
    places: Tensor
    rows: Tensor
    values: Tensor
    direct: bool
    """Whether that is where they are wanted."""


class Pushing:
    """A push under way."""

    def __init__(self, pending: Pending, outcomes: list[Outcome | None], versions: dict[int, int]) -> None:
        self._pending = pending
        self._outcomes = outcomes
        self._versions = versions

    def result(self) -> list[Outcome]:
        """What became of each part, once all servers that hold them have it; see `Pending.result`."""
        self._pending.result()
        return [outcome for outcome in self._outcomes if outcome is not None]

    @property
    def versions(self) -> dict[int, int]:
        """Of what was pulled with it, by block."""
        return self._versions


class Pulling:
    """A pull under way."""

    def __init__(self, pending: Pending, versions: dict[int, int]) -> None:
        self._pending = pending
        self._versions = versions

    def result(self) -> dict[int, int]:
        """The versions by block, once all values are in their places; see `Pending.result`."""
        self._pending.result()
        return self._versions


@dataclass(frozen=True)
class Rows:
    """Rows of a table.

    Args:
        values: [rows, width].
        versions: by block, the oldest that a row has.
    """

    values: Tensor
    versions: dict[int, int]


class Client:
    """One process of an island. One server's answers come in order: a pull that waits for others holds later ones up.

    Args:
        plan: of the run.
        island: its number; None: it is of none, and reads.
        generation: of the island.
        watch: tells of views.
        credentials: for dialling servers.
        deadline: seconds within which a request must be answered, failovers included.
        row_cache: for how many tickets a row of a table may be taken again; 0: it is always pulled.
        cache_bytes: that the cache of one table may have.
        patience: seconds of a server's silence after which requests to it are sent again.
    """

    def __init__(
        self,
        plan: Plan,
        island: int | None,
        generation: int,
        watch: Watch,
        credentials: Credentials = None,
        deadline: float = 60.0,
        row_cache: int = 0,
        cache_bytes: int = _CACHE_BYTES,
        patience: float = 30.0,
    ) -> None:
        self._patience = patience
        self._plan = plan
        self._model = plan.model
        self._island = island
        self._generation = generation
        self._watch = watch
        self._credentials = credentials
        self._deadline = deadline
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[Seat, Calls]] = {}
        self._closed = threading.Event()
        self._outbox = Outbox.make()
        self._windows: dict[int, Window | None] = {}
        self._seen: dict[int, Seat] = {}
        self._looking = threading.Lock()
        self.tables = TableRuns(plan)
        self.cache = RowCache(row_cache, cache_bytes) if row_cache else None
        threading.Thread(target=self._follow, name="views", daemon=True).start()

    def start_push(
        self,
        ticket: int,
        parts: Sequence[Part],
        *,
        weight: float,
        share: int = 0,
        scale: float = 1.0,
        rate: float = 1.0,
        low: int = 0,
        into: Mapping[int, Tensor] | None = None,
        least: int = 0,
    ) -> Pushing:
        """Pushes what was learnt from a share of a ticket; tensors must stay as they are until the result is there.

        Args:
            ticket: see `Push`, as for the following.
            parts: of all blocks that this process has something of.
            weight: see there.
            share: see there.
            scale: see there.
            rate: see there.
            low: see there.
            into: pulls the blocks of `parts` that are no tables, after the push, into these flat tensors.
            least: the version that they must have.
        """
        outcomes: list[Outcome | None] = [None] * len(parts)
        versions: dict[int, int] = {}
        parts = self._in_outbox(parts)
        assert self._island is not None
        whole = Push(self._island, self._generation, ticket, share, scale, weight, rate, low, parts)

        def make(places: list[int]) -> _Request:
            push = whole.of_blocks({parts[place].block for place in places})
            fields = {**push.fields(), "pull": into is not None, "least": least}
            return _Request("push", fields, push.arrays(), _places(into, self._dense(parts, places)))

        def take(places: list[int], answer: Message) -> None:
            for place, outcome in zip(places, records.outcomes_of(answer.fields), strict=True):
                outcomes[place] = outcome
            if into is not None:
                versions.update(zip(self._dense(parts, places), answer.fields["versions"], strict=True))

        blocks = [part.block for part in parts]
        return Pushing(Pending(self, blocks, make, take, self._deadline, into), outcomes, versions)

    def push(self, ticket: int, parts: Sequence[Part], *, weight: float, **more: Any) -> list[Outcome]:
        """Pushes and waits; see `start_push`."""
        return self.start_push(ticket, parts, weight=weight, **more).result()

    def push_pull(
        self,
        ticket: int,
        parts: Sequence[Part],
        into: Mapping[int, Tensor],
        *,
        weight: float,
        least: int = 0,
        **more: Any,
    ) -> tuple[list[Outcome], dict[int, int]]:
        """Pushes, and pulls the same blocks after it; outcomes by part and versions by block. See `start_push`."""
        pushing = self.start_push(ticket, parts, weight=weight, into=into, least=least, **more)
        return pushing.result(), pushing.versions

    def start_pull(self, into: Mapping[int, Tensor], least: int = 0) -> Pulling:
        """Pulls blocks that are no tables into flat, contiguous tensors; waits until they have the least version."""
        blocks = sorted(into)
        versions: dict[int, int] = {}

        def make(places: list[int]) -> _Request:
            found = [blocks[place] for place in places]
            fields = {"client": self._island, "parts": [[block, None] for block in found], "least": least}
            return _Request("pull", fields, {}, _places(into, found))

        def take(places: list[int], answer: Message) -> None:
            versions.update(zip([blocks[place] for place in places], answer.fields["versions"], strict=True))

        return Pulling(Pending(self, blocks, make, take, self._deadline, into), versions)

    def pull(self, into: Mapping[int, Tensor], least: int = 0) -> dict[int, int]:
        """Pulls and waits; the versions by block. See `start_pull`."""
        return self.start_pull(into, least).result()

    def pull_rows(self, wanted: Mapping[str, Tensor], ticket: int = 0, least: int = 0) -> dict[str, Rows]:
        """Pulls rows of tables, of all servers at once.

        Args:
            wanted: by table the rows, int64, ascending, each once.
            ticket: for which they are needed: those that were pulled for one not long before may come of the cache.
            least: the version that they must have.
        """
        found = {
            table: torch.empty((len(rows), self.tables.width(table)), dtype=self.tables.dtype(table))
            for table, rows in wanted.items()
        }
        versions = {table: torch.zeros(len(rows), dtype=torch.int64) for table, rows in wanted.items()}
        asked: list[_Run] = []
        for table, rows in wanted.items():
            places, absent = torch.arange(len(rows)), rows
            if self.cache is not None:
                here, versions[table] = self.cache.take(table, rows, ticket, least, found[table])
                places = torch.nonzero(~here).flatten()
                absent = rows[places]
            direct = len(absent) == len(rows)
            received = found[table] if direct else torch.empty_like(found[table][: len(absent)])
            for block, low, high in self.tables.split(table, absent):
                asked.append(_Run(table, block, places[low:high], absent[low:high], received[low:high], direct))

        def make(numbers: list[int]) -> _Request:
            runs = [asked[number] for number in numbers]
            fields = {"client": self._island, "parts": [[run.block, len(run.rows)] for run in runs], "least": least}
            rows = {f"r{place}": run.rows for place, run in enumerate(runs)}
            return _Request("pull", fields, rows, {f"v{place}": run.values for place, run in enumerate(runs)})

        def take(numbers: list[int], answer: Message) -> None:
            for number, version in zip(numbers, answer.fields["versions"], strict=True):
                run = asked[number]
                versions[run.table][run.places] = version
                if not run.direct:
                    found[run.table][run.places] = run.values
                if self.cache is not None:
                    self.cache.put(run.table, run.rows, ticket, versions[run.table][run.places], run.values)

        if asked:
            Pending(self, [run.block for run in asked], make, take, self._deadline).result()
        return {table: Rows(found[table], self._oldest(table, rows, versions[table])) for table, rows in wanted.items()}

    def begin(
        self, block: int, values: Tensor | None, version: int = 0, optimizer: Mapping[str, Tensor] | None = None
    ) -> None:
        """Gives a block its first values, unless it has some; see `Holdings.create`."""
        state = optimizer or {}
        named = [[name, str(tensor.dtype).removeprefix("torch.")] for name, tensor in state.items()]
        arrays: dict[str, Payload] = {f"o{number}": tensor for number, tensor in enumerate(state.values())}
        if values is not None:
            arrays["values"] = values.reshape(-1)
        fields = {"client": self._island, "block": block, "version": version, "optimizer": named}
        self._one("begin", block, fields, arrays)

    def load(self, folder: str, version: int = 0) -> None:
        """Has all blocks that have not begun read from a checkpoint by their servers."""
        blocks = list(range(len(self._plan.blocks)))

        def make(places: list[int]) -> _Request:
            fields = {"client": self._island, "blocks": places, "folder": folder, "version": version}
            return _Request("load", fields, {}, {})

        Pending(self, blocks, make, lambda places, answer: None, self._deadline).result()

    def ask_all(self, kind: str, fields: Callable[[int], dict[str, Any]]) -> list[Message | Exception]:
        """Asks every server of the newest view the same, by rank: what each answers, or why it does not.

        Args:
            kind: what is asked.
            fields: of a server's request.
        """
        view = self._watch.newest()
        calls: list[Call | Exception] = []
        for rank, seat in enumerate(view.seats):
            told = {**fields(rank), "model": self._model, "view": view.number, "client": self._island}
            try:
                calls.append(self._to(rank, seat).start(kind, told, self._deadline))
            except WireError as error:
                calls.append(error)
        answers: list[Message | Exception] = []
        for call in calls:
            if isinstance(call, Exception):
                answers.append(call)
                continue
            try:
                answers.append(call.result())
            except (WireError, VerbundError) as error:
                answers.append(error)
        return answers

    def close(self) -> None:
        """Ends all connections."""
        self._closed.set()
        with self._lock:
            calls = [calls for _, calls in self._calls.values()]
            self._calls.clear()
        for each in calls:
            each.close()

    def _in_outbox(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Parts whose values lie where servers of this host can read them, if there are any."""
        if self._outbox is None or not any(self._windows.values()):
            return parts
        dense = {p.block: p.values for p in parts if p.values is not None and p.rows is None}
        moved = self._outbox.put(dense)
        return [replace(p, values=moved[p.block]) if p.block in dense else p for p in parts]

    def _by_place(self, fields: dict[str, Any], arrays: Mapping[str, Payload]) -> Mapping[str, Payload]:
        """What of a request's arrays travels, where the server reads the rest in this client's memory; `fields` gets
        their places."""
        fields["looks"] = True
        if "parts" not in fields or self._outbox is None:
            return arrays
        places: list[int | None] = []
        left = dict(arrays)
        for number in range(len(fields["parts"])):
            values = left.get(f"v{number}")
            place = self._outbox.place(values) if isinstance(values, Tensor) else None
            places.append(place)
            if place is not None:
                del left[f"v{number}"]
        if any(place is not None for place in places):
            fields["places"], fields["outbox"] = places, self._outbox.name
        return left

    def _window(self, rank: int, seat: Seat, calls: Calls) -> Window | None:
        """The memory of a server on this host; it is asked once."""
        if self._outbox is None:
            return None
        with self._looking:
            known = self._windows.get(rank)
            if known is None or self._seen.get(rank) != seat:
                if known is not None:
                    known.close()
                self._seen[rank], self._windows[rank] = seat, None
                fields = {"model": self._model, "outbox": self._outbox.record(), "name": self._outbox.name}
                answer = calls.ask("window", fields, self._deadline)
                if answer.kind == "window":
                    with suppress(Unavailable):
                        self._windows[rank] = Window(answer.fields, len(self._plan.blocks))
            return self._windows[rank]

    def _one(self, kind: str, block: int, fields: dict[str, Any], arrays: Mapping[str, Payload]) -> None:
        request = _Request(kind, fields, arrays, {})
        Pending(self, [block], lambda places: request, lambda places, answer: None, self._deadline).result()

    def _dense(self, parts: Sequence[Part], places: list[int]) -> list[int]:
        return [parts[place].block for place in places if self._plan.blocks[parts[place].block].kind != "rows"]

    def _oldest(self, table: str, rows: Tensor, versions: Tensor) -> dict[int, int]:
        return {block: int(versions[low:high].min()) for block, low, high in self.tables.split(table, rows)}

    def _to(self, rank: int, seat: Seat) -> Calls:
        """The calls to a server.

        Raises:
            Closed: if nobody sits there, or this client is closed.
        """
        if not seat.address:
            raise Closed(f"nobody sits at server {rank}")
        with self._lock:
            if self._closed.is_set():
                raise Closed("the client is closed")
            known = self._calls.get(rank)
            if known is not None and known[0] == seat:
                return known[1]
            if known is not None:
                known[1].close(wait=False)
            calls = Calls(
                lambda seconds: dial(seat.address, self._credentials, seconds),
                _name(rank, seat),
                patience=self._patience,
            )
            self._calls[rank] = (seat, calls)
            return calls

    def _follow(self) -> None:
        """Ends the calls to servers that have been replaced, so that nobody waits for them; all calls once nobody says
        any more who is there."""
        try:
            self._follow_views()
        except VerbundError:
            with self._lock:
                for _, calls in self._calls.values():
                    calls.close(wait=False)

    def _follow_views(self) -> None:
        number = self._watch.newest().number
        while not self._closed.is_set():
            view = self._watch.newer(number, 1.0)
            if view.number == number:
                continue
            number = view.number
            with self._lock:
                for rank, (seat, calls) in list(self._calls.items()):
                    if view.seats[rank] != seat:
                        calls.close(wait=False)
                        del self._calls[rank]


def _places(into: Mapping[int, Tensor] | None, blocks: Sequence[int]) -> dict[str, Place]:
    return {} if into is None else {f"v{place}": into[block] for place, block in enumerate(blocks)}


def _name(rank: int, seat: Seat) -> str:
    return f"parameter server {rank} (generation {seat.generation})"
