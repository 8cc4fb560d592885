"""Loader processes: they read for one worker, and hand their batches over as raw arrays."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator

import torch

from verbund.comm.parent import die_with_parent
from verbund.comm.title import entitle
from verbund.comm.wire import Closed, Connection, Deadline, Message, WireError
from verbund.data.batch import Batch, Item, Transform, read
from verbund.data.samples import Ids, Samples
from verbund.errors import RunFailed, VerbundError, from_record, text_of

_DEADLINE = 600.0
_WAIT_SECONDS = 1.0


class LoaderProcesses:
    """Processes that read for one worker. Items are dealt out in turn and come back in order, so that the result is the
    same for any number of processes.

    They are forked at once, so this must be made while the worker has a single thread. They end with the worker: the
    kernel kills them when the thread that made them ends.

    Args:
        count: how many, at least 1.
        samples: what they read from.
        transform: changes each batch as it is read.
        deadline: seconds that one item may take.
    """

    def __init__(
        self, count: int, samples: Samples, transform: Transform | None = None, deadline: float = _DEADLINE
    ) -> None:
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._deadline = deadline
        self._closed = False
        sys.stdout.flush()  # what lies in the buffers would be printed by every process
        sys.stderr.flush()
        for number in range(count):
            ours, theirs = socket.socketpair()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent(parent)
                    entitle(f"loader {number}")
                    ours.close()
                    for connection in self._connections:
                        connection.close()
                    # No limit on how long the worker may be busy with something else: its death ends this process.
                    _serve(Connection(theirs, stall=0), samples, transform, number)
                finally:
                    os._exit(1)
            theirs.close()
            self._connections.append(Connection(ours))
            self._pids.append(pid)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes' ids."""
        return tuple(self._pids)

    def read(self, plan: Iterator[Item], prefetch: int) -> Iterator[Batch]:
        """The plan's batches in its order; each process has up to `prefetch` items to read.

        Raises:
            RunFailed: naming process and samples, if one raises, ends, or takes longer than the deadline.
            VerbundError: the reading's own.
        """
        asked: deque[tuple[int, Item]] = deque()
        count = len(self._connections)
        for index, item in enumerate(plan):
            self._ask(index % count, item)
            asked.append((index % count, item))
            if len(asked) >= count * prefetch:
                yield self._answer(*asked.popleft())
        while asked:
            yield self._answer(*asked.popleft())

    def close(self) -> None:
        """Ends the processes and waits for them; harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        for pid in self._pids:
            if self._ended(pid) is None:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    continue  # ended in between
        for connection in self._connections:
            connection.close()
        self._pids = []

    def _ask(self, number: int, item: Item) -> None:
        fields = {"ticket": item.ticket, "phantom": item.phantom, "training": item.training}
        try:
            self._connections[number].send("read", fields, ids=item.ids)
        except Closed:
            raise self._gone(number, item) from None

    def _answer(self, number: int, item: Item) -> Batch:
        try:
            message = self._connections[number].receive(self._deadline)
        except Deadline:
            raise RunFailed(
                f"loader process {number} (pid {self._pids[number]}) has not delivered {_few(item.ids)} of ticket "
                f"{item.ticket} within {self._deadline:g} s",
                where="data.loaders",
            ) from None
        except WireError:
            raise self._gone(number, item) from None
        if message.kind == "failed":
            raise from_record(message.fields["error"])
        arrays = message.arrays.values()
        columns = {name: torch.from_numpy(a) for name, a in zip(message.fields["columns"], arrays, strict=True)}
        return Batch(item.ticket, item.ids, columns, item.phantom)

    def _gone(self, number: int, item: Item) -> RunFailed:
        """The error for a process whose connection broke."""
        if self._closed:
            return RunFailed("the loader was closed", where="data.loaders")
        pid = self._pids[number]
        until = time.monotonic() + _WAIT_SECONDS
        while (how := self._ended(pid)) is None and time.monotonic() < until:
            time.sleep(0.01)  # the socket closes a moment before the process has ended
        return RunFailed(
            f"loader process {number} (pid {pid}) {how or 'closed its connection'} while it read {_few(item.ids)} of "
            f"ticket {item.ticket}",
            where="data.loaders",
            fix="It may have run out of memory: try fewer `data.loaders`" if how and "SIGKILL" in how else None,
        )

    def _ended(self, pid: int) -> str | None:
        """How a process ended; None while it runs."""
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return "ended"
        if done == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"ended with status {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


def _few(ids: Ids) -> str:
    shown = ", ".join(map(str, ids[:4].tolist()))
    return f"samples {shown}{', …' if len(ids) > 4 else ''}"


def _serve(connection: Connection, samples: Samples, transform: Transform | None, number: int) -> None:
    """A loader process's life: answers requests in their order until the worker closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the worker decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    # Requests are taken in by a thread: else the worker could wait for room for a request while this process waits for
    # room for an answer. The worker bounds how many there are.
    threading.Thread(target=_take, args=(connection, requests), daemon=True).start()
    try:
        while (message := requests.get()) is not None:
            _reply(connection, samples, transform, message, number)
    except Closed:
        pass  # the worker has ended, and with it the need
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _take(connection: Connection, requests: queue.SimpleQueue[Message | None]) -> None:
    try:
        while True:
            requests.put(connection.receive(None))
    except WireError:
        requests.put(None)


def _reply(
    connection: Connection, samples: Samples, transform: Transform | None, message: Message, number: int
) -> None:
    fields = message.fields
    item = Item(fields["ticket"], message.arrays["ids"], fields["phantom"], fields["training"])
    try:
        batch = read(samples, item, transform)
        # Any text may be a column's name: the arrays travel by number.
        arrays = {f"c{index}": value.detach().numpy() for index, value in enumerate(batch.columns.values())}
        connection.send("batch", {"columns": list(batch.columns)}, **arrays)
    except Closed:
        raise
    except VerbundError as error:
        connection.send("failed", {"error": error.record()})
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        failure = RunFailed(
            f"{type(error).__name__} in loader process {number}, {_few(item.ids)} of ticket {item.ticket}: "
            f"{text_of(error)}",
            where=f"{frames[-1].filename}, line {frames[-1].lineno}",
        )
        connection.send("failed", {"error": failure.record()})
