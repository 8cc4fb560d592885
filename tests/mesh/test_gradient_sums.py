"""What travels with the gradients' sums, whoever comes and goes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from verbund.comm.collectives import Group
from verbund.mesh.data import GradientSums


class Others(Group):
    """So many workers of which the others send zeros; counts what travels."""

    def __init__(self, world: int) -> None:
        super().__init__(None, 0, 1, torch.device("cpu"), 60.0)
        self.world = world
        self.sent: list[int] = []

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        self.sent.append(tensor.numel())


@pytest.mark.parametrize("before", [[], [3], [1], [4, 1], [1, 5, 1]])
def test_members_send_the_same_after_any_changes(before: list[int]) -> None:
    """Each of 2 members tells two numbers, in places of its own, whatever it was a member of before."""
    model = nn.Linear(3, 4)
    first, *more = [*before, 2]
    sums = GradientSums(list(model.parameters()), Others(first), slots=2 * first)
    group = Others(2)
    for world in more:
        sums.regroup(group if world == 2 else Others(world), 2 * world)
    if not more:
        sums.regroup(group, 4)
    sums.begin()
    model(torch.ones(5, 3)).sum().backward()
    found = sums.finish(2.0, 5.0, 1.0, told=(2, (0.25, 0.5)))
    assert (found.loss, found.weight, found.flags, found.told) == (2.0, 5.0, 1.0, [0.0, 0.0, 0.25, 0.5])
    assert group.sent == [16 + 5 + 4 + 2]  # gradients; what all must agree on; told; which parameters were used
