"""The hash against its definition in Python's integers, and the distributions against statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verbund.randomness import draws
from verbund.randomness.hash import combine, elements, hashed, mix, sample_keys, single_key, use_key

CPU = torch.device("cpu")
WORD = 2**32 - 1


def words(keys: Tensor, count: int, lane: int = 0) -> Tensor:
    out = torch.empty(keys.shape[1], count, dtype=torch.int32)
    for rows, columns, h in hashed(keys, count, lane):
        out[rows, columns] = h
    return out


def reference(a: int, b: int, e: int) -> int:
    """The formula of the module, on unsigned 32-bit integers."""
    h = ((a ^ e) * 0x21F0AAAD) & WORD
    h ^= h >> 15
    h = ((h + b) * 0x735A2D97) & WORD
    return h ^ (h >> 16)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4), st.integers(0, 3))
def test_the_hash_is_its_formula(key: int, ids: list[int], lane: int) -> None:
    keys = sample_keys(key, torch.tensor(ids))
    for row, i in enumerate(ids):
        mixed = mix(i * 0x9E3779B97F4A7C15 + key)
        assert [int(w) & WORD for w in keys[:, row, 0]] == [mixed & WORD, mixed >> 32]
    element = elements(7, lane, CPU)
    found = words(keys, 7, lane)
    for row in range(len(ids)):
        for j in range(7):
            a, b = keys[:, row, 0].tolist()
            assert int(found[row, j]) & WORD == reference(a, b, int(element[j]))


def test_chunks_change_nothing() -> None:
    # 3 rows of 70,000 elements go element chunk by element chunk, 400 rows of 300 row chunk by row chunk.
    for rows, count in ((3, 70_000), (400, 300)):
        keys = sample_keys(9, torch.arange(rows))
        whole = words(keys, count)
        for row in (0, rows // 2, rows - 1):
            assert torch.equal(words(keys[:, row : row + 1], count)[0], whole[row])
        assert torch.equal(words(keys, 11), whole[:, :11])


def test_keys_differ_in_every_part() -> None:
    base = (3, 5, 7)
    keys = {combine(*base), combine(4, 5, 7), combine(3, 6, 7), combine(3, 5, 8), combine(5, 3, 7), combine(3, 5)}
    assert len(keys) == 6
    assert not torch.equal(use_key("a", 0, CPU), use_key("a", 1, CPU))
    assert not torch.equal(use_key("a", 0, CPU), use_key("b", 0, CPU))


def test_avalanche() -> None:
    """Flipping one bit of seed, step, id or element changes every bit of the word with probability 1/2."""
    trials = 4096
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 2**40, (trials,), generator=generator)
    base = words(sample_keys(combine(1, 2), ids), 1)
    others = [words(sample_keys(combine(1, 2), ids ^ (1 << bit)), 1) for bit in range(0, 40, 7)]
    others += [words(sample_keys(combine(1 ^ (1 << bit), 2), ids), 1) for bit in (0, 17, 40)]
    others += [words(sample_keys(combine(1, 2 ^ (1 << bit)), ids), 1) for bit in (0, 1, 20)]
    others += [words(sample_keys(combine(1, 2), ids), 1025)[:, 1 << bit : (1 << bit) + 1] for bit in (0, 1, 5, 10)]
    bits = torch.arange(32, dtype=torch.int32)
    for other in others:
        flipped = (((base ^ other) >> bits) & 1).float().mean(0)
        assert float((flipped - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(trials)


def test_words_are_uniform() -> None:
    keys = sample_keys(combine(0, 0), torch.arange(256))
    sample = words(keys, 1024)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(((sample >> shift) & 255).flatten(), minlength=256).double()
        expected = sample.numel() / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation in units of its standard deviation under independence."""
    a, b = a.double().flatten(), b.double().flatten()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).mean() / (a.std() * b.std()) * math.sqrt(a.numel()))


@pytest.mark.parametrize("quantity", ["uniform", "keep"])
def test_neighbours_are_independent(quantity: str) -> None:
    def drawn(step: int, use: int = 0, name: str = "layer.1") -> Tensor:
        keys = sample_keys(combine(0, step), torch.arange(300)) ^ use_key(name, use, CPU)
        if quantity == "uniform":
            return draws.uniform(keys, 500, torch.float32)
        return draws.keep(keys, 500, 0.3, torch.float32)

    one = drawn(0)
    pairs = [
        (one[:, 1:], one[:, :-1]),  # elements
        (one[1:], one[:-1]),  # samples
        (one[1:, 1:], one[:-1, :-1]),
        (one, drawn(1)),  # steps
        (one, drawn(0, use=1)),
        (one, drawn(0, name="layer.2")),
        (one, one.flip(1)),
    ]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 4.5


def test_no_two_rows_go_together() -> None:
    keys = sample_keys(combine(7, 3), torch.arange(256))
    masks = draws.keep(keys, 4096, 0.5, torch.float64) * 2 - 1
    products = masks @ masks.T / 64.0  # standard normal off the diagonal
    off = products[~torch.eye(256, dtype=torch.bool)]
    assert float(off.abs().max()) < 5.5
    assert abs(float(off.std()) - 1.0) < 0.03


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_keep_rate(p: float) -> None:
    keys = sample_keys(combine(0, 1), torch.arange(100, 356))
    mask = draws.keep(keys, 2000, p, torch.float32, factor=1.25)
    assert set(mask.unique().tolist()) <= {0.0, 1.25}
    rate, total = float((mask > 0).double().mean()), mask.numel()
    assert abs(rate - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / total)
    per_row = (mask > 0).double().mean(1)
    if 0 < p < 1:
        spread = float(per_row.std()) / math.sqrt(p * (1 - p) / 2000)
        assert 0.8 < spread < 1.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_moments(dtype: torch.dtype) -> None:
    keys = sample_keys(combine(2, 2), torch.arange(200))
    n = 200 * 1000
    u = draws.uniform(keys, 1000, dtype).double()
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    coarse = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}.get(dtype, 0.0)  # half of the spacing
    assert abs(float(u.mean()) - 0.5 + coarse) < 4.5 / math.sqrt(12 * n)
    z = draws.normal(keys, 1000, dtype).double()
    assert abs(float(z.mean())) < 4.5 / math.sqrt(n)
    assert abs(float(z.var()) - 1) < 4.5 * math.sqrt(2 / n)
    assert abs(float((z**4).mean()) - 3) < 4.5 * math.sqrt(96 / n)
    e = draws.exponential(keys, 1000, dtype).double()
    assert float(e.min()) > 0
    assert abs(float(e.mean()) - 1) < 4.5 / math.sqrt(n) + coarse


def test_normal_follows_its_distribution() -> None:
    z = draws.normal(sample_keys(5, torch.arange(100)), 1000, torch.float64).flatten().sort().values
    steps = torch.arange(1, len(z) + 1, dtype=torch.float64) / len(z)
    distance = float((torch.special.ndtr(z) - steps).abs().max())
    assert distance < 1.95 / math.sqrt(len(z))  # Kolmogorov–Smirnov at 0.1 %


def test_float64_uses_all_its_bits() -> None:
    u = draws.uniform(sample_keys(1, torch.arange(64)), 64, torch.float64)
    assert len(u.unique()) == 64 * 64
    low = (u * 2**53).to(torch.int64) & 0xFF
    assert len(low.unique()) == 256


@settings(max_examples=30, deadline=None)
@given(st.integers(-(2**40), 2**40), st.integers(1, 2**45))
def test_integers_stay_in_range(low: int, width: int) -> None:
    drawn = draws.integers(single_key(width, CPU), 200, low, low + width)
    assert drawn.dtype == torch.int64
    assert int(drawn.min()) >= low
    assert int(drawn.max()) < low + width


def test_integers_are_uniform() -> None:
    counts = torch.bincount(draws.integers(sample_keys(3, torch.arange(100)), 700, 0, 7).flatten(), minlength=7)
    assert float(((counts - 10_000.0) ** 2 / 10_000).sum()) < 6 + 5 * math.sqrt(12)
