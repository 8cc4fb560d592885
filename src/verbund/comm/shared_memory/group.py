"""The collectives of a group whose members all share one host's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbund.comm.shared_memory.arena import NoRoom
from verbund.comm.shared_memory.channel import Channel, Operation
from verbund.comm.shared_memory.host import Host
from verbund.comm.shared_memory.operations import (
    ALONE,
    DTYPES,
    Barrier,
    Broadcast,
    Gather,
    ReduceScatter,
    SumAlone,
    SumResident,
    SumShared,
    piece,
)
from verbund.comm.shared_memory.progress import Line
from verbund.comm.shared_memory.reduction import Reducer


class Started:
    """A collective under way.

    Args:
        host: whose progress waits for it.
        line: the collectives among which it is.
        number: its number there.
        timeout: seconds until the wait gives up.
    """

    __slots__ = ("_host", "_line", "_number", "_timeout")

    def __init__(self, host: Host, line: Line, number: int, timeout: float) -> None:
        self._host, self._line, self._number, self._timeout = host, line, number, timeout

    def over(self) -> bool:
        return self._line.completed > self._number

    def finish(self, what: str) -> None:
        """Waits for it.

        Raises:
            PeerLost: if a member is gone on whom it waits, or the timeout passed.
        """
        if self._line.completed <= self._number:
            self._host.progress.wait(self._line, self._number, what, self._timeout)


class SharedGroup:
    """What the members do together, through one channel. All tensors are contiguous and on the CPU.

    Args:
        host: this process's.
        channel: between the members.
        timeout: seconds until a wait gives up.
    """

    def __init__(self, host: Host, channel: Channel, timeout: float) -> None:
        self._host, self.channel, self._timeout = host, channel, timeout
        self._reducer = Reducer()

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Whether a tensor can be exchanged here."""
        return tensor.device.type == "cpu" and tensor.dtype in DTYPES and tensor.is_contiguous()

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> Started | None:
        """Starts adding up `tensor`, or taking the maximum, in place."""
        count, itemsize, world = tensor.numel(), tensor.dtype.itemsize, self.channel.world
        flat = tensor.detach().view(-1)
        if count * itemsize * world <= ALONE:
            return self._started([SumAlone(flat, maximum, self._reducer)], tensor) if count else None
        if (place := self._host.arena.place_of(tensor)) is not None:
            return self._started([SumResident(flat, place, maximum, self._reducer)], tensor)
        # Two that both add up everything move less than two that fetch what the other has added up.
        kind = SumAlone if world == 2 else SumShared
        parts = torch.split(flat, piece(itemsize))
        return self._started([kind(part, maximum, self._reducer) for part in parts], tensor)

    def start_all_gather(self, whole: Tensor, share: Tensor) -> Started | None:
        """Starts gathering the members' equal shares, by rank, in `whole`."""
        if not share.numel():
            return None
        rows = whole.detach().view(self.channel.world, -1)
        length = piece(share.dtype.itemsize)
        parts = zip(torch.split(rows, length, 1), torch.split(share.detach().view(-1), length), strict=True)
        return self._started([Gather(list(targets), part) for targets, part in parts], share)

    def start_reduce_scatter(self, target: Tensor, values: Tensor) -> Started | None:
        """Starts adding up this member's of the equal parts of all members' `values`, in `target`."""
        if not target.numel():
            return None
        rows = values.detach().view(self.channel.world, -1)
        length = piece(values.dtype.itemsize, self.channel.world)
        parts = zip(torch.split(target.detach().view(-1), length), torch.split(rows, length, 1), strict=True)
        return self._started([ReduceScatter(to, some, self._reducer) for to, some in parts], values)

    def start_broadcast(self, tensor: Tensor, root: int) -> Started | None:
        """Starts giving member `root`'s values to all, in place."""
        if not tensor.numel():
            return None
        parts = torch.split(tensor.detach().view(-1), piece(tensor.dtype.itemsize))
        return self._started([Broadcast(part, root) for part in parts], tensor)

    def start_barrier(self) -> Started | None:
        """Starts waiting for all."""
        return self._started([Barrier()], None)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """Memory in the arena; None if one of the members, which all call this, has no room."""
        place = -1
        try:
            place = self._host.arena.take(count * dtype.itemsize)
        except NoRoom:
            pass
        failed = torch.tensor([int(place < 0)])
        if (work := self.start_all_reduce(failed, maximum=True)) is not None:
            work.finish("sharing memory")
        return None if failed.item() else self._host.arena.view(place, count, dtype)

    def _started(self, operations: list[Any], values: Tensor | None) -> Started:
        number = 0
        operation: Operation
        for operation in operations:
            number = self.channel.start(operation)
        if values is not None:
            self._host.moved += values.numel() * values.dtype.itemsize
        return Started(self._host, self.channel, number, self._timeout)
