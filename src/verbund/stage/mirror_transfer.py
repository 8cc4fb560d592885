"""Mirrors of workers that are alone on their hosts, in the memory of a worker on another host.

Nobody could map what would be gone with such a worker. It sends each mirror to the next worker on another host, while
training goes on; that has two places for them in its arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verbund.comm.collectives import Group, Work
from verbund.mesh.groups import Groups

_WHAT = "the sending of mirrors"
_PART_BYTES = 1 << 28


def keepers(hosts: Sequence[str]) -> dict[int, int]:
    """By worker that is alone on its host: the worker that keeps its mirrors.

    Args:
        hosts: of the workers of an island, by their place in it.
    """
    world = len(hosts)
    found = {}
    for worker, host in enumerate(hosts):
        others = [(worker + step) % world for step in range(1, world)]
        if others and all(hosts[other] != host for other in others):
            found[worker] = others[0]
    return found


class MirrorTransfer:
    """This worker's part of the sending, once all have met.

    Args:
        groups: of all; all workers make one together.
        hosts: of the workers of the island.
        first: the rank of the island's first worker.
    """

    def __init__(self, groups: Groups, hosts: Sequence[str], first: int) -> None:
        mine = groups.island.rank
        self._first = first
        pairs = keepers(hosts)
        self._to = pairs.get(mine)
        self._owners = [owner for owner, keeper in pairs.items() if keeper == mine]
        self._group: Group | None = None
        if pairs:
            self._group = groups.island.part("mirrors", list(range(groups.island.world)))
        self._under_way: list[tuple[Work | None, Tensor]] = []
        self._arriving: list[Callable[[], None]] = []

    def start(
        self,
        content: Tensor | None,
        step: int,
        room: Callable[[int, int, int], tuple[Tensor, Callable[[], None]] | None],
    ) -> None:
        """Starts sending and receiving, as all do after the same step.

        Args:
            content: this worker's mirror; None: it has none.
            step: of it.
            room: gives memory for the mirror of a worker: its rank, the step, and the bytes; and what is to be called
                once it is there; None: there is none.

        Raises:
            PeerLost: if a worker that it has to do with is lost.
        """
        group = self._group
        if group is None:
            return
        if self._to is not None:
            size = torch.tensor([0 if content is None else content.numel()])
            self._send(group, size, 0)
            for number, part in enumerate(torch.split(content, _PART_BYTES) if content is not None else ()):
                self._send(group, part, number + 1)
        for owner in self._owners:
            size = torch.empty(1, dtype=torch.int64)
            group.receive(size, owner, 0, _WHAT)
            if not int(size):
                continue
            given = room(self._first + owner, step, int(size))
            # Who has no room must take it all the same.
            values, whole = given if given is not None else (torch.empty(int(size), dtype=torch.uint8), lambda: None)
            for number, part in enumerate(torch.split(values, _PART_BYTES)):
                self._under_way.append((group.start_receive(part, owner, number + 1), part))
            self._arriving.append(whole)

    def _send(self, group: Group, values: Tensor, tag: int) -> None:
        assert self._to is not None
        self._under_way.append((group.start_send(values, self._to, tag), values))

    def finish(self) -> None:
        """Waits until all that is under way is there.

        Raises:
            PeerLost: if a worker that it has to do with is lost.
        """
        if self._group is not None:
            for work, _ in self._under_way:
                self._group.finish(work, _WHAT)
        self._under_way.clear()
        for whole in self._arriving:
            whole()
        self._arriving.clear()
