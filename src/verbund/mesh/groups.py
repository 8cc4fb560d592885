"""The groups of an island: who exchanges what with whom, along each axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from verbund.comm.collectives import Group
from verbund.mesh.axes import Mesh


@dataclass(frozen=True)
class Groups:
    """This worker's peers.

    Args:
        island: all workers.
        batch: those that share the samples (axes `data` and `shard`).
        data: those that hold the same.
        shard: those that share the parameters' rows.
        tensor: those that share every operation.
        pipeline: those that share the layers.
        model: those that have the same samples (axes `tensor` and `pipeline`).
        replica: those that hold one replica's parameters between them (all axes but `data`).
    """

    island: Group
    batch: Group
    data: Group
    shard: Group
    tensor: Group
    pipeline: Group
    model: Group
    replica: Group

    @staticmethod
    def of(mesh: Mesh, island: Group) -> Groups:
        """The groups of a mesh; all workers call it together."""

        def along(*axes: str) -> Group:
            if mesh.size(*axes) == mesh.world:
                return island
            return island.part("+".join(axes), mesh.peers(*axes))

        return Groups(
            island=island,
            batch=along("data", "shard"),
            data=along("data"),
            shard=along("shard"),
            tensor=along("tensor"),
            pipeline=along("pipeline"),
            model=along("tensor", "pipeline"),
            replica=along("shard", "tensor", "pipeline"),
        )

    def notes(self) -> list[str]:
        """What the groups have for the user; each comes from the first member of its group."""
        groups = [getattr(self, field.name) for field in fields(self)]
        return list(dict.fromkeys(group.note for group in groups if group.note is not None and group.rank == 0))

    @staticmethod
    def alone(device: torch.device) -> Groups:
        """The groups of a single process."""
        group = Group(None, 0, 1, device, 60.0)
        return Groups(group, group, group, group, group, group, group, group)
