"""Requests to whichever servers hold the blocks, until all have answered.

Parts are grouped by the primary of their block in the newest view. What a server has not acknowledged, because it is
gone or another has the block now, is sent again by the next view: servers know what they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from verbund.comm.wire import Call, Closed, Deadline, Message, Payload, Place, WireError
from verbund.errors import RunFailed, VerbundError
from verbund.exchange.parameter_server.exposed import Window
from verbund.exchange.parameter_server.lines import Lines, name
from verbund.exchange.parameter_server.view import View

_TURN = 0.2  # seconds until who was told `moved` looks again, if no newer view comes


@dataclass(frozen=True)
class Request:
    """What goes to one server: of some parts."""

    kind: str
    fields: dict[str, Any]
    arrays: Mapping[str, Payload]
    into: Mapping[str, Place]


class Pending:
    """Requests under way to several servers; `result` must be asked for.

    Args:
        lines: to the servers.
        blocks: of the parts, in order.
        make: the request of some parts, by their places.
        take: what to do with the answer to it.
        seconds: within which all must be answered.
        into: flat tensors by block, of what is pulled whole.
    """

    def __init__(
        self,
        lines: Lines,
        blocks: Sequence[int],
        make: Callable[[list[int]], Request],
        take: Callable[[list[int], Message], None],
        seconds: float,
        into: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._lines = lines
        self._blocks = blocks
        self._make = make
        self._take = take
        self._until = time.monotonic() + seconds
        self._left = set(range(len(blocks)))
        self._view: View = lines.watch.newest()
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
            self._lines.watch.newer(self._view.number, min(_TURN, max(self._until - time.monotonic(), 0.0)))
            self._start()

    def _start(self) -> None:
        self._view = view = self._lines.watch.newest()
        groups: dict[int, list[int]] = {}
        for place in sorted(self._left):
            groups.setdefault(view.primary(self._blocks[place]), []).append(place)
        for rank, places in groups.items():
            request = self._make(places)
            left = max(self._until - time.monotonic(), 1e-3)
            fields = {
                **request.fields,
                "model": self._lines.plan.model,
                "view": view.number,
                "seconds": left - min(1.0, left / 10),  # so that the server's reason is here before the end
            }
            try:
                calls = self._lines.to(rank, view.seats[rank])
                arrays = request.arrays
                if (window := self._lines.window(rank, view.seats[rank], calls)) is not None:
                    arrays = self._lines.by_place(fields, arrays)
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
        newest = self._lines.watch.newest()
        return newest.seats[rank] != self._view.seats[rank] or newest.primary(block) != rank

    def _late(self) -> RunFailed:
        block = self._blocks[min(self._left)]
        rank = self._view.primary(block)
        tensor = self._lines.plan.blocks[block].name
        why = self._trouble.get(rank, "nothing came")
        what = f"block {block} (`{tensor}`) could not be reached in time by view {self._view.number}: {why}"
        return RunFailed(what, where=self._name(rank))

    def _name(self, rank: int) -> str:
        return name(rank, self._view.seats[rank])
