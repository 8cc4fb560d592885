"""What a server has in its custody: its blocks, of which it is the primary by the newest view, how records change them,
and when what they have changed cannot be lost any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from verbund.comm.wire import Credentials
from verbund.errors import InputError, RunFailed, VerbundError
from verbund.exchange.parameter_server import records
from verbund.exchange.parameter_server.asked import LIVES
from verbund.exchange.parameter_server.exposed import Exposed
from verbund.exchange.parameter_server.holdings import Holdings, Image
from verbund.exchange.parameter_server.log import BOUND, Log
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Outcome
from verbund.exchange.parameter_server.records import Record
from verbund.exchange.parameter_server.replication import Joined, Moved, Replication, Self
from verbund.exchange.parameter_server.requests import sender
from verbund.exchange.parameter_server.view import View

_VIEW_SECONDS = 5.0  # that a view may take to get here, of which the sender of a request knows


class Custody:
    """The blocks of one seat. Whoever calls a method that says so holds `changed`.

    Args:
        plan: of the run.
        rank: its seat.
        generation: of this process.
        folder: for the log, where there are no replicas; what is there is taken up. None: no log.
        credentials: for dialling other servers.
        deadline: seconds that a request may take.
        joined: is told, by a primary, of a server that has all blocks which it was to join.
        log_bytes: that a log may have before a snapshot takes its place, if what is held is not larger.
        patience: seconds of another server's silence after which records are sent to it again.

    Raises:
        CheckpointError: if the folder cannot be taken up.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        generation: int,
        folder: Path | None = None,
        credentials: Credentials = None,
        deadline: float = 60.0,
        joined: Joined | None = None,
        log_bytes: int = BOUND,
        patience: float = 30.0,
    ) -> None:
        self.plan, self.rank, self.deadline = plan, rank, deadline
        self._generation = generation
        self.exposed = Exposed.make(plan)
        self.holdings = Holdings(plan, self.exposed.adopt if self.exposed is not None else lambda *_: None)
        self.changed = threading.Condition()
        self.view: View | None = None
        self.closed = False
        self.applying = 0.0
        """Seconds."""
        self._mine: frozenset[int] = frozenset()
        self._number = 0
        """Of the last record."""
        self._last: dict[int, int] = {}
        """By block, of the last record that has changed it."""
        self._failure: VerbundError | None = None
        own = Self(rank, generation, plan.model)
        self._replication = Replication(own, self._send_image, joined, credentials, deadline, patience)
        self._log = Log(folder, self._image, log_bytes) if folder is not None else None
        if self._log is not None:
            self._number = self._log.recover(self.holdings)
            here = [block for block in range(len(plan.blocks)) if block in self.holdings]
            self._last = dict.fromkeys(here, self._number)
            self._expose(here, self._number)

    @property
    def failure(self) -> VerbundError | None:
        """Why nothing can be acknowledged any more, such as a full disk."""
        return self._failure or (self._log.failure if self._log is not None else None)

    @property
    def follows(self) -> bool:
        """Whether other servers are sent what comes here."""
        return self._replication.follows

    def totals(self) -> dict[str, Any]:
        """Counts, bytes and seconds of replicas and log."""
        found: dict[str, Any] = {"applying_seconds": self.applying, **self._replication.totals()}
        return found | (self._log.totals() if self._log is not None else {})

    def close(self) -> None:
        """Nothing changes any more; what is in the log is synced."""
        self._replication.close()
        if self._log is not None:
            self._log.close()

    # -- views ---------------------------------------------------------------------------------------------------

    def see(self, view: View) -> None:
        """There is this view; an older one than what is known changes nothing."""
        with self.changed:
            if self.view is not None and view.number <= self.view.number:
                return
            self.view = view
            self._mine = frozenset()
            if view.seats[self.rank].generation == self._generation:
                blocks = range(len(self.plan.blocks))
                self._mine = frozenset(block for block in blocks if view.holders[block][:1] == (self.rank,))
                for block in blocks:
                    has = self.rank in view.holders[block] or self.rank in view.joining[block]
                    if not has and block in self.holdings:
                        self.holdings.drop(block)
            self._replication.update(view, self._mine)
            self.changed.notify_all()

    def await_view(self, fields: dict[str, Any]) -> None:
        """Waits a moment for the view of which a request's sender knows.

        Raises:
            Moved: if it does not come.
        """
        number = fields.get("view")
        if type(number) is not int:
            raise InputError("a request does not say by which view it comes", where=sender(fields))
        with self.changed:
            here = self.changed.wait_for(
                lambda: self.closed or (self.view is not None and self.view.number >= number),
                min(_VIEW_SECONDS, self.deadline),
            )
            if not here or self.closed:
                raise Moved(number if not self.closed else 0)

    def fence(self, client: int, generation: int) -> None:
        """Whether what changes blocks comes of the processes that are an island's now.

        Args:
            client: the island.
            generation: of its processes.

        Raises:
            InputError: if there is no such island.
            RunFailed: if others have taken their place.
        """
        view = self.view
        if view is None or client >= len(view.clients):
            raise InputError(f"there is no island {client}")
        if generation != view.clients[client]:
            raise RunFailed(
                f"island {client} of generation {generation} was replaced by generation {view.clients[client]}",
                where=f"server {self.rank}",
            )

    def check_primary(self, blocks: Sequence[int], begun: bool = True) -> None:
        """Whether this server answers for these blocks; under the lock.

        Args:
            blocks: their numbers.
            begun: they must have values.

        Raises:
            Moved: if another one does.
            InputError: if one has no values.
        """
        if self.failure is not None:
            raise self.failure
        if self.closed or not self._mine.issuperset(blocks):
            raise Moved(self.view.number if self.view is not None else 0)
        for block in blocks:
            if begun and block not in self.holdings:
                name = self.plan.blocks[block].name
                raise InputError(f"block {block} (`{name}`) has not begun: it has no values that a push could change")

    def may_send(self, stream: Sequence[int], view: View) -> bool:
        """Whether there can be such a server; it may be newer than what is known here."""
        rank, generation, _ = stream
        return rank < len(view.seats) and rank != self.rank and generation <= view.seats[rank].generation + LIVES

    def check_sender(self, stream: Sequence[int], blocks: Sequence[int]) -> None:
        """Whether a record about these blocks may come of a server's stream; under the lock.

        Raises:
            Moved: if it may not.
        """
        view = self.view
        assert view is not None
        rank, generation, _ = stream
        if self.failure is not None:
            raise self.failure
        known = view.seats[rank].generation == generation
        own = view.seats[self.rank].generation == self._generation
        for block in blocks:
            right = view.holders[block][:1] == (rank,) and block not in self._mine
            here = self.rank in view.holders[block] or self.rank in view.joining[block]
            if not (known and own and right and here):
                raise Moved(view.number)

    # -- records -------------------------------------------------------------------------------------------------

    def change(self, record: Record, versions: list[int] | None = None) -> tuple[list[Outcome], int]:
        """Changes the blocks, and hands the record to replicas and log; under the lock.

        Args:
            record: what changes them.
            versions: that the primary's blocks have after it.

        Returns:
            What became of a push's parts, and the record's number.
        """
        start = time.perf_counter()
        blocks, number = records.blocks_of(record), self._number + 1
        try:
            with self.exposed.changing(blocks) if self.exposed is not None else nullcontext():
                outcomes = records.apply(self.holdings, record)
                same = [block for block, outcome in zip(blocks, outcomes, strict=False) if outcome.state != "applied"]
                self._expose(set(blocks) - set(same), number)
        except Exception as error:
            # Half of it may have been done: this is no longer what the others have.
            self._failure = RunFailed(f"a record could not be applied: {error}", where=f"server {self.rank}")
            raise self._failure from error
        finally:
            self.applying += time.perf_counter() - start
        if versions is not None and [outcome.version for outcome in outcomes] != versions:
            raise RunFailed("a replica's blocks have other versions than the primary's")
        self._commit(record, {block: outcome.version for block, outcome in zip(blocks, outcomes, strict=False)})
        return outcomes, number

    def begin(self, blocks: Sequence[int], make: Callable[[int], None], until: float) -> None:
        """Blocks get their first values, unless they have some, and these are kept.

        Args:
            blocks: their numbers.
            make: puts a block into the holdings.
            until: when that must be done.
        """
        with self.changed:
            self.check_primary(blocks, begun=False)
            for block in blocks:
                if block not in self.holdings:
                    make(block)
                    self._expose([block], self._number + 1)
                    self._commit(self.holdings.image(block), {})
            needed = self.needed(blocks)
        self.settle(needed, until)

    def needed(self, blocks: Sequence[int]) -> dict[int, int]:
        """What must be kept of blocks so that a reader may be told of them; under the lock."""
        return {block: self._last.get(block, 0) for block in blocks}

    @property
    def mine(self) -> list[int]:
        """The blocks that are here and that this server answers for."""
        return [block for block in sorted(self._mine) if block in self.holdings]

    def settle(self, needed: dict[int, int], until: float, everyone: bool = False) -> bool:
        """Waits until what these blocks have had up to these numbers cannot be lost; see `Replication.wait`."""
        done = self._replication.wait(needed, until, everyone)
        if self._log is not None:
            self._log.wait(max(needed.values(), default=0), until - time.monotonic())
        if self.exposed is not None:
            self.exposed.settled(needed)
        return done

    def wait_logged(self, number: int) -> None:
        """Waits until the log, if there is one, has this record."""
        if self._log is not None:
            self._log.wait(number, self.deadline)

    def _commit(self, record: Record, versions: dict[int, int]) -> None:
        self._number += 1
        self._last.update(dict.fromkeys(records.blocks_of(record), self._number))
        self._replication.append(self._number, record, versions)
        if self._log is not None:
            self._log.append(self._number, record)
        self.changed.notify_all()

    def _expose(self, blocks: Iterable[int], number: int) -> None:
        """Says which versions readers find, by the record of this number."""
        if self.exposed is not None:
            for block in blocks:
                self.exposed.has(block, self.holdings.version(block), number)

    def _image(self, block: int) -> tuple[int, Image] | None:
        with self.changed:
            return (self._number, self.holdings.image(block)) if block in self.holdings else None

    def _send_image(self, block: int, take: Callable[[int, Image | None], None]) -> None:
        with self.changed:
            take(self._number, self.holdings.image(block) if block in self.holdings else None)
