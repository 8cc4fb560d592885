"""Replication: what a primary has applied goes to all servers that are to have the block, in order.

A push counts once all holders have it. A joining server gets each block whole, then all further records; as soon as it
has one whole, nothing counts without it either, and it is said to have joined.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verbund.comm.wire import Credentials, dial
from verbund.errors import RunFailed
from verbund.exchange.parameter_server.follower import Events, Follower
from verbund.exchange.parameter_server.holdings import Image
from verbund.exchange.parameter_server.records import Record
from verbund.exchange.parameter_server.view import View

Joined = Callable[[int, int, list[int]], None]
"""Is called with rank, generation and the blocks that a joining server has whole."""
_JOINER_SECONDS = 2.0  # that one who is joining may hold a push up
_PAUSE = 0.5  # before one that failed is tried again
_LOG = logging.getLogger(__name__)


class Moved(Exception):
    """Another server is the primary now.

    Args:
        view: the number of the newest view that is known of.
    """

    def __init__(self, view: int) -> None:
        super().__init__(f"moved, by view {view}")
        self.view = view


@dataclass(frozen=True)
class Self:
    """Who sends.

    Args:
        rank: of this server.
        generation: of its process.
        model: the plan's hash.
    """

    rank: int
    generation: int
    model: str


class Replication:
    """The followers of one server.

    Args:
        own: who this is.
        image: makes the image of a block, and hands it with the number of the last record to the function given,
            before any later record is appended.
        joined: see there.
        credentials: for dialling other servers.
        deadline: seconds that a server may take for a record.
        patience: seconds of its silence after which records are sent again.
    """

    def __init__(
        self,
        own: Self,
        image: Callable[[int, Callable[[int, Image | None], None]], None],
        joined: Joined | None,
        credentials: Credentials,
        deadline: float,
        patience: float = 30.0,
    ) -> None:
        self._patience = patience
        self._own = own
        self._joined = joined
        self._credentials = credentials
        self._deadline = deadline
        self._changed = threading.Condition()
        self._events = Events(image, self._taken, self._refused, self._broken)
        self._followers: dict[int, Follower] = {}
        self._view: View | None = None
        self._mine: frozenset[int] = frozenset()
        self._fenced = 0
        """A server knows of another primary by the view of this number: nothing counts before this one has it too."""
        self._streams = 0
        self._closed = False
        self._bytes = 0

    def update(self, view: View, mine: frozenset[int]) -> None:
        """A newer view, and the blocks that this server is the primary of."""
        with self._changed:
            self._view, self._mine = view, mine
            for rank, follower in list(self._followers.items()):
                wanted = self._wanted(rank)
                if follower.seat == view.seats[rank] and wanted:
                    follower.see(view, wanted)
                else:
                    self._end(follower)
            for rank in range(len(view.seats)):
                if rank not in self._followers and self._wanted(rank):
                    self._follow(rank)
            self._changed.notify_all()

    def append(self, number: int, record: Record, versions: dict[int, int]) -> None:
        """A record, and the versions that a push has brought its blocks to. In the order of the numbers."""
        with self._changed:
            for follower in self._followers.values():
                follower.append(number, record, versions)

    def wait(self, needed: Mapping[int, int], until: float, everyone: bool = False) -> bool:
        """Waits until all holders have these blocks up to these numbers.

        Args:
            needed: numbers by block.
            until: on the monotonic clock.
            everyone: waits a moment for those too that are joining.

        Returns:
            Whether everyone has it, who is joining included.

        Raises:
            Moved: if another server is the primary of one of them.
            RunFailed: if a holder has not got it in time.
        """
        patience = min(time.monotonic() + _JOINER_SECONDS, until)
        with self._changed:
            while True:
                self._check(needed)
                late = self._late(needed)
                slow = self._slow(needed)
                if not late and (not slow or not everyone):
                    return not slow
                moment = time.monotonic()
                if not late and moment >= patience:
                    for follower in slow:
                        self._renew(follower, "it took too long to join")
                    return False
                if late and moment >= until:
                    raise self._missing(*late[0])
                self._changed.wait((until if late else patience) - moment)

    @property
    def follows(self) -> bool:
        """Whether anybody gets what is applied here."""
        return bool(self._followers)

    def totals(self) -> dict[str, Any]:
        """What was sent, for the report."""
        with self._changed:
            return {"replicated_bytes": self._bytes + sum(each.bytes for each in self._followers.values())}

    def close(self) -> None:
        """Sends no more, and lets go of who waits."""
        with self._changed:
            self._closed = True
            for follower in list(self._followers.values()):
                self._end(follower)

    # With the lock

    def _wanted(self, rank: int) -> set[int]:
        view = self._view
        assert view is not None
        if rank == self._own.rank or not view.seats[rank].address:
            return set()
        return {block for block in self._mine if rank in view.holders[block] or rank in view.joining[block]}

    def _follow(self, rank: int, pause: float = 0.0) -> Follower:
        view = self._view
        assert view is not None
        seat = view.seats[rank]
        self._streams += 1
        stream = (self._own.rank, self._own.generation, self._streams)
        follower = Follower(
            rank,
            seat,
            stream,
            self._own.model,
            lambda seconds: dial(seat.address, self._credentials, seconds),
            self._changed,
            self._events,
            self._deadline,
            self._patience,
            pause,
        )
        self._followers[rank] = follower
        follower.see(view, self._wanted(rank))
        return follower

    def _end(self, follower: Follower) -> None:
        if self._followers.get(follower.rank) is follower:
            del self._followers[follower.rank]
            self._bytes += follower.bytes
        follower.close()

    def _renew(self, follower: Follower, why: str) -> None:
        """Sends it all blocks anew: nobody knows what it has."""
        if self._closed or self._followers.get(follower.rank) is not follower:
            return
        _LOG.warning("%s gets all blocks anew: %s", follower.name, why)
        before = follower.has
        self._end(follower)
        again = self._follow(follower.rank, _PAUSE)
        again.trouble = why
        # Who was said to have joined may be a holder by a view that is not here yet.
        again.has.required = before.required & again.has.wanted
        again.has.due = {block: number for block, number in before.due.items() if block in again.has.wanted}

    def _check(self, needed: Mapping[int, int]) -> None:
        number = self._view.number if self._view is not None else 0
        if self._closed or self._fenced > number or not self._mine.issuperset(needed):
            raise Moved(max(self._fenced, number))

    def _late(self, needed: Mapping[int, int]) -> list[tuple[int, int]]:
        """Holders, and who has been one, that have not got a block up to its number."""
        assert self._view is not None
        late = []
        for block, number in needed.items():
            for rank in self._view.holders[block]:
                if rank == self._own.rank:
                    continue
                follower = self._followers.get(rank)
                if follower is None or follower.waits_for(block, number):
                    late.append((rank, block))
            for rank in self._view.joining[block]:
                follower = self._followers.get(rank)
                if follower is not None and block in follower.has.required and follower.waits_for(block, number):
                    late.append((rank, block))
        return late

    def _slow(self, needed: Mapping[int, int]) -> list[Follower]:
        """Who is joining and has not got what was sent to it of a block up to its number."""
        return [
            follower
            for follower in self._followers.values()
            if any(
                block in follower.has.sent and block not in follower.has.required and follower.waits_for(block, number)
                for block, number in needed.items()
            )
        ]

    def _missing(self, rank: int, block: int) -> RunFailed:
        follower = self._followers.get(rank)
        name = follower.name if follower is not None else f"server {rank}"
        why = follower.trouble if follower is not None else "nobody sits there"
        return RunFailed(f"{name} has not taken what was pushed to block {block}: {why}", where=f"server {rank}")

    # From the followers' threads

    def _taken(self, follower: Follower) -> None:
        """Tells of who has all blocks that it was to join."""
        with self._changed:
            has, view = follower.has, self._view
            if self._followers.get(follower.rank) is not follower or view is None or not has.due:
                return
            if has.wanted != has.required or any(has.taken.get(block, -1) < due for block, due in has.due.items()):
                return
            blocks = sorted(block for block in has.due if follower.rank in view.joining[block])
            has.due.clear()
        if blocks and self._joined is not None:
            told = (follower, blocks)
            threading.Thread(target=self._tell, args=told, name="joined", daemon=True).start()

    def _tell(self, follower: Follower, blocks: list[int]) -> None:
        assert self._joined is not None
        until = time.monotonic() + self._deadline
        while not follower.closed:
            try:
                return self._joined(follower.rank, follower.seat.generation, blocks)
            except Exception as error:
                if time.monotonic() > until:
                    _LOG.warning("nobody could be told that %s has joined: %s", follower.name, error)
                    return None
                time.sleep(_PAUSE)
        return None

    def _refused(self, follower: Follower, view: int) -> None:
        with self._changed:
            if self._view is not None and view > self._view.number:
                self._fenced = max(self._fenced, view)
                self._end(follower)
                self._changed.notify_all()
            else:
                self._renew(follower, "it takes this server for no primary")

    def _broken(self, follower: Follower, why: str) -> None:
        with self._changed:
            self._renew(follower, why)
