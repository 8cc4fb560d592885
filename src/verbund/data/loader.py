"""The loader: reads the samples of a plan, in the plan's order, where it costs least.

Measured with 64 rows of 784 bytes on one core: a batch gathered from a column file when it is needed costs 20 µs,
one that a thread has read ahead 40 µs, one that comes from another process 200 µs. So column files that fit into memory
are gathered inline; what is slow to read (images, Datasets, stores of over 1 GiB, augmentation) is read ahead by a
thread, or by loader processes where the job asks for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator

from verbund.data.batch import Batch, Item, Transform, read
from verbund.data.processes import LoaderProcesses
from verbund.data.samples import Samples

__all__ = ["Batch", "Item", "Loader", "LoaderProcesses", "Transform", "read"]

_JOIN_SECONDS = 5.0


class Loader:
    """Iterates over the batches of a plan, in its order. To be iterated once, and closed.

    Args:
        samples: where the samples are.
        plan: what to read.
        transform: changes each batch as it is read: augmentation. Loader processes have a transform of their own.
        prefetch: items read ahead, per loader process if there are any.
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
        self._ahead: ReadAhead | None = None

    def __iter__(self) -> Iterator[Batch]:
        """The batches.

        Raises:
            Exception: what reading or the transform raised, at the batch concerned.
        """
        if self._processes is not None:
            batches: Iterator[Batch] = self._processes.read(self._plan, self._prefetch)
        else:
            batches = (read(self._samples, item, self._transform) for item in self._plan)
            if not self._samples.source.slow and self._transform is None:
                return batches
        self._ahead = ReadAhead(batches, self._prefetch)
        return iter(self._ahead)

    def close(self) -> None:
        """Stops reading ahead and ends the loader processes; harmless when repeated."""
        if self._ahead is not None:
            self._ahead.stop()
        if self._processes is not None:
            self._processes.close()
        if self._ahead is not None:
            self._ahead.join()


class ReadAhead:
    """A thread that takes from `batches` what will be needed next, at most `depth` of it.

    Args:
        batches: advanced by the thread only.
        depth: batches that may wait.
    """

    def __init__(self, batches: Iterator[Batch], depth: int) -> None:
        self._batches = batches
        self._depth = depth
        self._ready: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Generator[Batch, None, None]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
                if not self._ready:
                    if self._failure is not None:
                        raise self._failure
                    return
                batch = self._ready.popleft()
                self._changed.notify_all()
            yield batch

    def stop(self) -> None:
        """Asks the thread to end; what was read ahead is dropped."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Waits until the thread has ended; one that hangs in a read of the user's is left behind, a daemon."""
        self._thread.join(_JOIN_SECONDS)

    def _fill(self) -> None:
        failure: BaseException | None = None
        try:
            for batch in self._batches:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._stopped)
                    if self._stopped:
                        break
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            failure = error
        finally:
            with self._changed:
                self._failure, self._ended = failure, True
                self._changed.notify_all()
