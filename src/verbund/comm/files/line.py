"""A process's line to the files of its run's owner: requests that are repeated until they are answered."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.comm.rendezvous import Meeting, dial
from verbund.comm.wire import Calls, Message, WireError
from verbund.comm.wire.calls import Call
from verbund.errors import RunFailed

PART_BYTES = 4 << 20
"""Bytes of a file that travel in one message."""
ROLE = "files"
"""What a connection of this kind says that it is."""
AHEAD = 4
"""Requests under way at a time, so that a link with a long way is used whole."""
_SECONDS = 120.0
"""How long one request may take."""

Bytes = NDArray[np.uint8]


class Line:
    """Requests to the file service of a run's owner. Safe from several threads; starts one of its own.

    Args:
        meeting: where the run's processes meet.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._calls = Calls(lambda _: dial(meeting, ROLE, os.getpid()), "the run's files", window_bytes=1 << 26)

    def start(self, kind: str, into: Bytes | None = None, part: Bytes | None = None, /, **fields: Any) -> Call:
        """Begins a request; `result` has its answer.

        Args:
            kind: what is asked.
            into: where the bytes of the answer go to.
            part: bytes that travel; must stay as they are until there is an answer.
            fields: JSON values.
        """
        arrays = {} if part is None else {"part": part}
        try:
            return self._calls.start(kind, fields, _SECONDS, {} if into is None else {"part": into}, **arrays)
        except WireError as error:
            raise _lost(error) from None

    @staticmethod
    def result(call: Call) -> Message:
        """The answer.

        Raises:
            VerbundError: the owner's, or `RunFailed` if there is none.
        """
        try:
            return call.result()
        except WireError as error:
            raise _lost(error) from None

    def ask(self, kind: str, **fields: Any) -> Message:
        """A request's answer; see `start` and `result`."""
        return self.result(self.start(kind, **fields))

    def each(self, starts: Iterable[Callable[[], Call]], took: Callable[[Message], None] = lambda _: None) -> None:
        """Makes many requests, a few ahead of the one that is waited for; `took` gets the answers in their order."""
        under_way: deque[Call] = deque()
        try:
            for start in starts:
                if len(under_way) >= AHEAD:
                    took(self.result(under_way.popleft()))
                under_way.append(start())
            while under_way:
                took(self.result(under_way.popleft()))
        finally:
            for call in under_way:
                call.give_up()

    def close(self) -> None:
        """Ends the connection."""
        self._calls.close(wait=False)


def _lost(error: WireError) -> RunFailed:
    return RunFailed(f"the files of the run cannot be reached from this host: {error}")
