"""Gradients that several workers of one replica have to bring together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verbund.comm.collectives import Group
from verbund.mesh.held import Held


def add_up(held: list[Held], group: Group) -> None:
    """Adds up the gradients of parameters that all of a group have, each of its own part of the model."""
    values = [h.values for h in held]
    if not values:
        return
    flat = torch.cat([v.grad.reshape(-1) if v.grad is not None else v.new_zeros(v.numel()) for v in values])
    used = flat.new_tensor([float(v.grad is not None) for v in values])
    both = torch.cat([flat, used])
    group.all_reduce(both, "the all-reduce of shared parameters' gradients")
    at = 0
    for value, count in zip(values, both[len(flat) :].tolist(), strict=True):
        value.grad = both[at : at + value.numel()].view_as(value) if count else None
        at += value.numel()


def norm(held: Sequence[Held], replica: Group) -> float:
    """The global norm of the gradients, over all workers that hold some."""
    square = torch.zeros(1, dtype=torch.float64, device=replica.device)
    for each in held:
        if each.primary and each.values.grad is not None:
            square += torch.linalg.vector_norm(each.values.grad).double() ** 2
    replica.all_reduce(square, "the all-reduce of the norm")
    return float(square.sqrt())
