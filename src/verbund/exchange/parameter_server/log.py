"""The write-ahead log of a server without replicas: what it has acknowledged is there again when it was killed.

Records are appended to `log-N.bin`, as the wire writes messages, and synced by one thread, many at a time. When the log
has grown long, all blocks go to `snapshot-N`, which takes the place of the logs before `log-N.bin`.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verbund.checkpoint import durable
from verbund.comm.wire import Closed, Connection, Message, WireError
from verbund.comm.wire.stored import Stored
from verbund.errors import CheckpointError, RunFailed, VerbundError
from verbund.exchange.parameter_server import records
from verbund.exchange.parameter_server.holdings import Holdings, Image
from verbund.exchange.parameter_server.records import Record

BOUND = 64 << 20
_TIMES = 4  # how much longer than what is held a log may be
_NAME = re.compile(r"(log|snapshot)-(\d+)(\.bin)?")


class Log:
    """Appends records to a folder, which is this server's alone.

    Args:
        folder: is made if it is not there.
        images: a block and the number of the last record that has changed it, for a snapshot; None: it is not held.
        bound: bytes that a log may have before a snapshot takes its place, if what is held is not larger.
    """

    def __init__(self, folder: Path, images: Callable[[int], tuple[int, Image] | None], bound: int = BOUND) -> None:
        self._folder = folder
        self._images = images
        self._bound = bound
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Record]] = deque()
        self._synced = 0
        self._closing = False
        self._number = 1
        """Of the log that is being written."""
        self._size = 0
        self._held = 0
        self._blocks = 0
        self._model = ""
        self._snapshot: threading.Thread | None = None
        self._writing: threading.Thread | None = None
        self.failure: VerbundError | None = None
        """Why nothing can be written any more; nothing is acknowledged after it."""
        self.bytes = 0
        self.sync_seconds = 0.0
        self.snapshots = 0

    def recover(self, holdings: Holdings) -> int:
        """Puts what the folder has into empty holdings, and begins to write.

        Returns:
            The number of the last record.

        Raises:
            CheckpointError: if the folder cannot be used, is another model's, or what was acknowledged is damaged.
        """
        self._model = holdings.plan.model
        self._blocks = len(holdings.plan.blocks)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self._folder.glob(".snapshot-*.new"):
                unfinished.unlink()
            found = _files(self._folder)
            last = self._replayed(holdings, found)
            self._begin(self._number, last)
        except OSError as error:
            raise CheckpointError(durable.reason(error), where=str(self._folder), fix=durable.remedy(error)) from None
        self._synced = last
        self._writing = threading.Thread(target=self._write, name="log", daemon=True)
        self._writing.start()
        return last

    def append(self, number: int, record: Record) -> None:
        """Appends a record; its tensors must stay as they are until `wait` says so. In the order of the numbers."""
        with self._changed:
            self._queue.append((number, record))
            self._changed.notify_all()

    def wait(self, number: int, seconds: float) -> None:
        """Waits until all records up to this one are synced.

        Raises:
            VerbundError: if they are not, and why.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._synced >= number or self.failure is not None or self._closing, max(seconds, 0.0)
            )
            if self._synced >= number:
                return
            if self.failure is not None:
                raise self.failure
            what = f"nothing was synced for {seconds:.0f} s" if not done else "the log is closed"
            raise RunFailed(what, where=str(self._folder), fix="The disk is too slow or hangs" if not done else None)

    def close(self) -> None:
        """Writes what is there, and ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in (self._writing, self._snapshot):
            if thread is not None:
                thread.join(60.0)

    def totals(self) -> dict[str, Any]:
        """What was written, for the report."""
        return {"log_bytes": self.bytes, "log_sync_seconds": self.sync_seconds, "log_snapshots": self.snapshots}

    # Recovery

    def _replayed(self, holdings: Holdings, found: dict[str, list[int]]) -> int:
        at: dict[int, int] = {}
        last = 0
        begun = self._restored(holdings, found["snapshot"], at)
        self._held = sum(_bytes(holdings.image(block, copy=False)) for block in at)
        logs = [number for number in found["log"] if number >= begun]
        if logs and logs != list(range(begun, begun + len(logs))):
            fix = "What was acknowledged cannot be had any more; resume from a checkpoint, without this folder"
            raise CheckpointError(f"log-{begun}.bin is not there", where=str(self._folder), fix=fix)
        last = max(at.values(), default=0)
        for number in logs:
            last = self._replay(number, holdings, at, last, number == logs[-1])
        self._number = logs[-1] if logs else begun
        for kind in found:
            for old in [old for old in found[kind] if old < begun]:
                self._path(kind, old).unlink(missing_ok=True)
        return last

    def _restored(self, holdings: Holdings, snapshots: list[int], at: dict[int, int]) -> int:
        """Restores the newest snapshot that is whole; which log follows on it."""
        for number in reversed(snapshots):
            path = self._path("snapshot", number)
            try:
                images = list(_snapshot(path, holdings))
            except WireError as error:
                if number == snapshots[0]:
                    raise CheckpointError(
                        f"the snapshot is damaged: {error}",
                        where=str(path),
                        fix="Resume from a checkpoint, without this folder",
                    ) from None
                continue
            for record, image in images:
                holdings.put(image)
                at[image.block] = record
            return number
        return 1

    def _replay(self, number: int, holdings: Holdings, at: dict[int, int], last: int, newest: bool) -> int:
        path = self._path("log", number)
        size = path.stat().st_size
        end = 0
        file = Stored(path)
        reader = Connection(file)
        trouble = ""
        try:
            while end < size:
                try:
                    message = reader.receive()
                    if end == 0:
                        self._check_beginning(message, path)
                    else:
                        last = self._redo(message, holdings, at)
                except WireError as error:
                    trouble = str(error)
                    break
                end = reader.received_bytes
        finally:
            file.close()
        if trouble and not newest:
            fix = "What was acknowledged cannot be had any more; resume from a checkpoint, without this folder"
            raise CheckpointError(f"a record in the middle is damaged: {trouble}", where=str(path), fix=fix)
        if trouble:  # it was being written when the server ended, so nobody was told that it is there
            writer = Stored(path, append=True)
            writer.cut(end)
            writer.sync()
            writer.close()
        return last

    def _check_beginning(self, message: Message, path: Path) -> None:
        if message.kind != "log" or message.fields.get("model") != self._model:
            fix = "Take another folder"
            raise CheckpointError("this log is of another model", where=str(path), fix=fix)

    def _redo(self, message: Message, holdings: Holdings, at: dict[int, int]) -> int:
        number = int(message.fields["number"])
        record = records.decode(message, holdings.plan)
        if isinstance(record, Image):
            self._held += _bytes(record)
        newer = {block for block in records.blocks_of(record) if at.get(block, 0) < number}
        part = records.of_blocks(record, newer)
        if part is not None:
            records.apply(holdings, part)
        return number

    # Writing

    def _begin(self, number: int, last: int) -> None:
        """Opens a log for appending."""
        path = self._path("log", number)
        self._file = Stored(path, append=True)
        self._writer = Connection(self._file, stall=0)
        self._size = path.stat().st_size
        if not self._size:
            self._writer.send("log", {"model": self._model, "after": last})
            self._file.sync()
            durable.sync_folder(self._folder)
            self._size = self._writer.sent_bytes
        self._number = number

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                batch = list(self._queue)
                self._queue.clear()
            try:
                self._write_all(batch)
                if self._size > max(self._bound, _TIMES * self._held):
                    self._turn(batch[-1][0])
            except (OSError, WireError) as error:
                self._fail(error)
                break
        self._file.close()

    def _write_all(self, batch: list[tuple[int, Record]]) -> None:
        before = self._writer.sent_bytes
        for number, record in batch:
            kind, fields, arrays = records.encode(record)
            self._writer.send(kind, {**fields, "number": number}, None, **arrays)
            if isinstance(record, Image):
                self._held += _bytes(record)
        start = time.monotonic()
        self._file.sync()
        self.sync_seconds += time.monotonic() - start
        written = self._writer.sent_bytes - before
        self._size += written
        self.bytes += written
        with self._changed:
            self._synced = batch[-1][0]
            self._changed.notify_all()

    def _fail(self, error: OSError | WireError) -> None:
        cause = error if isinstance(error, OSError) else self._file.failure
        with self._changed:
            self.failure = RunFailed(
                f"the log of a parameter server failed: {durable.reason(cause) if cause else error}",
                where=str(self._folder),
                fix=durable.remedy(cause) if cause and not durable.full(cause) else "Free space there",
            )
            self._queue.clear()
            self._changed.notify_all()

    # Snapshots

    def _turn(self, last: int) -> None:
        """Goes on in a new log, and has all blocks written that the former ones are about."""
        if self._snapshot is not None and self._snapshot.is_alive():
            return
        self._file.close()
        self._begin(self._number + 1, last)
        self._snapshot = threading.Thread(target=self._shoot, args=(self._number,), name="snapshot", daemon=True)
        self._snapshot.start()

    def _shoot(self, number: int) -> None:
        beside = self._folder / f".snapshot-{number}.new"
        try:
            latest = self._write_snapshot(beside)
            self.wait(latest, 60.0)  # no block of it is ahead of the log
            beside.rename(self._path("snapshot", number))
            durable.sync_folder(self._folder)
            self.snapshots += 1
            for kind, numbers in _files(self._folder).items():
                for old in [old for old in numbers if old < number]:
                    self._path(kind, old).unlink(missing_ok=True)
        except (OSError, WireError, VerbundError):
            # The logs are all there; the next one that becomes long tries again.
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def _write_snapshot(self, path: Path) -> int:
        file = Stored(path, append=True)
        latest = count = held = 0
        try:
            writer = Connection(file, stall=0)
            writer.send("snapshot", {"model": self._model})
            for block in range(self._blocks):
                found = self._images(block)
                if found is None:
                    continue
                kind, fields, arrays = records.encode(found[1])
                writer.send(kind, {**fields, "number": found[0]}, None, **arrays)
                latest = max(latest, found[0])
                count += 1
                held += _bytes(found[1])
            writer.send("end", {"count": count})
            file.sync()
        finally:
            file.close()
        self._held = held
        return latest

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / (f"log-{number}.bin" if kind == "log" else f"snapshot-{number}")


def _snapshot(path: Path, holdings: Holdings) -> Iterator[tuple[int, Image]]:
    """The images of a snapshot with their records' numbers.

    Raises:
        WireError: if it is not whole.
        CheckpointError: if it is another model's.
    """
    file = Stored(path)
    try:
        reader = Connection(file)
        first = reader.receive()
        if first.kind != "snapshot" or first.fields.get("model") != holdings.plan.model:
            raise CheckpointError("this snapshot is of another model", where=str(path), fix="Take another folder")
        count = 0
        while (message := reader.receive()).kind == "image":
            image = records.decode(message, holdings.plan)
            assert isinstance(image, Image)
            yield int(message.fields["number"]), image
            count += 1
        if message.kind != "end" or message.fields.get("count") != count:
            raise Closed("it ends too soon")
    finally:
        file.close()


def _files(folder: Path) -> dict[str, list[int]]:
    """The numbers of what is there, ascending."""
    found: dict[str, list[int]] = {"log": [], "snapshot": []}
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            found[match[1]].append(int(match[2]))
    return {kind: sorted(numbers) for kind, numbers in found.items()}


def _bytes(image: Image) -> int:
    return sum(tensor.nbytes for tensor in image.tensors.values())
