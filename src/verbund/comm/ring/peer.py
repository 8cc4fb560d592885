"""Another member: its connection, a thread that sends to it, and what has come of it before it was asked for."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from verbund.comm.peer_lost import PeerLost
from verbund.comm.wire import Connection, Message, Payload, WireError

Key = tuple[str, int, int]
"""What a message is for: kind, number of the collective (or tag), number of the message within it."""

_EARLY_BYTES = 1 << 30


class Sending:
    """A message on its way to a peer."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: PeerLost | None = None

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error


class Peer:
    """A member that this one is connected to.

    Args:
        rank: its.
        connection: to it.
        timeout: seconds within which it must take a message.
    """

    def __init__(self, rank: int, connection: Connection, timeout: float) -> None:
        self.rank = rank
        self.connection = connection
        self.left = False
        """Whether it has said that it leaves."""
        self.waits_for: int | None = None
        """Whom it waits for, by its own word."""
        self._timeout = timeout
        self._early: dict[Key, deque[Message]] = {}
        self._early_bytes = 0
        # Without a limit: what lies here are views of the tensors that were given. One here would let a ring lock up.
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any], Mapping[str, Payload], Sending] | None]
        self._queue = queue.SimpleQueue()
        self._lost: PeerLost | None = None
        self._thread = threading.Thread(target=self._send_all, name=f"sending to rank {rank}", daemon=True)
        self._thread.start()

    def send(self, key: Key, arrays: Mapping[str, Payload], fields: Mapping[str, Any] | None = None) -> Sending:
        """Sends a message in the background; arrays must stay as they are until it is over."""
        sending = Sending()
        self._queue.put((key[0], {**(fields or {}), "key": list(key[1:])}, arrays, sending))
        return sending

    def take(self, key: Key) -> Message | None:
        """What came early under this key."""
        if key not in self._early:
            return None
        message = self._early[key].popleft()
        if not self._early[key]:
            del self._early[key]
        self._early_bytes -= _size(message)
        return message

    def keep(self, key: Key, message: Message) -> None:
        """Keeps what has come before it was asked for.

        Raises:
            WireError: if it is too much.
        """
        self._early_bytes += _size(message)
        if self._early_bytes > _EARLY_BYTES:
            raise WireError(f"more than {_EARLY_BYTES} bytes came before they were asked for")
        self._early.setdefault(key, deque()).append(message)

    def finish(self) -> None:
        """Sends what is queued, and then no more."""
        self._queue.put(None)

    def flush(self, deadline: float) -> None:
        """Waits until `finish` is done, at the latest until `deadline` on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends the connection."""
        self.connection.end()
        self._thread.join()
        self.connection.close()

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, fields, arrays, sending = item
            if self._lost is None:
                try:
                    self.connection.send(kind, fields, self._timeout, **arrays)
                except (WireError, ValueError) as error:
                    self._lost = PeerLost(f"rank {self.rank} takes nothing any more: {error}")
            sending.error = self._lost
            sending.over.set()


def _size(message: Message) -> int:
    return sum(array.nbytes for array in message.arrays.values())
