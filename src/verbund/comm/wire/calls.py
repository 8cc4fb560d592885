"""The calling side: requests that are repeated over a new connection until they are answered.

Each request bears its caller's name, its number, and below which number the caller has all answers. By that the
answering side (`replies`) does each once, however often it comes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from verbund.comm.wire.connection import Connection
from verbund.comm.wire.failure import Closed, Deadline, Refused, WireError
from verbund.comm.wire.frames import Message, Payload, Place
from verbund.errors import VerbundError, from_record

REQUEST, REPLY, FAILED = "request", "reply", "failed"
_PAUSES = (0.02, 0.1, 0.5, 1.0)  # seconds before a connection is tried again
_CONNECT_SECONDS = 10.0


class Call:
    """A request under way."""

    def __init__(self, calls: Calls, number: int, size: int, deadline: float, into: Mapping[str, Place]) -> None:
        self._calls = calls
        self.number = number
        self.size = size
        self.deadline = deadline
        self.into = into
        self.kind = ""
        self.fields: dict[str, Any] = {}
        self.arrays: Mapping[str, Payload] = {}
        self.answer: Message | Exception | None = None
        self.sending = 0
        """Threads that send it."""

    def wait(self, seconds: float) -> bool:
        """Waits for the answer so long; whether `result` returns, or raises, at once."""
        return self._calls._ended(self, seconds)

    def give_up(self) -> None:
        """Asks no more for the answer: its places do not change from now on, and the arrays are free.

        Whether the request was done is not known.
        """
        self._calls._give_up(self)

    def result(self) -> Message:
        """Waits for the answer.

        Raises:
            Deadline: if it did not come in time. Whether the request was done is not known.
            Refused: if the two ends do not trust each other.
            VerbundError: the other side's, in place of an answer.
        """
        return self._calls._wait(self)


class Calls:
    """Requests to one server. What is under way is bounded: who wants more waits for its turn.

    Args:
        connect: makes a connection within so many seconds, e.g. `lambda seconds: dial(address, secret, seconds)`.
        name: of the server, for messages.
        window: requests that may be under way.
        window_bytes: bytes of arrays that may be under way; a single larger request is on its way alone.
        patience: seconds of silence after which the connection counts as dead and requests are sent again.
    """

    def __init__(
        self,
        connect: Callable[[float], Connection],
        name: str,
        window: int = 32,
        window_bytes: int = 1 << 28,
        patience: float = 30.0,
    ) -> None:
        self._patience = patience
        self._connect = connect
        self._name = name
        self._window = window
        self._window_bytes = window_bytes
        self._caller = secrets.token_hex(8)
        self._number = 0
        self._changed = threading.Condition()
        self._under_way: dict[int, Call] = {}
        self._connection: Connection | None = None
        self._direct = False
        """Whether all earlier requests were sent over it: what one thread starts is sent in its order."""
        self._receiving = 0
        """Which request's answer is being written into its place."""
        self._trouble = "it has not been reached yet"
        self._closing = False
        self._thread = threading.Thread(target=self._carry, name=f"calls to {name}", daemon=True)
        self._thread.start()

    def start(
        self,
        kind: str,
        fields: Mapping[str, Any] | None,
        timeout: float,
        into: Mapping[str, Place] | None = None,
        /,
        **arrays: Payload,
    ) -> Call:
        """Sends a request, whose result must be asked for; arrays must stay as they are until it is there.

        Args:
            kind: what is asked.
            fields: plain JSON values.
            timeout: seconds within which the answer must be there.
            into: where the answer's arrays are received to.
            arrays: what travels raw.

        Raises:
            Deadline: if others were under way for all that time.
            Closed: if these calls are closed.
            ValueError: if a field has a name that is taken.
        """
        if fields and not {REQUEST, REPLY}.isdisjoint(fields):
            raise ValueError(f"`{REQUEST}` and `{REPLY}` are no names for fields of a request")
        deadline = time.monotonic() + timeout
        size = sum(_bytes(array) for array in arrays.values())
        with self._changed:
            while not self._closing and not self._room(size):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise Deadline(f"{self._name} took no more requests in time: {self._trouble}")
            if self._closing:
                raise Closed(f"the calls to {self._name} are closed")
            self._number += 1
            call = Call(self, self._number, size, deadline, into or {})
            call.kind, call.fields, call.arrays = kind, dict(fields or {}), arrays
            self._under_way[call.number] = call
            connection = self._connection if self._direct else None
        if connection is not None:
            self._send(connection, call)
        return call

    def ask(
        self,
        kind: str,
        fields: Mapping[str, Any] | None,
        timeout: float,
        into: Mapping[str, Place] | None = None,
        /,
        **arrays: Payload,
    ) -> Message:
        """Sends a request and waits for its answer; see `start` and `Call.result`."""
        return self.start(kind, fields, timeout, into, **arrays).result()

    def close(self, wait: bool = True) -> None:
        """Ends the connection; requests under way end with `Closed`, and nothing of them is sent any more.

        Args:
            wait: until its thread has ended.
        """
        with self._changed:
            self._closing = True
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            connection.end()
        if wait:
            self._thread.join(_CONNECT_SECONDS + 1)

    def _room(self, size: int) -> bool:
        taken = sum(call.size for call in self._under_way.values())
        return not self._under_way or (len(self._under_way) < self._window and taken + size <= self._window_bytes)

    def _wait(self, call: Call) -> Message:
        with self._changed:
            while call.answer is None:
                left = call.deadline - time.monotonic()
                if left <= 0:
                    call.answer = Deadline(f"{self._name} did not answer in time: {self._trouble}")
                elif self._closing:
                    call.answer = Closed(f"the calls to {self._name} are closed")
                else:
                    self._changed.wait(left)
            self._leave(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        if call.answer.kind == FAILED:
            raise from_record(call.answer.fields)
        return call.answer

    def _ended(self, call: Call, seconds: float) -> bool:
        seconds = min(seconds, call.deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: call.answer is not None or self._closing, max(seconds, 0.0))
            return call.answer is not None or self._closing or time.monotonic() >= call.deadline

    def _give_up(self, call: Call) -> None:
        with self._changed:
            call.answer = call.answer or Closed(f"a request to {self._name} was given up")
            self._leave(call)

    def _leave(self, call: Call) -> None:
        """Takes a call off what is under way, as soon as nobody reads its arrays or writes its places."""
        mine = self._receiving == call.number or (call.sending and not isinstance(call.answer, Message))
        if mine and self._connection is not None:
            self._connection.end()
        self._changed.wait_for(lambda: self._receiving != call.number and not call.sending)
        self._under_way.pop(call.number, None)
        self._changed.notify_all()

    def _send(self, connection: Connection, call: Call) -> None:
        with self._changed:
            if call.answer is not None or self._closing:
                return
            call.sending += 1
            answered = min(self._under_way, default=call.number)
        try:
            self._send_numbered(connection, call, answered)
        finally:
            with self._changed:
                call.sending -= 1
                self._changed.notify_all()

    def _send_numbered(self, connection: Connection, call: Call, answered: int) -> None:
        fields = {**call.fields, REQUEST: [self._caller, call.number, answered]}
        try:
            connection.send(call.kind, fields, max(call.deadline - time.monotonic(), 1e-3), **call.arrays)
        except WireError as error:
            self._trouble = str(error)
            connection.end()  # the thread that receives notices, and sends all again
        except ValueError as error:  # nothing was sent
            with self._changed:
                call.answer = error
                self._changed.notify_all()

    def _carry(self) -> None:
        """Connects, sends again what is not answered, and receives; until it is closed."""
        failures = 0
        while not self._closing:
            try:
                connection = self._connect(_CONNECT_SECONDS)
            except Refused as error:
                self._fail_all(error)
            except (WireError, VerbundError, OSError) as error:
                self._trouble = str(error)
            else:
                failures = 0
                self._converse(connection)
            with self._changed:
                if not self._closing:
                    self._changed.wait_for(lambda: self._closing, _PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1

    def _converse(self, connection: Connection) -> None:
        with self._changed:
            self._connection = connection
            self._trouble = "it is silent"
        sender = threading.Thread(target=self._send_again, args=(connection,), daemon=True)
        sender.start()
        try:
            while not self._closing:
                if connection.ready(self._patience):
                    self._take(connection.receive(None, self._places))
                elif self._under_way:
                    self._trouble = f"it was silent for {self._patience:g} s"
                    break
        except (WireError, ValueError) as error:  # ValueError: a place that is none
            self._trouble = str(error)
        finally:
            with self._changed:
                self._connection = None
                self._direct = False
                self._receiving = 0
                self._changed.notify_all()
            connection.end()
            sender.join()
            connection.close()

    def _send_again(self, connection: Connection) -> None:
        """Sends all that is under way over a new connection, in order."""
        last = 0
        while True:
            with self._changed:
                number = min((number for number in self._under_way if number > last), default=None)
                if number is None or self._connection is not connection:
                    self._direct = self._connection is connection
                    return
                call = self._under_way[number]
            self._send(connection, call)
            last = number

    def _places(self, kind: str, fields: dict[str, Any]) -> Mapping[str, Place]:
        with self._changed:
            call = self._under_way.get(_number(fields))
            if call is None or call.answer is not None or kind == FAILED:
                return {}
            self._receiving = call.number
            return call.into

    def _take(self, message: Message) -> None:
        with self._changed:
            call = self._under_way.get(_number(message.fields))
            message.fields.pop(REPLY, None)
            self._receiving = 0
            if call is not None and call.answer is None:
                call.answer = message
            self._changed.notify_all()

    def _fail_all(self, error: WireError) -> None:
        self._trouble = str(error)
        with self._changed:
            for call in self._under_way.values():
                call.answer = call.answer or error
            self._changed.notify_all()


def _number(fields: dict[str, Any]) -> int:
    number = fields.get(REPLY)
    return number if type(number) is int else 0


def _bytes(array: Any) -> int:
    return int(getattr(array, "nbytes", 0) or getattr(getattr(array, "values", None), "nbytes", 0))
