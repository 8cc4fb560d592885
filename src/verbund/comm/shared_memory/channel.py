"""The flags of one group's collectives: who has handed over, who has done its share, who needs nothing more.

Collectives of a group have numbers, the same on all members, as all start them in the same order. Each passes three
gates, in that order, and no collective passes a gate before the one in front of it:

    published   this member's values lie where the others can read them
    worked      all had published, and this member has done its share
    released    this member needs nothing of the others' any more; the collective is over here

So a member's state is three counters, which only it writes. `advance` passes every gate that is open and never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from verbund.comm.shared_memory import futex
from verbund.comm.shared_memory.arena import Arena, Lives, Memory, NoRoom
from verbund.errors import RunFailed

# Words of a member's page: each counter has a cache line of its own.
_PUBLISHED, _WORKED, _RELEASED, _ASLEEP = 0, 8, 16, 24
_DESCRIPTIONS, _RING = 32, 64
_WORDS = 512
_PAGE = 8 * _WORDS
_PLANS = 512

SLOT = 1 << 21
"""Bytes of values that do not live in the arena and are handed over at once."""
_SLOTS, _MOST_SLOTS = 1, 8  # at first; and if more are wanted at once and there is memory

BYTES = _PAGE + SLOT * _SLOTS
"""What a member needs of its arena for a channel."""


class Operation(Protocol):
    """A collective under way, or a piece of one."""

    signature: int
    """What it is and of how much, the same on all members."""
    settles: bool
    """Whether it is over only when all members have done their share."""

    def publish(self, channel: Channel) -> int | None:
        """Hands over: the place of this member's values in its arena; None if there is no room yet."""
        ...

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        """Does this member's share: all values lie at `places` of the members' arenas."""
        ...

    def complete(self, channel: Channel, places: tuple[int, ...]) -> None:
        """What is left once all have done theirs."""
        ...


class Channel:
    """One member's end.

    Args:
        arena: this member's own.
        memories: all members' arenas, by rank.
        places: where the channel's `BYTES` lie in each.
        rank: this member's.
        names: the members', for messages.
        lives: watches over the others, by rank.
    """

    def __init__(
        self,
        arena: Arena,
        memories: Sequence[Memory],
        places: Sequence[int],
        rank: int,
        names: Sequence[str],
        lives: Lives,
    ) -> None:
        self.memories, self.rank, self.world = memories, rank, len(memories)
        self.names, self.lives = names, lives
        self._arena = arena
        self._free = [places[rank] + _PAGE + number * SLOT for number in range(_SLOTS)]  # the last is used first
        self._used: deque[tuple[int, int]] = deque()  # slots, and the number after that of the collective that has it
        self._more = _MOST_SLOTS - _SLOTS
        self._words = [memory.words(place, _WORDS) for memory, place in zip(memories, places, strict=True)]
        self._own = self._words[rank]
        self._addresses = [memory.address + place for memory, place in zip(memories, places, strict=True)]
        self._peers = [(number, words) for number, words in enumerate(self._words) if number != rank]
        self._operations: deque[Operation] = deque()  # from the first that is not completed on
        self._places: deque[tuple[int, ...]] = deque()  # of those that are worked, but not completed
        self.started = self._published = self._worked = self.completed = 0
        self._plans: dict[Any, Any] = {}
        self._closed = (0, 0, 0)  # the gate that was found closed last: whose, which counter, and how far it must get

    def start(self, operation: Operation) -> int:
        """Begins a collective; its number."""
        number = self.started
        self.started += 1
        self._operations.append(operation)
        self.advance()
        return number

    def advance(self) -> bool:
        """Passes the gates that are open; whether there were any."""
        before = self._published + self._worked + self.completed
        while self._published < self.started and self._publish():
            pass
        while self._worked < self._published and self._open(_PUBLISHED, self._worked + 1):
            self._work()
        while self.completed < self._worked and self._complete():
            pass
        return self._published + self._worked + self.completed != before

    def lost(self) -> str:
        """Who has ended and keeps the gate closed that was found so last."""
        names = self._missing(self.lives.ended())
        return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}" if names else ""

    def late(self) -> str:
        """Who keeps that gate closed."""
        return ", ".join(self._missing(range(self.world)))

    def sleep(self, seconds: float) -> None:
        """Sleeps until the gate that was found closed opens, or for so long."""
        member, counter, number = self._closed
        value = self._words[member][counter]
        if value >= number:
            return
        # Told before the last look at the counter, which the kernel takes; should the other have looked before it
        # was told, nobody wakes this one, and it sleeps for as long as it said.
        self._own[_ASLEEP] = 1
        futex.sleep(self._addresses[member] + 8 * counter, value, seconds)
        self._own[_ASLEEP] = 0

    def slot(self) -> int | None:
        """The place of a free slot; None if all are in use."""
        while self._used and self._all_released(self._used[0][1]):
            self._free.append(self._used.popleft()[0])
        if not self._free and not self._grow():
            return None
        place = self._free.pop()
        self._used.append((place, self._published + 1))
        return place

    def plan(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, kept: the views that an operation works on are the same every time."""
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            found = self._plans[key] = make()
        return found

    def view(self, member: int, place: int, count: int, dtype: Any) -> Tensor:
        """Values in a member's arena."""
        return self.memories[member].view(place, count, dtype)

    def _missing(self, members: Iterable[int]) -> list[str]:
        if self.completed == self.started:
            return []
        _, counter, number = self._closed
        return [
            self.names[member] for member in members if member != self.rank and self._words[member][counter] < number
        ]

    def _open(self, counter: int, number: int) -> bool:
        """Whether all others' counters have got to `number`."""
        for member, words in self._peers:
            if words[counter] < number:
                self._closed = (member, counter, number)
                return False
        return True

    def _grow(self) -> bool:
        """Takes another slot; whether there was one to be had."""
        if not self._more:
            return False
        try:
            self._free.append(self._arena.take(SLOT))
        except NoRoom:
            self._more = 0
            return False
        self._more -= 1
        return True

    def _all_released(self, number: int) -> bool:
        """Whether the collectives before `number` are over for all, this member too."""
        return self.completed >= number and self._open(_RELEASED, number)

    def _tell(self, counter: int, value: int) -> None:
        self._own[counter] = value
        for _, words in self._peers:
            if words[_ASLEEP]:
                futex.wake(self._addresses[self.rank] + 8 * counter)
                return

    def _publish(self) -> bool:
        number = self._published
        if number >= _RING and not self._all_released(number - _RING + 1):
            return False
        operation = self._operations[number - self.completed]
        place = operation.publish(self)
        if place is None:
            return False
        at = _DESCRIPTIONS + 2 * (number % _RING)
        self._own[at] = operation.signature
        self._own[at + 1] = place
        self._published = number + 1
        self._tell(_PUBLISHED, number + 1)
        return True

    def _work(self) -> None:
        number = self._worked
        operation = self._operations[number - self.completed]
        at = _DESCRIPTIONS + 2 * (number % _RING)
        for words in self._words:
            if words[at] != operation.signature:
                raise RunFailed("workers exchange different things with each other: one has taken another way")
        places = tuple([words[at + 1] for words in self._words])
        operation.work(self, places)
        self._places.append(places)
        self._worked = number + 1
        self._tell(_WORKED, number + 1)

    def _complete(self) -> bool:
        operation = self._operations[0]
        if operation.settles and not self._open(_WORKED, self.completed + 1):
            return False
        operation.complete(self, self._places.popleft())
        self._operations.popleft()
        self.completed += 1
        self._tell(_RELEASED, self.completed)
        return True
