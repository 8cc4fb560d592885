"""Collectives between the workers of an island, over gloo or NCCL.

Every call names what it is for. A peer's death surfaces as `PeerLost`, which is never the first cause: the supervisor
knows which process died and says so.
"""

from __future__ import annotations

import json
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


class PeerLost(ClusterLost):
    """A collective broke off because another process is gone or did not come."""


class Group:
    """The workers of one island and what they do together.

    A group of one does nothing and costs nothing. gloo's sockets are bound to loopback: a group lives on one host.

    Args:
        store: path of a file that all members of this generation share, in a folder private to the user.
        rank: this process's number, 0 … world − 1.
        world: how many there are.
        device: where the tensors lie; `cuda` uses NCCL for them and gloo for what stays on the host.
        timeout: seconds after which a collective gives up by itself.
    """

    def __init__(self, store: Path | None, rank: int, world: int, device: torch.device, timeout: float) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._gloo: Any = None
        self._nccl: Any = None
        if world == 1:
            return
        assert store is not None, "a group of several needs a store"
        shared = c10d.FileStore(str(store), world)
        limit = timedelta(seconds=timeout)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        try:
            self._gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo/", shared), rank, world, options)
            if device.type == "cuda":
                nccl = c10d.ProcessGroupNCCL.Options()
                nccl._timeout = limit
                self._nccl = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl/", shared), rank, world, nccl)
            self.all_reduce(torch.zeros(1), "the first meeting")
        except RuntimeError as error:
            raise PeerLost(f"the {world} workers did not meet: {_first_line(error)}") from error

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> Work | None:
        """Starts adding up `tensor` over all workers, in place; `finish` waits for it."""
        if self.world == 1:
            return None
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX if maximum else c10d.ReduceOp.SUM
        try:
            return self._backend(tensor).allreduce([tensor], options)
        except RuntimeError as error:
            raise PeerLost(f"an all-reduce could not start: {_first_line(error)}") from error

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
        try:
            work = self._backend(tensor).allgather([gathered], [tensor])
        except RuntimeError as error:
            raise PeerLost(f"{what} broke off: {_first_line(error)}") from error
        self.finish(work, what)
        return gathered

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
