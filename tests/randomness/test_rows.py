"""Rows that are born when they are first asked for."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

from verbund.randomness.rows import _quantiles, born

MANY = torch.arange(3000)
EXACT = [
    "-0x1.91b7720000000p-5",
    "0x1.29522e0000000p-5",
    "-0x1.8e6fc00000000p-4",
    "0x1.1cd0d20000000p-5",
    "0x1.d5637c0000000p-9",
    "-0x1.4916f80000000p-4",
    "0x1.1aa9cc0000000p-4",
    "0x1.2c12340000000p-9",
    "-0x1.7d623e0000000p-7",
]


def test_a_row_is_the_same_bit_for_bit_in_any_company() -> None:
    whole = born(7, MANY, 37, 0.5)
    assert whole.dtype == torch.float32
    assert whole.shape == (3000, 37)
    some = torch.tensor([2999, 0, 17, 17, 1024])
    assert torch.equal(born(7, some, 37, 0.5), whole[some])
    for row in (0, 1, 2998):
        assert torch.equal(born(7, torch.tensor([row]), 37, 0.5)[0], whole[row])
    assert born(7, torch.empty(0, dtype=torch.int64), 37, 0.5).shape == (0, 37)
    assert torch.equal(born(7, MANY[:3], 70_000, 1.0)[:, :37], born(7, MANY[:3], 37, 1.0))  # more than a chunk


def test_values_are_these_on_every_processor() -> None:
    # Bit for bit: servers on different machines give birth to the same rows, and checkpoints of one fit the other.
    found = born(0, torch.tensor([0, 1, 2**40]), 3, 0.05)
    assert [value.hex() for value in found.flatten().tolist()] == EXACT


def test_rows_are_normal_and_independent() -> None:
    values = born(1, MANY, 64, 1.0).double()
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1
    noise = 4.5 / 3000**0.5
    assert torch.corrcoef(values[:, :8].T).sub(torch.eye(8)).abs().max() < noise
    for other in (born(2, MANY, 64, 1.0), born(1, MANY + 1, 64, 1.0)):
        assert abs(torch.corrcoef(torch.stack([values.flatten(), other.double().flatten()]))[0, 1]) < 0.01


def test_quantiles_are_those_of_the_normal_distribution() -> None:
    q = np.concatenate([np.linspace(-0.4999, 0.4999, 2001), 0.5 - np.geomspace(2**-33, 0.1, 50)])
    normal = statistics.NormalDist()
    # What `inv_cdf` gets must be exact in the tails, too: below one half all of these are.
    expected = [-normal.inv_cdf(0.5 - value) if value > 0 else normal.inv_cdf(0.5 + value) for value in q]
    assert _quantiles(q) == pytest.approx(expected, abs=1e-6)
