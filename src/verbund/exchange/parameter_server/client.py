"""A client: pushes to and pulls from the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verbund.comm.wire import Call, Credentials, Message, Payload, Place, WireError
from verbund.errors import VerbundError
from verbund.exchange.parameter_server import records
from verbund.exchange.parameter_server.clipping import Clipping, Square, norm_of
from verbund.exchange.parameter_server.lines import Lines
from verbund.exchange.parameter_server.pending import Pending, Request
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Outcome, Part, Push
from verbund.exchange.parameter_server.row_cache import RowCache
from verbund.exchange.parameter_server.table_runs import TableRuns
from verbund.exchange.parameter_server.view import View
from verbund.exchange.parameter_server.watch import Watch

_CACHE_BYTES = 64 << 20


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
        self._plan = plan
        self._island = island
        self._generation = generation
        self._watch = watch
        self._deadline = deadline
        self._lines = Lines(plan, watch, credentials, deadline, patience)
        self.tables = TableRuns(plan)
        self.cache = RowCache(row_cache, cache_bytes) if row_cache else None

    @property
    def view(self) -> View:
        """The newest."""
        return self._watch.newest()

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
        parts = self._lines.in_outbox(parts)
        assert self._island is not None
        whole = Push(self._island, self._generation, ticket, share, scale, weight, rate, low, parts)

        def make(places: list[int]) -> Request:
            push = whole.of_blocks({parts[place].block for place in places})
            fields = {**push.fields(), "pull": into is not None, "least": least}
            return Request("push", fields, push.arrays(), _places(into, self._dense(parts, places)))

        def take(places: list[int], answer: Message) -> None:
            for place, outcome in zip(places, records.outcomes_of(answer.fields), strict=True):
                outcomes[place] = outcome
            if into is not None:
                versions.update(zip(self._dense(parts, places), answer.fields["versions"], strict=True))

        blocks = [part.block for part in parts]
        return Pushing(Pending(self._lines, blocks, make, take, self._deadline, into), outcomes, versions)

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

    def clip(self, ticket: int) -> None:
        """Has servers take a ticket of which this island's share is pushed, clipped by the norm of its whole gradient;
        waits until all shares have come. Harmless when repeated, and when others do it too; see `clipping`."""
        blocks = list(range(len(self._plan.blocks)))
        squares: dict[int, Square] = {}

        def asked(places: list[int]) -> Request:
            return Request("squares", {"client": self._island, "blocks": places, "ticket": ticket}, {}, {})

        def take(places: list[int], answer: Message) -> None:
            squares.update(zip(places, (Square(*told) for told in answer.fields["squares"]), strict=True))

        Pending(self._lines, blocks, asked, take, self._deadline).result()
        norm = norm_of([squares[block] for block in blocks])
        if norm is None:
            return

        def told(places: list[int]) -> Request:
            known = {"client": self._island, "generation": self._generation}
            return Request("clip", {**known, **Clipping(ticket, norm, places).fields()}, {}, {})

        Pending(self._lines, blocks, told, lambda places, answer: None, self._deadline).result()

    def start_pull(self, into: Mapping[int, Tensor], least: int = 0) -> Pulling:
        """Pulls blocks that are no tables into flat, contiguous tensors; waits until they have the least version."""
        blocks = sorted(into)
        versions: dict[int, int] = {}

        def make(places: list[int]) -> Request:
            found = [blocks[place] for place in places]
            fields = {"client": self._island, "parts": [[block, None] for block in found], "least": least}
            return Request("pull", fields, {}, _places(into, found))

        def take(places: list[int], answer: Message) -> None:
            versions.update(zip([blocks[place] for place in places], answer.fields["versions"], strict=True))

        return Pulling(Pending(self._lines, blocks, make, take, self._deadline, into), versions)

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

        def make(numbers: list[int]) -> Request:
            runs = [asked[number] for number in numbers]
            fields = {"client": self._island, "parts": [[run.block, len(run.rows)] for run in runs], "least": least}
            rows = {f"r{place}": run.rows for place, run in enumerate(runs)}
            return Request("pull", fields, rows, {f"v{place}": run.values for place, run in enumerate(runs)})

        def take(numbers: list[int], answer: Message) -> None:
            for number, version in zip(numbers, answer.fields["versions"], strict=True):
                run = asked[number]
                versions[run.table][run.places] = version
                if not run.direct:
                    found[run.table][run.places] = run.values
                if self.cache is not None:
                    self.cache.put(run.table, run.rows, ticket, versions[run.table][run.places], run.values)

        if asked:
            Pending(self._lines, [run.block for run in asked], make, take, self._deadline).result()
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

        def make(places: list[int]) -> Request:
            fields = {"client": self._island, "blocks": places, "folder": folder, "version": version}
            return Request("load", fields, {}, {})

        Pending(self._lines, blocks, make, lambda places, answer: None, self._deadline).result()

    def ask_all(self, kind: str, fields: Callable[[int], dict[str, Any]]) -> list[Message | Exception]:
        """Asks every server of the newest view the same, by rank: what each answers, or why it does not.

        Args:
            kind: what is asked.
            fields: of a server's request.
        """
        view = self._watch.newest()
        calls: list[Call | Exception] = []
        for rank, seat in enumerate(view.seats):
            told = {**fields(rank), "model": self._plan.model, "view": view.number, "client": self._island}
            try:
                calls.append(self._lines.to(rank, seat).start(kind, told, self._deadline))
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
        self._lines.close()

    def _one(self, kind: str, block: int, fields: dict[str, Any], arrays: Mapping[str, Payload]) -> None:
        request = Request(kind, fields, arrays, {})
        Pending(self._lines, [block], lambda places: request, lambda places, answer: None, self._deadline).result()

    def _dense(self, parts: Sequence[Part], places: list[int]) -> list[int]:
        return [parts[place].block for place in places if self._plan.blocks[parts[place].block].kind != "rows"]

    def _oldest(self, table: str, rows: Tensor, versions: Tensor) -> dict[int, int]:
        return {block: int(versions[low:high].min()) for block, low, high in self.tables.split(table, rows)}


def _places(into: Mapping[int, Tensor] | None, blocks: Sequence[int]) -> dict[str, Place]:
    return {} if into is None else {f"v{place}": into[block] for place, block in enumerate(blocks)}
