"""A follower: what a primary sends to one other server, in order: images of blocks, and then all their records."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verbund.comm.wire import Call, Calls, Message, Payload, WireError
from verbund.errors import VerbundError
from verbund.exchange.parameter_server import records
from verbund.exchange.parameter_server.holdings import Image
from verbund.exchange.parameter_server.records import Record
from verbund.exchange.parameter_server.view import Seat, View

_WINDOW = 4  # records under way


@dataclass(frozen=True)
class _Item:
    number: int
    view: int
    kind: str
    fields: dict[str, Any]
    arrays: dict[str, Payload]
    blocks: tuple[int, ...] = ()


@dataclass
class Events:
    """What a follower tells. All are called from its own threads.

    Args:
        image: makes the image of a block, and hands it with its number to the function given, before any later record.
        taken: it has more than before.
        refused: it knows of another primary, by the view of this number.
        broken: it cannot go on, and why.
    """

    image: Callable[[int, Callable[[int, Image | None], None]], None]
    taken: Callable[[Follower], None]
    refused: Callable[[Follower, int], None]
    broken: Callable[[Follower, str], None]


@dataclass
class Has:
    """What it has, and what was put on the way; guarded by the lock that it shares with its owner."""

    wanted: set[int] = field(default_factory=set)
    """The blocks that it is to have."""
    sent: set[int] = field(default_factory=set)
    """Those whose image is on the way or there, so that records follow."""
    last: dict[int, int] = field(default_factory=dict)
    """By block the number of the last record on the way or there."""
    taken: dict[int, int] = field(default_factory=dict)
    """By block the number up to which it has all."""
    required: set[int] = field(default_factory=set)
    """Blocks that it has had whole once: from then on nothing counts before it has it too."""
    due: dict[int, int] = field(default_factory=dict)
    """Blocks that it has whole once it has this number, and that nobody was told of."""


class Follower:
    """Sends to one server. Its fields are guarded by `changed`.

    Args:
        rank: of the server.
        seat: where it is.
        stream: rank and generation of the sender, and the stream's number: a higher one takes the place of others.
        model: the plan's hash.
        connect: makes a connection to it within so many seconds.
        changed: the lock.
        events: see there.
        deadline: seconds that it may take for a record.
        patience: seconds of silence after which records are sent again.
        pause: seconds before it begins.
    """

    def __init__(
        self,
        rank: int,
        seat: Seat,
        stream: tuple[int, int, int],
        model: str,
        connect: Callable[[float], Any],
        changed: threading.Condition,
        events: Events,
        deadline: float,
        patience: float,
        pause: float = 0.0,
    ) -> None:
        self.rank = rank
        self.seat = seat
        self.stream = stream
        self.has = Has()
        self.closed = False
        self.bytes = 0
        self.trouble = "it is silent"
        self._model = model
        self._changed = changed
        self._events = events
        self._deadline = deadline
        self._pause = pause
        self._view = 0
        self._sequence = 0
        self._queue: deque[_Item] = deque()
        self._images: deque[int] = deque()
        self._under_way: deque[tuple[Call, _Item]] = deque()
        self._calls = Calls(connect, self.name, patience=patience)
        for work in (self._send, self._settle):
            threading.Thread(target=work, name=f"to {self.name}", daemon=True).start()

    @property
    def name(self) -> str:
        return f"server {self.rank} (generation {self.seat.generation})"

    # All of these are called with the lock

    def see(self, view: View, wanted: set[int]) -> None:
        """What it is to have by a newer view."""
        self._view = view.number
        self._queue.append(_Item(0, 0, "view", {"record": view.record()}, {}))
        for block in self.has.wanted - wanted:
            for which in (self.has.sent, self.has.required):
                which.discard(block)
            for numbers in (self.has.last, self.has.taken, self.has.due):
                numbers.pop(block, None)
        self._images = deque(block for block in self._images if block in wanted)
        self._images.extend(sorted(wanted - self.has.wanted))
        self.has.wanted = set(wanted)
        self._changed.notify_all()

    def append(self, number: int, record: Record, versions: dict[int, int]) -> None:
        """A record, of which it is to get what is about its blocks."""
        part = records.of_blocks(record, self.has.sent)
        if part is not None:
            after = [versions[block] for block in records.blocks_of(part) if block in versions]
            self._put(number, part, {"versions": after})

    def waits_for(self, block: int, number: int) -> bool:
        """Whether it has not got all that there was of a block up to this number."""
        return self.has.taken.get(block, -1) < number

    def close(self) -> None:
        """Sends no more, also not what it has begun to send."""
        self.closed = True
        self._calls.close(wait=False)
        self._changed.notify_all()

    def _put(self, number: int, record: Record, more: dict[str, Any]) -> None:
        kind, fields, arrays = records.encode(record)
        blocks = tuple(records.blocks_of(record))
        self.has.last.update(dict.fromkeys(blocks, number))
        self._queue.append(_Item(number, self._view, kind, {**fields, **more}, dict(arrays), blocks))
        self._changed.notify_all()

    def _add_image(self, block: int, number: int, image: Image | None) -> None:
        with self._changed:
            if self.closed or block not in self.has.wanted:
                return
            self.has.sent.add(block)
            if image is not None:
                self._put(number, image, {})
                return
            self.has.last[block] = number  # it has not begun: there is nothing to send
            self._took(number, (block,))

    def _took(self, number: int, blocks: tuple[int, ...]) -> None:
        has = self.has
        for block in blocks:
            if block not in has.wanted:
                continue
            has.taken[block] = number
            if block not in has.required:
                has.required.add(block)
                has.due[block] = has.last.get(block, number)
        self._changed.notify_all()

    # Threads

    def _send(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closed, self._pause)
        try:
            while (item := self._next()) is not None:
                if isinstance(item, int):
                    self._events.image(item, lambda number, image, block=item: self._add_image(block, number, image))  # type: ignore[misc]
                    continue
                self._sequence += 1
                fields = {
                    **item.fields,
                    "of": item.kind,
                    "number": item.number,
                    "model": self._model,
                    "view": item.view,
                    "stream": list(self.stream),
                    "sequence": self._sequence,
                }
                self.bytes += sum(int(getattr(array, "nbytes", 0)) for array in item.arrays.values())
                call = self._calls.start("record", fields, self._deadline, None, **item.arrays)
                with self._changed:
                    self._under_way.append((call, item))
                    self._changed.notify_all()
        except (WireError, VerbundError) as error:
            self._events.broken(self, str(error))
        finally:
            self._calls.close()

    def _next(self) -> _Item | int | None:
        """What is to be sent next: records before images, so that a long list of images holds no push up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or ((self._queue or self._images) and len(self._under_way) < _WINDOW)
            )
            if self.closed:
                return None
            return self._queue.popleft() if self._queue else self._images.popleft()

    def _settle(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or self._under_way)
                if self.closed:
                    return
                call, item = self._under_way[0]
            try:
                answer: Message = call.result()
            except (WireError, VerbundError) as error:
                self._events.broken(self, str(error))
                return
            if answer.kind == "moved":
                self._events.refused(self, int(answer.fields.get("view", 0)))
                return
            with self._changed:
                self._under_way.popleft()
                self._took(item.number, item.blocks)
            self._events.taken(self)
