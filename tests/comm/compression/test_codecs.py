"""Each codec alone: what comes back, and in how many bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from verbund.comm.compression.blocks import BLOCKS, Blocks
from verbund.comm.compression.codec import Codec, aligned
from verbund.comm.compression.methods import codec
from verbund.comm.compression.top_k import largest
from verbund.job import Compression

NAMES = ("fp16", "bf16", "int8", "int4", "sign", "top_k")
SIZES = (0, 1, 2, 7, 128, 255, 256, 257, 1023, 1024, 1025, 5000)


def made(name: str, **more: object) -> Codec:
    found = codec(Compression.model_validate({"name": name, **more}))
    assert found is not None
    return found


def passed(codec_: Codec, values: Tensor, key: int = 0) -> Tensor:
    """What comes out of the codec, slice by slice."""
    message = torch.full((codec_.size(len(values)),), 0xAB, dtype=torch.uint8)
    back = torch.full_like(values, 99.0)
    for part, place in codec_.slices(len(values)):
        codec_.encode(values[part], message[place], key)
        codec_.decode(message[place], back[part])
    return back


def random(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.logspace(-4, 2, count)


def blockwise(values: np.ndarray, block: int) -> list[np.ndarray]:
    return [values[low : low + block] for low in range(0, len(values), block)]


def by_hand(name: str, values: np.ndarray) -> np.ndarray:
    """The same in plain float64."""
    if name in ("int8", "int4"):
        bits = 8 if name == "int8" else 4
        most = 2 ** (bits - 1) - 1
        parts = []
        for block in blockwise(values, BLOCKS[bits]):
            scale = float(np.float32(np.abs(block).max() / most))
            parts.append(np.round(block / scale) * scale if scale else block * 0)
        return np.concatenate(parts)
    if name == "sign":
        return np.concatenate([np.where(b >= 0, 1, -1) * np.abs(b).mean() for b in blockwise(values, 256)])
    if name == "top_k":
        kept = np.argsort(-np.abs(values), kind="stable")[: max(1, round(0.05 * len(values)))]
        back = np.zeros_like(values)
        back[kept] = values[kept]
        return back
    if name == "fp16":
        scale = 2.0 ** (15 - np.frexp(np.abs(values).max())[1])
        return (values * scale).astype(np.float16).astype(np.float64) / scale
    return torch.from_numpy(values).to(torch.bfloat16).double().numpy()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_as_by_hand(name: str, dtype: torch.dtype, size: int) -> None:
    values = random(size).to(dtype)
    back = passed(made(name), values)
    assert back.dtype == dtype
    if size:
        expected = by_hand(name, values.double().numpy())
        # A value halfway between two whole numbers may be rounded either way.
        step = np.abs(expected).max() / (100 if name == "int8" else 6) if name in ("int8", "int4") else 0.0
        close = np.isclose(back.double().numpy(), expected, rtol=1e-5, atol=1e-12)
        assert (~close).sum() <= 2
        assert np.abs(back.double().numpy() - expected).max() <= 1e-5 * np.abs(expected).max() + step


@pytest.mark.parametrize("name", NAMES)
def test_a_message_of_several_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verbund.comm.compression.codec.SLICE", 2048)
    monkeypatch.setattr("verbund.comm.compression.blocks.SLICE", 1024)
    values = random(5001)
    sliced = passed(made(name), values)
    parts = [values] if name == "top_k" else list(values.split(2048))
    expected = np.concatenate([by_hand(name, part.double().numpy()) for part in parts])
    assert np.isclose(sliced.double().numpy(), expected, rtol=1e-5, atol=1e-12).mean() > 0.999


@pytest.mark.parametrize(
    ("name", "ratio"), [("fp16", 2), ("bf16", 2), ("int8", 3.93), ("int4", 7.5), ("sign", 28.4), ("top_k", 10)]
)
def test_bytes(name: str, ratio: float) -> None:
    assert 4 * (1 << 20) / made(name).size(1 << 20) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_vanish(name: str, bad: float) -> None:
    values = random(3000)
    values[1500] = bad
    assert not passed(made(name), values).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e30, 1e35])
def test_extreme_values(name: str, size: float) -> None:
    values = torch.full((700,), size)
    back = passed(made(name), values)
    assert back.isfinite().all()
    if size >= 1e-30 and name not in ("top_k",):
        assert torch.allclose(back, values, rtol=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_zeros(name: str) -> None:
    assert not passed(made(name), torch.zeros(3000)).any()


@pytest.mark.parametrize("name", NAMES)
def test_add_takes_away(name: str) -> None:
    values, codec_ = random(3000), made(name)
    back = passed(codec_, values)
    message = torch.zeros(codec_.size(3000), dtype=torch.uint8)
    codec_.encode(values, message)
    rest = values.clone()
    codec_.add(message, rest, -1.0)
    assert torch.equal(rest, values - back)


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_repeats_and_has_the_mean(bits: int) -> None:
    codec_ = made(f"int{bits}", rounding="stochastic")
    values = random(512, seed=3).clamp(-3, 3)
    once, again, other = (passed(codec_, values, key) for key in (7, 7, 8))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    mean = torch.stack([passed(codec_, values, key * 1000) for key in range(2000)]).double().mean(0)
    step = values.view(-1, BLOCKS[bits]).abs().amax(1, keepdim=True) / (127 if bits == 8 else 7)
    off = (mean - values.double()).view(-1, BLOCKS[bits]) / step
    assert off.abs().max() < 6 * 0.5 / 2000**0.5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [0, 1, 15, 4200])
def test_blocks_are_off_by_half_a_step(bits: int, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    numbers, scales = -(-count * bits // 8), 4 * -(-count // BLOCKS[bits])
    assert Blocks(bits).bytes_of(count) == aligned(numbers) + aligned(scales)
    back = passed(Blocks(bits), values)
    for block, found in zip(values.split(BLOCKS[bits]), back.split(BLOCKS[bits]), strict=True):
        step = block.abs().max() / (127 if bits == 8 else 7) if count else 0.0
        assert ((found - block).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("count", [1, 10, 64, 100, 1000, 50_000])
@pytest.mark.parametrize("kind", ["normal", "equal", "sparse", "sorted"])
def test_largest(count: int, kind: str) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(5))
    values = {
        "normal": values,
        "equal": torch.ones(100_000),
        "sparse": torch.where(values > 3, values, 0.0),
        "sorted": values.sort().values,
    }[kind]
    places = largest(values, count)
    assert len(places.unique()) == count
    assert torch.equal(values[places].abs().sort().values, values.abs().topk(count).values.flip(0))


@pytest.mark.parametrize("size", range(1, 400, 7))
def test_largest_of_few(size: int) -> None:
    """Also where the sample that is looked at first is smaller than what is wanted of it."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    for count in {1, size // 9, size // 5, size // 4, size} - {0}:
        assert torch.equal(values[largest(values, count)].abs().sort().values, values.abs().topk(count).values.flip(0))
