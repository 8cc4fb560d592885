"""A client's lines to the servers: a connection to each, and the memory that they share where both are on one host."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from verbund.comm.shared_memory.identity import Unavailable
from verbund.comm.wire import Calls, Closed, Credentials, Payload, dial
from verbund.errors import VerbundError
from verbund.exchange.parameter_server.exposed import Outbox, Window
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Part
from verbund.exchange.parameter_server.view import Seat
from verbund.exchange.parameter_server.watch import Watch


class Lines:
    """The lines of one process.

    Args:
        plan: of the run.
        watch: tells of views.
        credentials: for dialling servers.
        deadline: seconds within which a request must be answered.
        patience: seconds of a server's silence after which requests to it are sent again.
    """

    def __init__(self, plan: Plan, watch: Watch, credentials: Credentials, deadline: float, patience: float) -> None:
        self.plan, self.watch = plan, watch
        self._credentials, self._deadline, self._patience = credentials, deadline, patience
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[Seat, Calls]] = {}
        self._closed = threading.Event()
        self._outbox = Outbox.make()
        self._windows: dict[int, Window | None] = {}
        self._seen: dict[int, Seat] = {}
        self._looking = threading.Lock()
        threading.Thread(target=self._follow, name="views", daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        self._closed.set()
        with self._lock:
            calls = [calls for _, calls in self._calls.values()]
            self._calls.clear()
        for each in calls:
            each.close()

    def to(self, rank: int, seat: Seat) -> Calls:
        """The calls to the server that sits in this seat.

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
                name(rank, seat),
                patience=self._patience,
            )
            self._calls[rank] = (seat, calls)
            return calls

    def window(self, rank: int, seat: Seat, calls: Calls) -> Window | None:
        """The memory of a server on this host; it is asked once."""
        if self._outbox is None:
            return None
        with self._looking:
            if self._seen.get(rank) != seat:
                fields = {"model": self.plan.model, "outbox": self._outbox.record(), "name": self._outbox.name}
                answer = calls.ask("window", fields, self._deadline)
                if (former := self._windows.get(rank)) is not None:
                    former.close()
                self._seen[rank], self._windows[rank] = seat, None
                if answer.kind == "window":
                    with suppress(Unavailable):
                        self._windows[rank] = Window(answer.fields, len(self.plan.blocks))
            return self._windows[rank]

    def in_outbox(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Parts whose values lie where servers of this host can read them, if there are any."""
        if self._outbox is None or not any(self._windows.values()):
            return parts
        whole = [part for part in parts if part.rows is None and part.message is None]
        dense = {part.block: part.values for part in whole if part.values is not None}
        moved = self._outbox.put(dense)
        return [replace(p, values=moved[p.block]) if p.block in dense else p for p in parts]

    def by_place(self, fields: dict[str, Any], arrays: Mapping[str, Payload]) -> Mapping[str, Payload]:
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
        number = self.watch.newest().number
        while not self._closed.is_set():
            view = self.watch.newer(number, 1.0)
            if view.number == number:
                continue
            number = view.number
            with self._lock:
                for rank, (seat, calls) in list(self._calls.items()):
                    if view.seats[rank] != seat:
                        calls.close(wait=False)
                        del self._calls[rank]


def name(rank: int, seat: Seat) -> str:
    """What a server is called in a message."""
    return f"parameter server {rank} (generation {seat.generation})"
