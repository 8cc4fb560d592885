"""Whether the replicas of an island are still equal, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verbund.comm.collectives import Group
from verbund.errors import RunFailed


def check(names: Sequence[str], parameters: Sequence[Tensor], group: Group, peers: Sequence[int], step: int) -> None:
    """Compares the checksums of all replicas.

    Args:
        names: of the parameters.
        parameters: what this worker holds of them.
        group: the workers that hold the same.
        peers: their ranks in the island.
        step: before which the comparison is made.

    Raises:
        RunFailed: naming the first tensor that differs, and the workers that differ from the majority.
    """
    if group.world == 1:
        return
    gathered = torch.stack(group.all_gather(checksums(parameters), "the comparison of the replicas"))
    different = (gathered != gathered[0]).any(dim=0)
    if not bool(different.any()):
        return
    index = int(different.nonzero()[0])
    values = gathered[:, index].tolist()
    usual = max(set(values), key=values.count)
    odd = [peers[place] for place, value in enumerate(values) if value != usual]
    workers = f"worker{'s' if len(odd) != 1 else ''} {', '.join(map(str, odd))}"
    fix = (
        "`model()` must give the same values in every process: it is called with torch, numpy and random seeded"
        if step == 0
        else "Replicas stay equal unless the model draws or keeps something of its own per process"
    )
    raise RunFailed(
        f"the replicas differ before step {step}: `{names[index]}` on {workers}",
        where="train",
        fix=fix,
    )


def checksums(parameters: Sequence[Tensor]) -> Tensor:
    """One number per parameter: the sum of its bits, exact and independent of order; shape [P], int64."""
    return torch.stack([_bit_sum(parameter.detach()) for parameter in parameters])


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    if flat.numel() * flat.element_size() % 4 == 0:
        return flat.view(torch.int32).sum(dtype=torch.int64).to(tensor.device)
    return flat.view(torch.uint8).sum(dtype=torch.int64)
