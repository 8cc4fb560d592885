"""Parameters in memory that the processes of a host share: clients read them where they lie.

A server keeps the blocks that are pulled whole in its arena, and for each four words: a count that is odd while the
block is being changed, the block's version, the number of the record that has changed it last, and the number up to
which its records can no longer be taken back. A reader copies a block, and does so again if the count was odd or has
moved: a sequence lock. What is pushed lies in the client's arena, from where the server reads it while the client
waits. Nobody writes into another's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verbund.comm.shared_memory import identity
from verbund.comm.shared_memory.arena import Arena, Lives, Neighbour, NoRoom
from verbund.comm.shared_memory.identity import Unavailable
from verbund.comm.wire import Closed
from verbund.errors import InputError, RunFailed
from verbund.exchange.parameter_server.plan import Plan

_WORDS = 4
_PAUSE = 2e-5  # seconds before a block that is being changed is looked at again


class Exposed:
    """A server's side.

    Args:
        plan: of the run.

    Raises:
        Unavailable: if this machine shares no memory.
    """

    def __init__(self, plan: Plan) -> None:
        self.host = identity.host()
        self._arena = Arena()
        self._plan = plan
        try:
            self._place = self._arena.take(8 * _WORDS * len(plan.blocks))
        except NoRoom as error:
            raise Unavailable(str(error)) from None
        self._words = self._arena.words(self._place, _WORDS * len(plan.blocks))
        self._places: dict[int, int] = {}
        """Where the blocks lie that are here."""

    @staticmethod
    def make(plan: Plan) -> Exposed | None:
        """None if there is no memory to share."""
        try:
            return Exposed(plan)
        except Unavailable:
            return None

    def record(self) -> dict[str, Any]:
        """What a client needs to read, as JSON values."""
        return {"host": self.host, "arena": self._arena.record(), "words": self._place}

    def adopt(self, block: int, values: Tensor) -> Tensor | None:
        """Memory for a block's values, flat, with these in it; None if there is no room."""
        size = values.nbytes
        if (place := self._places.get(block)) is None:
            try:
                place = self._arena.take(max(size, 1))
            except NoRoom:
                return None
        own = self._arena.view(place, values.numel(), values.dtype)
        own.copy_(values.reshape(-1))
        self._places[block] = place
        return own

    def place(self, block: int, values: Tensor) -> int | None:
        """Where a block's values lie, if they lie here."""
        place = self._places.get(block)
        return place if place is not None and self._arena.place_of(values) == place else None

    @contextmanager
    def changing(self, blocks: Iterable[int]) -> Iterator[None]:
        """Within it no reader takes these blocks."""
        words, places = self._words, [_WORDS * block for block in blocks]
        for place in places:
            words[place] += 1
        try:
            yield
        finally:
            for place in places:
                words[place] += 1

    def has(self, block: int, version: int, number: int) -> None:
        """A block has this version now, by the record of this number; to be called while it is `changing`."""
        place = _WORDS * block
        self._words[place + 1], self._words[place + 2] = version, number

    def settled(self, numbers: Mapping[int, int]) -> None:
        """By block, up to which number its records can no longer be taken back."""
        for block, number in numbers.items():
            place = _WORDS * block + 3
            self._words[place] = max(self._words[place], number)


class Window:
    """A client's view of the memory of one server.

    Args:
        record: what `Exposed.record` gave.

    Raises:
        Unavailable: if it is on another host, or cannot be mapped.
    """

    def __init__(self, record: Mapping[str, Any], blocks: int) -> None:
        if record["host"] != identity.host():
            raise Unavailable("it is on another host")
        self._neighbour = Neighbour.of(record["arena"])
        self._lives = Lives({0: self._neighbour})
        self._words = self._neighbour.memory.words(int(record["words"]), _WORDS * blocks)

    def copy(self, block: int, place: int, target: Tensor, until: float, replaced: Callable[[], bool]) -> int:
        """Copies a block's values.

        Args:
            block: its number.
            place: where they lie.
            target: flat.
            until: on the monotonic clock.
            replaced: whether another server has the block now, so that nobody settles it here any more.

        Returns:
            its version; nothing of it can be taken back any more.

        Raises:
            Closed: if the server has ended, or was replaced.
            RunFailed: if it does not come to rest.
        """
        words, first = self._words, _WORDS * block
        source = self._neighbour.memory.view(place, target.numel(), target.dtype)
        while True:
            before = words[first]
            if not before & 1:
                target.copy_(source)
                version, number = int(words[first + 1]), int(words[first + 2])
                if words[first] == before:
                    break
            self._wait(until, replaced)
        while words[first + 3] < number:
            self._wait(until, replaced)
        return version

    def close(self) -> None:
        """Lets go of the memory."""
        self._neighbour.close()

    def _wait(self, until: float, replaced: Callable[[], bool]) -> None:
        if self._lives.ended():
            raise Closed("the server has ended")
        if replaced():
            raise Closed("another server has the block now")
        if time.monotonic() > until:
            raise RunFailed("a parameter server does not come to rest")
        time.sleep(_PAUSE)


class Outbox:
    """A client's own arena: what it pushes lies here.

    Raises:
        Unavailable: if this machine shares no memory.
    """

    def __init__(self) -> None:
        self.host = identity.host()
        self._arena = Arena()
        self._taken: dict[int, Tensor] = {}
        self.name = self._arena.token()
        """What servers know it by."""

    @staticmethod
    def make() -> Outbox | None:
        """None if there is no memory to share."""
        try:
            return Outbox()
        except Unavailable:
            return None

    def record(self) -> dict[str, Any]:
        """What a server needs to read, as JSON values."""
        return {"host": self.host, "arena": self._arena.record()}

    def put(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Flat tensors by number, copied to where they always lie; what has no room stays where it is."""
        found, targets, sources = {}, [], []
        for number, tensor in values.items():
            target = self._taken.get(number)
            if target is None or target.numel() != tensor.numel() or target.dtype != tensor.dtype:
                try:
                    place = self._arena.take(max(tensor.nbytes, 1))
                except NoRoom:
                    found[number] = tensor
                    continue
                target = self._taken[number] = self._arena.view(place, tensor.numel(), tensor.dtype)
            found[number] = target
            targets.append(target)
            sources.append(tensor)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return found

    def place(self, tensor: Tensor) -> int | None:
        """Where a tensor lies in the arena; None if it does not."""
        return self._arena.place_of(tensor)


class Inbox:
    """A server's view of one client's memory.

    Args:
        record: what `Outbox.record` gave.

    Raises:
        Unavailable: if it is on another host, or cannot be mapped.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        if record["host"] != identity.host():
            raise Unavailable("it is on another host")
        self._neighbour = Neighbour.of(record["arena"])
        self._lives = Lives({0: self._neighbour})

    @property
    def over(self) -> bool:
        """Whether the client has ended."""
        return bool(self._lives.ended())

    def view(self, place: Any, count: int, dtype: torch.dtype) -> Tensor:
        """Values of the client.

        Raises:
            InputError: if they do not lie in its memory.
        """
        if type(place) is not int or not 0 <= place <= self._neighbour.memory.size - count * dtype.itemsize:
            raise InputError("a push lies outside of its client's memory")
        return self._neighbour.memory.view(place, count, dtype)

    def close(self) -> None:
        """Lets go of the memory."""
        self._neighbour.close()
