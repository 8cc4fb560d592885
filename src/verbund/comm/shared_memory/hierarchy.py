"""All-reduces of a group whose members share hosts: inside each host first, then between the hosts' leaders, then
back inside each host. So what crosses the network is one tensor a host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from verbund.comm.shared_memory.group import SharedGroup, Started
from verbund.comm.shared_memory.host import Host


class _Sum:
    """One all-reduce: its three stages, each None until it is started."""

    def __init__(self, tensor: Tensor, maximum: bool) -> None:
        self.tensor, self.maximum = tensor, maximum
        self.inside: Started | None = None
        self.between: Callable[[], bool] | None = None
        self.back: Started | None = None
        self.gone = False  # whether its last stage has been started


class Hierarchy:
    """A line of all-reduces. Each host has one leader, its first member.

    Args:
        host: this process's.
        inside: two groups of the members here, for the way there and back; None where there is only this one.
        between: starts an all-reduce between the leaders, for a leader; what it gives says whether that is over.
        timeout: seconds until a wait gives up.
    """

    def __init__(
        self,
        host: Host,
        inside: tuple[SharedGroup, SharedGroup] | None,
        between: Callable[[Tensor, bool], Callable[[], bool]] | None,
        timeout: float,
    ) -> None:
        self._host, self._inside, self._between, self._timeout = host, inside, between, timeout
        self._sums: deque[_Sum] = deque()
        self.started = self.completed = 0
        host.progress.add(self)

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> Started | None:
        """Starts adding up `tensor`, or taking the maximum, in place."""
        if not tensor.numel():
            return None
        new = _Sum(tensor, maximum)
        if self._inside is not None:
            new.inside = self._inside[0].start_all_reduce(tensor, maximum)
        self._sums.append(new)
        self.started += 1
        self.advance()
        return Started(self._host, self, self.started - 1, self._timeout)

    def advance(self) -> bool:
        moved = False
        for item in self._sums:
            if item.gone:
                continue
            if item.inside is not None and not item.inside.over():
                break
            if self._between is not None:
                if item.between is None:
                    item.between = self._between(item.tensor, item.maximum)
                    moved = True
                if not item.between():
                    break
            if self._inside is not None:
                item.back = self._inside[1].start_broadcast(item.tensor, 0)
            item.gone = moved = True
        while self._sums and (first := self._sums[0]).gone and (first.back is None or first.back.over()):
            self._sums.popleft()
            self.completed += 1
            moved = True
        return moved

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.0005))

    def lost(self) -> str:
        return next((lost for group in self._inside or () if (lost := group.channel.lost())), "")

    def late(self) -> str:
        return next((late for group in self._inside or () if (late := group.channel.late())), "another host")
