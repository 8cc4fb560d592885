"""The loader: reads the samples of a plan ahead, in the plan's order, in the worker or in processes of its own."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verbund.comm.parent import die_with_parent
from verbund.comm.wire import Connection, WireError
from verbund.data.samples import Ids, Samples
from verbund.errors import RunFailed, VerbundError, from_record

_DEADLINE = 600.0


@dataclass(frozen=True)
class Item:
    """One micro-batch to read: the samples `ids` of global batch `ticket`.

    A phantom has a sample only so that the worker can take part in collectives; it weighs nothing.
    """

    ticket: int
    ids: Ids
    phantom: bool = False
    training: bool = True


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `columns` by name, dimension 0 being the sample, in the order of `ids`."""

    ticket: int
    ids: Ids
    columns: dict[str, Tensor]
    phantom: bool = False

    def with_columns(self, columns: dict[str, Tensor]) -> Batch:
        return replace(self, columns=columns)


Transform = Callable[[Batch], Batch]


def read(samples: Samples, item: Item, transform: Transform | None) -> Batch:
    """Reads one item here and now."""
    rows = samples.source.rows(item.ids, item.ticket if item.training else None)
    batch = Batch(item.ticket, item.ids, {name: torch.from_numpy(value) for name, value in rows.items()}, item.phantom)
    return transform(batch) if transform is not None else batch


class Loader:
    """Iterates over the batches of a plan, in its order.

    Column files are gathered where they are needed: that costs less than handing a batch from one thread to another.
    What
    is slow to read (images, Datasets, augmentation) is read ahead by a thread, or by `processes`.

    Args:
        samples: where the samples are.
        plan: what to read.
        transform: changes each batch as it is read; augmentation.
        prefetch: items read ahead.
        processes: loader processes that were started before, or None.
    """

    def __init__(
        self,
        samples: Samples,
        plan: Iterator[Item],
        *,
        transform: Transform | None = None,
        prefetch: int = 2,
        processes: LoaderProcesses | None = None,
    ) -> None:
        self._samples, self._plan, self._transform = samples, plan, transform
        self._prefetch = prefetch
        self._processes = processes
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(prefetch)

    def __iter__(self) -> Iterator[Batch]:
        if self._processes is not None:
            return self._processes.read(self._plan, self._prefetch)
        if self._samples.source.slow or self._transform is not None:
            return self._ahead()
        return (read(self._samples, item, None) for item in self._plan)

    def close(self) -> None:
        """Stops reading ahead."""
        self._closing.set()
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._queue.get_nowait()  # frees a reader that waits for room
                except queue.Empty:
                    self._thread.join(0.01)
        if self._processes is not None:
            self._processes.close()

    def _ahead(self) -> Iterator[Batch]:
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)
        self._thread.start()
        while True:
            batch = self._queue.get()
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    def _fill(self) -> None:
        try:
            for item in self._plan:
                batch = read(self._samples, item, self._transform)
                if self._closing.is_set():
                    return
                self._queue.put(batch)
            self._queue.put(None)
        except BaseException as error:
            if not self._closing.is_set():
                self._queue.put(error)


class LoaderProcesses:
    """Processes that read for one worker.

    They are forked at once, so this must be made while the worker has a single thread, and they end with the worker.

    Args:
        count: how many.
        samples: what they read from.
        transform: changes each batch as it is read.
    """

    def __init__(self, count: int, samples: Samples, transform: Transform | None = None) -> None:
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        for number in range(count):
            ours, theirs = socket.socketpair()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                die_with_parent(parent)
                ours.close()
                for connection in self._connections:
                    connection.close()
                _serve(Connection(theirs), samples, transform, number)
            theirs.close()
            self._connections.append(Connection(ours))
            self._pids.append(pid)

    def read(self, plan: Iterator[Item], prefetch: int) -> Iterator[Batch]:
        """The plan's batches in its order; each process has up to `prefetch` items to read."""
        asked: deque[tuple[int, Item]] = deque()
        count = len(self._connections)
        for number, item in enumerate(plan):
            self._ask(number % count, item)
            asked.append((number % count, item))
            if len(asked) >= count * prefetch:
                yield self._answer(*asked.popleft())
        while asked:
            yield self._answer(*asked.popleft())

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for pid in self._pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
        self._connections, self._pids = [], []

    def _ask(self, number: int, item: Item) -> None:
        try:
            self._connections[number].send(
                "read",
                {"ticket": item.ticket, "phantom": item.phantom, "training": item.training},
                ids=item.ids,
            )
        except WireError as error:
            raise RunFailed(f"loader process {number} is gone: {error}", where="data.loaders") from None

    def _answer(self, number: int, item: Item) -> Batch:
        try:
            message = self._connections[number].receive(_DEADLINE)
        except WireError as error:
            few = ", ".join(map(str, item.ids[:4].tolist()))
            raise RunFailed(
                f"loader process {number} ended or hangs while it read samples {few}: {error}",
                where="data.loaders",
            ) from None
        if message.kind == "failed":
            raise from_record(message.fields["error"])
        columns = {name: torch.from_numpy(value) for name, value in message.arrays.items()}
        return Batch(item.ticket, item.ids, columns, item.phantom)


def _serve(connection: Connection, samples: Samples, transform: Transform | None, number: int) -> None:
    """A loader process's life."""
    torch.set_num_threads(1)
    try:
        while True:
            message = connection.receive(None)
            fields = message.fields
            item = Item(fields["ticket"], message.arrays["ids"], fields["phantom"], fields["training"])
            try:
                batch = read(samples, item, transform)
                columns = {name: np.asarray(value) for name, value in batch.columns.items()}
            except VerbundError as error:
                connection.send("failed", {"error": error.record()})
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                failure = RunFailed(
                    f"{type(error).__name__} in loader process {number}: {error}",
                    where=f"{where.filename}, line {where.lineno}",
                )
                connection.send("failed", {"error": failure.record()})
            else:
                connection.send("batch", None, **columns)
    except (WireError, KeyboardInterrupt):
        pass  # the worker has ended
    finally:
        os._exit(0)
