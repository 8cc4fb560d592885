"""Orders to supervised processes that stay: the command's side and theirs.

A command that must go on talking to the network does not compute itself. Its processes ask for orders, do them
together, and the first of them says what came of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from verbund.cluster.process import Process
from verbund.cluster.worker import Worker, describe
from verbund.comm.wire import Deadline, Message, WireError
from verbund.errors import ClusterLost, Interrupted, VerbundError, from_record

_ASK_SECONDS = 20.0

Order = dict[str, Any]
"""Plain JSON values; `order` says what is to be done."""


class Orders:
    """The command's side: its network thread wants something done, the supervisor's thread hands it out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._order: Order | None = None
        self._number = 0
        self._result: dict[str, Any] | None = None
        self._waiting: dict[int, tuple[Process, int, int]] = {}
        """By rank: who waits for the order after which one, and the number of its question."""
        self._closed: VerbundError | None = None

    def handle(self, process: Process, message: Message) -> None:
        """Takes a message of a process."""
        fields = message.fields
        if message.kind == "order":
            with self._changed:
                self._waiting[process.spec.rank] = (process, int(fields["done"]), int(fields["number"]))
                self._hand_out()
        elif message.kind == "ordered":
            with self._changed:
                if fields["order"] == self._number and process.spec.rank == 0:
                    self._result = fields["result"]
                    self._changed.notify_all()

    def do(self, order: Order, timeout: float) -> dict[str, Any]:
        """Has an order done, one at a time; what came of it.

        Raises:
            VerbundError: the processes' own, with its traceback in `trace`; or that of their end.
        """
        with self._turn, self._changed:
            self._number += 1
            self._order, self._result = order, None
            self._hand_out()
            done = self._changed.wait_for(lambda: self._result is not None or self._closed is not None, timeout)
            if self._result is None:
                if self._closed is not None:
                    raise self._closed
                assert not done
                raise ClusterLost(f"`{order['order']}` was not done within {timeout:.0f} s")
            result = self._result
        if "error" in result:
            error = from_record(result["error"])
            error.trace = result.get("trace")
            raise error
        return result

    def end(self) -> None:
        """Lets all processes end; for the thread that has given orders."""
        with self._changed:
            self._number += 1
            self._order = {"order": "end"}
            self._hand_out()

    def close(self, why: VerbundError | None) -> None:
        """The processes have ended."""
        with self._changed:
            self._closed = why or Interrupted("the processes have ended")
            self._changed.notify_all()

    def _hand_out(self) -> None:
        for rank, (process, done, question) in list(self._waiting.items()):
            if self._order is None or done >= self._number:
                continue
            del self._waiting[rank]
            try:
                process.connection.send("answer", {"number": question, "order": self._order, "of": self._number})
            except WireError:
                continue  # its end is on the way


def obey(worker: Worker, do: Callable[[Order], dict[str, Any]]) -> None:
    """A process's side: does orders until the end.

    Args:
        worker: the process.
        do: does one; all processes get the same, and the first one's answer counts. What goes wrong in a process that
            is alone is told as the order's result, and the next one is awaited; with several it ends them all, as the
            others may wait in a collective.
    """
    done = 0
    while not worker.stopping:
        worker.doing("waiting for an order", done)
        try:
            message = worker.ask("order", {"done": done}, {}, _ASK_SECONDS)
        except Deadline:
            continue
        order, done = dict(message.fields["order"]), int(message.fields["of"])
        if order["order"] == "end":
            return
        worker.doing(order["order"], done)
        start = time.monotonic()
        try:
            result = do(order)
        except Exception as error:
            if worker.spec.world > 1:
                raise
            result = describe(error)
        worker.send("ordered", order=done, result={**result, "seconds": round(time.monotonic() - start, 4)})
