"""What layers have to compute, counted."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from verbund.mesh.pipeline import cut


def works(model: nn.Module, x: Tensor) -> list[float]:
    return cut.layers(model, None, lambda model: model(x)).work


def linears(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)])


def test_large_products_count_by_their_operations() -> None:
    first, second, third = works(linears(512, 512, 1024, 512), torch.empty(1024, 512))
    assert second / third == pytest.approx(1.0)
    assert second / first == pytest.approx(3.0, rel=0.05)  # twice the products, and a gradient of the inputs


def test_small_ones_by_the_memory_they_read() -> None:
    _, second, third = works(linears(8, 1000, 1000, 10), torch.empty(1, 8))
    assert second / third == pytest.approx(100, rel=0.1)


def test_frozen_layers_cost_no_gradient_of_theirs() -> None:
    model = linears(64, 64, 64, 64, 64)
    model[:2].requires_grad_(False)
    model[3].requires_grad_(False)
    first, second, third, fourth = works(model, torch.empty(256, 64))
    assert [second / first, third / first, fourth / first] == pytest.approx([1, 2, 2])


@pytest.mark.parametrize(
    "layer", [nn.LSTM(16, 16, batch_first=True), nn.TransformerEncoderLayer(16, 2, batch_first=True), nn.GRU(16, 16)]
)
def test_what_is_made_of_many_operations_is_counted(layer: nn.Module) -> None:
    assert works(nn.Sequential(layer), torch.empty(4, 6, 16))[0] > 4 * 6 * 16 * 16 * 8


def test_it_is_the_same_again_and_for_copies_in_other_places() -> None:
    model, x = nn.Sequential(*[nn.TransformerEncoderLayer(16, 2) for _ in range(3)]), torch.empty(5, 2, 16)
    found = works(model, x)
    assert found == works(model, x)
    assert found[1] == found[2]
