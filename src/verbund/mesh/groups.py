"""The groups of workers: who exchanges what with whom, along each axis of the mesh and between islands."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from verbund.comm.collectives import Group
from verbund.job import AXES
from verbund.mesh.axes import Mesh


@dataclass(frozen=True)
class Groups:
    """This worker's peers.

    Args:
        everybody: all workers of all islands.
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

    everybody: Group
    island: Group
    islands: Group
    batch: Group
    data: Group
    shard: Group
    tensor: Group
    pipeline: Group
    model: Group
    replica: Group

    @staticmethod
    def of(mesh: Mesh, everybody: Group, synchronous: bool = True) -> Groups:
        """The groups of a mesh; all workers call it together.

        Args:
            mesh: the axes.
            everybody: all workers.
            synchronous: whether the islands add up the gradients of every step.
        """
        joint = ("islands",) if synchronous else ()

        def along(*axes: str) -> Group:
            if mesh.size(*axes) == mesh.world:
                return everybody
            return everybody.part("+".join(axes), mesh.peers(*axes))

        return Groups(
            everybody=everybody,
            island=along(*AXES),
            islands=along("islands"),
            batch=along(*joint, "data", "shard"),
            data=along(*joint, "data"),
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
        return Groups(*(group,) * len(fields(Groups)))
