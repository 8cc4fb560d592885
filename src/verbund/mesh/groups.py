"""The groups of workers: who exchanges what with whom, along each axis of the mesh and between islands."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from verbund.comm.collectives import Group
from verbund.comm.members import Members
from verbund.job import AXES
from verbund.mesh.axes import Mesh


@dataclass(frozen=True)
class Groups:
    """This worker's peers.

    Args:
        island: the workers of this one's island.
        islands: those at the same place in the other islands, by island.
        batch: those that share the samples of a step (axes `data` and `shard`; islands too where they add up the
            gradients of every step).
        data: those of them that hold the same.
        shard: those that share the parameters' rows.
        tensor: those that share every operation.
        pipeline: those that share the layers.
        model: those that have the same samples (axes `tensor` and `pipeline`).
        replica: those that hold one replica's parameters between them (all axes but `data`).
    """

    island: Group
    islands: Members
    batch: Group
    data: Group
    shard: Group
    tensor: Group
    pipeline: Group
    model: Group
    replica: Group

    @staticmethod
    def of(mesh: Mesh, everybody: Group, synchronous: bool = True) -> Groups:
        """The groups of a mesh whose workers all are in one; all workers call it together.

        Args:
            mesh: the axes.
            everybody: all workers.
            synchronous: whether the islands add up the gradients of every step.
        """
        island, islands = _along(everybody, mesh, *AXES), _along(everybody, mesh, "islands")
        return Groups._inside(mesh, island, islands, everybody if synchronous and mesh.islands > 1 else None)

    @staticmethod
    def apart(mesh: Mesh, island: Group, islands: Members) -> Groups:
        """The groups of a mesh whose islands train alone, joined by something else than their workers are.

        Args:
            mesh: the axes.
            island: the workers of this one's island.
            islands: those at the same place in the other islands.
        """
        return Groups._inside(mesh, island, islands, None)

    @staticmethod
    def _inside(mesh: Mesh, island: Group, islands: Members, everybody: Group | None) -> Groups:
        def along(*axes: str) -> Group:
            return _along(island, mesh, *axes)

        return Groups(
            island=island,
            islands=islands,
            batch=_along(everybody, mesh, "islands", "data", "shard") if everybody else along("data", "shard"),
            data=_along(everybody, mesh, "islands", "data") if everybody else along("data"),
            shard=along("shard"),
            tensor=along("tensor"),
            pipeline=along("pipeline"),
            model=along("tensor", "pipeline"),
            replica=along("shard", "tensor", "pipeline"),
        )

    def agree(self, what: str) -> None:
        """Returns only once all workers, of all islands, have come here.

        Raises:
            PeerLost: if one does not. Some may have returned all the same, but then all have come.
        """
        self.island.barrier(what)
        if self.islands.world > 1:
            self.islands.all_reduce(torch.zeros(1), what)

    def gather(self, arrays: dict[str, np.ndarray[Any, Any]], what: str) -> list[dict[str, Any]]:
        """The named arrays of all workers, by rank; names, types and shapes may differ. They cross between two islands
        once."""
        across = self.islands.all_gather_arrays(arrays, what)
        packed = {f"{island} {name}": array for island, own in enumerate(across) for name, array in own.items()}
        rows = self.island.all_gather_arrays(packed, what)
        found: list[dict[str, Any]] = [{} for _ in range(len(across) * len(rows))]
        for place, row in enumerate(rows):
            for key, array in row.items():
                island, _, name = key.partition(" ")
                found[int(island) * len(rows) + place][name] = array
        return found

    def leave(self) -> None:
        """Ends all that is under way with the peers: whoever waits for it meets `PeerLost`; see `Group.leave`."""
        for group in self._collective:
            group.leave()

    def notes(self) -> list[str]:
        """What the groups have for the user; each comes from the first member of its group."""
        return list(dict.fromkeys(g.note for g in self._collective if g.note is not None and g.rank == 0))

    @property
    def shared_bytes(self) -> int:
        """Bytes that this process has handed over through shared memory; groups made from one have one count."""
        return max((group.shared_bytes for group in self._collective), default=0)

    @property
    def _collective(self) -> list[Group]:
        return [group for field in fields(self) if isinstance(group := getattr(self, field.name), Group)]

    @staticmethod
    def alone(device: torch.device) -> Groups:
        """The groups of a single process."""
        group = Group(None, 0, 1, device, 60.0)
        return Groups(*(group,) * len(fields(Groups)))


def _along(group: Group, mesh: Mesh, *axes: str) -> Group:
    """The part of a group of all workers, or of an island's, that some axes span."""
    if mesh.size(*axes) == group.world:
        return group
    first = 0 if group.world == mesh.world else mesh.peers(*AXES)[0]
    return group.part("+".join(axes), [rank - first for rank in mesh.peers(*axes)])
