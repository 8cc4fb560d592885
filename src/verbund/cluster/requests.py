"""Requests that other commands of this user make of a training that goes on: over a private socket in the run's folder.

The socket is reached through a descriptor of its folder, so that the length of the folder's path does not matter.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verbund.cluster.islands import Islands
from verbund.cluster.membership import Membership
from verbund.comm.wire import Closed, Connection, WireError, dial, listen
from verbund.errors import InputError

_SOCKET = "socket"
_PATIENCE = 5.0
"""Seconds until a training must have let somebody in."""
_PAUSE = 0.2
"""Seconds that the rest of a request may take: the supervisor waits for it."""
_PENDING = 16


class Requests:
    """The supervisor's side: one request of how many workers there are to be is under way, a newer one ends it.

    Args:
        folder: is made, for this user alone.

    Raises:
        InputError: if there can be no socket.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / _SOCKET).unlink(missing_ok=True)  # of one that was killed
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._listener = listen(_address(self._folder))
        except InputError:
            os.close(self._folder)
            raise
        self._waiting: list[Connection] = []
        self._under_way: tuple[Connection, int, int, float] | None = None

    def fileno(self) -> int:
        """Readable when somebody has come."""
        return self._listener.fileno()

    def turn(self, membership: Membership | Islands, ending: bool) -> None:
        """Takes what has come, and answers what is done. Waits for nobody.

        Args:
            membership: what requests are about.
            ending: whether the training is at its end.
        """
        with contextlib.suppress(WireError):
            while len(self._waiting) < _PENDING:
                self._waiting.append(self._listener.accept(0.0))
        for connection in list(self._waiting):
            if connection.ready():
                self._waiting.remove(connection)
                with contextlib.suppress(WireError, KeyError, TypeError, ValueError):
                    self._take(connection, int(connection.receive(_PAUSE).fields["workers"]), membership, ending)
        if self._under_way is None:
            return
        _, former, workers, since = self._under_way
        if ending:
            self._answer(refused="the training has come to its end meanwhile")
        elif membership.wanted != workers:
            self._answer(refused="a worker was lost meanwhile that is not replaced any more")
        elif membership.complete:
            self._answer(former=former, workers=workers, seconds=round(time.monotonic() - since, 3))

    def close(self) -> None:
        """Takes no more; who waits for an answer is told."""
        if self._under_way is not None:
            self._answer(refused="the training has come to its end meanwhile")
        for connection in self._waiting:
            connection.close()
        self._listener.close()
        os.close(self._folder)

    def _take(self, connection: Connection, workers: int, membership: Membership | Islands, ending: bool) -> None:
        if self._under_way is not None:
            self._answer(refused="another request has come meanwhile")
        self._under_way = (connection, membership.count, workers, time.monotonic())
        if ending:
            self._answer(refused="the training is at its end")
        elif (why := membership.refusal(workers)) is not None:
            self._answer(refused=why)
        else:
            membership.scale(workers)

    def _answer(self, **fields: Any) -> None:
        assert self._under_way is not None
        connection, self._under_way = self._under_way[0], None
        with contextlib.suppress(WireError):
            connection.send("answer", fields)
        connection.close()


def ask(folder: Path, workers: int, deadline: float) -> dict[str, Any]:
    """Asks a training for so many workers, and waits until there are.

    Args:
        folder: where it takes requests.
        workers: how many.
        deadline: seconds that it may take.

    Returns:
        `former` and `workers`, counts, and `seconds`; or `refused`: why not.

    Raises:
        WireError: if it does not listen, or ended before it answered.
    """
    with _opened(folder) as descriptor:
        connection = dial(_address(descriptor), None, _PATIENCE)
    try:
        connection.send("scale", {"workers": workers})
        return dict(connection.receive(deadline).fields)
    finally:
        connection.close()


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Closed(f"{folder}: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _address(descriptor: int) -> str:
    return f"unix:/proc/self/fd/{descriptor}/{_SOCKET}"
