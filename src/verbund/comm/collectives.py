"""Collectives between the workers of an island, over gloo or NCCL.

Every call names what it is for. A peer's death surfaces as `PeerLost`, which is never the first cause: the supervisor
knows which process died and says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verbund.errors import ClusterLost

# The classes below the functions of torch.distributed, of which its stubs know only some.
c10d: Any = dist

Work = Any
"""torch's handle of a collective under way: `wait()`."""


# gloo's default of 2 takes a fifth longer over an all-reduce of 1 MB between two busy processes.
_THREADS = 4


class PeerLost(ClusterLost):
    """A collective broke off because another process is gone or did not come."""


class Group:
    """Workers of one island and what they do together.

    A group of one does nothing and costs nothing. gloo's sockets are bound to `address`.

    Args:
        store: torch's, through which all members of this generation find each other; or the path of a file for one.
        rank: this process's number, 0 … world − 1.
        world: how many there are.
        device: where the tensors lie; `cuda` uses NCCL for them and gloo for what stays on the host.
        timeout: seconds after which a collective gives up by itself.
        address: of this host; loopback if all members are on it. gloo has no TLS: between hosts the network must be
            trusted.
    """

    def __init__(
        self, store: Any, rank: int, world: int, device: torch.device, timeout: float, address: str = "127.0.0.1"
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._timeout = timeout
        self._address = address
        self._gloo: Any = None
        self._nccl: Any = None
        self._store: Any = None
        if world > 1:
            assert store is not None, "a group of several needs a store"
            self._store = c10d.FileStore(str(store), world) if isinstance(store, Path) else store
            self._meet()

    @staticmethod
    def apart(rank: int, world: int, device: torch.device) -> Group:
        """A group that is connected to nobody: for what only has to know its place."""
        group = Group(None, 0, 1, device, 0.0)
        group.rank, group.world = rank, world
        return group

    def part(self, name: str, ranks: list[int]) -> Group:
        """A group of some of this one's workers, this one among them.

        Every worker of `ranks` calls it, with the same list; groups that share a worker have different names.

        Args:
            name: of the group, e.g. the axis.
            ranks: numbers in this group, in the order in which they count in the new one.
        """
        part = Group(None, 0, 1, self.device, self._timeout, self._address)
        part.rank, part.world = ranks.index(self.rank), len(ranks)
        if part.world > 1:
            part._store = c10d.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}/", self._store)
            part._meet()
        return part

    def _meet(self) -> None:
        limit = timedelta(seconds=self._timeout)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._threads = _THREADS
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._address)]
        try:
            store = c10d.PrefixStore("gloo/", self._store)
            self._gloo = c10d.ProcessGroupGloo(store, self.rank, self.world, options)
            if self.device.type == "cuda":
                nccl = c10d.ProcessGroupNCCL.Options()
                nccl._timeout = limit
                store = c10d.PrefixStore("nccl/", self._store)
                self._nccl = c10d.ProcessGroupNCCL(store, self.rank, self.world, nccl)
            self.all_reduce(torch.zeros(1), "the first meeting")
        except RuntimeError as error:
            raise PeerLost(f"the {self.world} workers did not meet: {_first_line(error)}") from error

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> Work | None:
        """Starts adding up `tensor` over all workers, in place; `finish` waits for it."""
        if self.world == 1:
            return None
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX if maximum else c10d.ReduceOp.SUM
        return self._started(lambda: self._backend(tensor).allreduce([tensor], options), "an all-reduce")

    def finish(self, work: Work | None, what: str) -> None:
        """Waits for a collective under way.

        Raises:
            PeerLost: if a peer is gone or the timeout passed.
        """
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"{what} broke off: {_first_line(error)}") from error

    def all_reduce(self, tensor: Tensor, what: str, maximum: bool = False) -> None:
        """Adds up (or takes the maximum of) `tensor` over all workers, in place."""
        self.finish(self.start_all_reduce(tensor, maximum), what)

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """The tensors of all workers, of equal shape and dtype, by rank."""
        if self.world == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        self.finish(self._started(lambda: self._backend(tensor).allgather([gathered], [tensor]), what), what)
        return gathered

    def start_all_gather(self, whole: Tensor, share: Tensor) -> Work | None:
        """Starts gathering the equal shares of all workers, by rank; `finish` waits for it.

        Args:
            whole: contiguous, as many elements as all shares together; is overwritten.
            share: this worker's, contiguous.
        """
        if self.world == 1:
            whole.view(-1).copy_(share.view(-1))
            return None
        return self._started(
            lambda: self._backend(whole)._allgather_base(whole.view(-1), share.view(-1)), "an all-gather"
        )

    def start_all_to_all(self, received: Tensor, sent: Tensor) -> Work | None:
        """Starts sending the r-th of `world` equal parts of `sent` to worker r; `received` gets what the others sent,
        by rank. Both contiguous and of equal size. `finish` waits for it."""
        if self.world == 1:
            received.copy_(sent)
            return None
        return self._started(
            lambda: self._backend(sent).alltoall_base(received.view(-1), sent.view(-1), [], []), "an all-to-all"
        )

    def start_send(self, tensor: Tensor, to: int, tag: int = 0) -> Work | None:
        """Starts sending a contiguous tensor to worker `to`; it must stay as it is until `finish`."""
        return self._started(lambda: self._backend(tensor).send([tensor], to, tag), "a send")

    def receive(self, tensor: Tensor, source: int, tag: int, what: str) -> None:
        """Waits for what worker `source` sends under `tag`; shape and dtype must be what was sent."""
        self.finish(self._started(lambda: self._backend(tensor).recv([tensor], source, tag), "a receive"), what)

    def _started(self, start: Callable[[], Any], what: str) -> Any:
        try:
            return start()
        except RuntimeError as error:
            raise PeerLost(f"{what} could not start: {_first_line(error)}") from error

    def all_gather_arrays(self, arrays: dict[str, np.ndarray[Any, Any]], what: str) -> list[dict[str, Any]]:
        """The named arrays of all workers, by rank; names, types and shapes may differ between workers."""
        if self.world == 1:
            return [arrays]
        described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        header = json.dumps(described).encode()
        raw = len(header).to_bytes(8, "little") + header
        raw += b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        sizes = [int(t) for t in self.all_gather(torch.tensor([len(raw)]), what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return [_arrays(t[:n].numpy().tobytes()) for t, n in zip(self.all_gather(padded, what), sizes, strict=True)]

    def close(self) -> None:
        """Leaves the group; its sockets are closed."""
        self._gloo = self._nccl = None

    def _backend(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.is_cuda else self._gloo


def _arrays(raw: bytes) -> dict[str, Any]:
    size = int.from_bytes(raw[:8], "little")
    place = 8 + size
    arrays = {}
    for name, dtype, shape in json.loads(raw[8:place]):
        array: np.ndarray[Any, Any] = np.frombuffer(raw, dtype, int(np.prod(shape)), place).reshape(shape)
        place += array.nbytes
        arrays[name] = array
    return arrays


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].strip() if str(error) else type(error).__name__
