"""The order of what comes from primaries: each record of a stream once, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from verbund.errors import RunFailed


class Inbound:
    """Streams by the rank of their sender; a newer one takes the place of an older.

    Args:
        deadline: seconds that a record may have to wait for the one before it.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._newest: dict[int, tuple[int, int]] = {}
        self._next: dict[int, int] = {}
        self._busy: set[int] = set()

    @contextmanager
    def turn(self, stream: Sequence[int], sequence: int) -> Iterator[bool]:
        """Waits for the turn of a record; whether it is to be done, or was done before.

        Args:
            stream: rank and generation of the sender, and the stream's number.
            sequence: of the record, from 1.

        Raises:
            RunFailed: if the stream is an old one, or the record before did not come or was not done.
        """
        rank, newest = int(stream[0]), (int(stream[1]), int(stream[2]))
        with self._changed:
            if sequence == 1 and self._newest.get(rank, (-1, -1)) < newest:
                self._newest[rank], self._next[rank] = newest, 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._due(rank, newest, sequence), self._deadline)
            if self._newest.get(rank) != newest or self._next[rank] < sequence or rank in self._busy:
                raise RunFailed("a record came out of its order", where=f"server {rank}")
            due = self._next[rank] == sequence
            if due:
                self._busy.add(rank)
        done = False
        try:
            yield due
            done = True
        finally:
            with self._changed:
                if due:
                    self._busy.discard(rank)
                    if done and self._newest[rank] == newest:
                        self._next[rank] += 1
                    self._changed.notify_all()

    def _due(self, rank: int, newest: tuple[int, int], sequence: int) -> bool:
        now = self._newest.get(rank, (-1, -1))
        return now > newest or (now == newest and self._next[rank] >= sequence and rank not in self._busy)
