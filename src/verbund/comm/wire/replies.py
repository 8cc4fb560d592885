"""The answering side: each request is done once, however often it comes.

What has been answered is kept until its caller has said that it has the answer, within limits. A request whose answer
is not kept any more is refused, never done again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbund.comm.wire.calls import FAILED, REPLY, REQUEST
from verbund.comm.wire.connection import Connection, Places
from verbund.comm.wire.failure import WireError
from verbund.comm.wire.frames import Message, Payload
from verbund.comm.wire.memory import Memory
from verbund.errors import RunFailed, VerbundError, shortened, text_of

_CALLERS = 4096
_IDLE_SECONDS = 600.0  # after which a caller may be forgotten, if there are too many
_UNDER_WAY = 1024  # requests of one caller that it has not said to be answered


@dataclass(frozen=True)
class Reply:
    """An answer. Arrays must not change until they are sent; kept answers until the caller has them."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Payload] = field(default_factory=dict)
    keep: bool = True
    """False for what may be done again, such as a read: it is, if the answer was lost."""


@dataclass
class _Done:
    """A request that came: its answer, once there is one, and who waits for it."""

    connection: Connection
    reply: Reply | None = None
    forgotten: bool = False
    size: int = 0


@dataclass
class _Caller:
    answered: int = 0
    """The caller has all answers to requests below this number."""
    requests: OrderedDict[int, _Done] = field(default_factory=OrderedDict)
    seen: float = 0.0


class Replies:
    """Answers the requests of many callers.

    Args:
        handle: does a request and answers it; called from the thread of each connection. An exception of it travels to
            the caller.
        keep_bytes: of arrays of answers that are kept.
        closing: is called before a connection is closed, from its thread.
    """

    def __init__(
        self,
        handle: Callable[[Message], Reply],
        keep_bytes: int = 1 << 28,
        closing: Callable[[], object] = lambda: None,
    ) -> None:
        self._handle = handle
        self._keep_bytes = keep_bytes
        self._closing = closing
        self._kept = 0
        self._lock = threading.Lock()
        self._callers: OrderedDict[str, _Caller] = OrderedDict()

    def serve(self, connection: Connection, into: Places | None = None, memory: Memory | None = None) -> None:
        """Answers what comes over a connection, until it ends; for a thread of its own.

        Args:
            connection: is closed at the end.
            into: where requests' arrays are received to.
            memory: where the others are received to; valid until the request is answered.
        """
        try:
            while True:
                self.answer(connection, connection.receive(None, into, memory))
        except WireError:
            return
        finally:
            self._closing()
            connection.close()

    def answer(self, connection: Connection, message: Message) -> None:
        """Answers one request.

        Raises:
            WireError: if it is none, or the caller is gone.
        """
        name, number, answered = _request(message)
        with self._lock:
            caller = self._caller(name, answered)
            if number < caller.answered:
                return  # it came once more, late
            known = caller.requests.get(number)
            if known is None:
                if len(caller.requests) >= _UNDER_WAY:
                    raise WireError("a caller has too many requests under way")
                known = caller.requests[number] = _Done(connection)
                reply = None
            else:
                known.connection = connection
                reply = known.reply
                if known.forgotten:
                    reply = _failed(RunFailed("a request came again after its answer was given up", where=message.kind))
                elif reply is None:
                    return  # it is being done; the answer goes to the newest connection
        if reply is None:
            reply = self._do(message)
            with self._lock:
                self._keep(caller, number, known, reply)
                connection = known.connection
        try:
            connection.send(reply.kind, {**reply.fields, REPLY: number}, **reply.arrays)
        except ValueError as error:  # nothing was sent
            failed = _failed(RunFailed(f"an answer cannot travel: {error}", where=message.kind))
            connection.send(failed.kind, {**failed.fields, REPLY: number})

    def _do(self, message: Message) -> Reply:
        try:
            return self._handle(message)
        except VerbundError as error:
            return _failed(error)
        except Exception as error:
            text = shortened(f"{type(error).__name__}: {text_of(error)}")
            return _failed(RunFailed(f"a request failed: {text}", where=message.kind))

    def _caller(self, name: str, answered: int) -> _Caller:
        now = time.monotonic()
        caller = self._callers.get(name)
        if caller is None:
            if len(self._callers) >= _CALLERS:
                oldest, idle = next(iter(self._callers.items()))
                if now - idle.seen < _IDLE_SECONDS:
                    raise WireError("there are too many callers")
                self._drop(idle, max(idle.requests, default=0) + 1)
                del self._callers[oldest]
            caller = self._callers[name] = _Caller()
        caller.seen = now
        self._callers.move_to_end(name)
        self._drop(caller, answered)
        return caller

    def _drop(self, caller: _Caller, answered: int) -> None:
        """Gives up the answers that the caller has."""
        if answered > caller.answered:
            caller.answered = answered
            for number in [number for number in caller.requests if number < answered]:
                self._kept -= caller.requests.pop(number).size

    def _keep(self, caller: _Caller, number: int, done: _Done, reply: Reply) -> None:
        if number not in caller.requests:
            return  # the caller has given up in the meantime
        if not reply.keep:
            del caller.requests[number]
            return
        done.reply = reply
        done.size = sum(int(getattr(array, "nbytes", 0)) for array in reply.arrays.values())
        self._kept += done.size
        for other in list(self._callers.values()):
            for old in list(other.requests.values()):
                if self._kept <= self._keep_bytes:
                    return
                if old.reply is not None and old.size:
                    self._kept -= old.size
                    old.reply, old.size, old.forgotten = None, 0, True


def _request(message: Message) -> tuple[str, int, int]:
    given = message.fields.pop(REQUEST, None)
    if (
        not isinstance(given, list)
        or len(given) != 3
        or not isinstance(given[0], str)
        or len(given[0]) > 64
        or not all(type(number) is int and number > 0 for number in given[1:])
    ):
        raise WireError("a message is no request")
    return given[0], given[1], given[2]


def _failed(error: VerbundError) -> Reply:
    return Reply(FAILED, error.record())
