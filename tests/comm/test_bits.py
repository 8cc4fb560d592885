"""Packed numbers against a reference that goes bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.comm.wire import bits


def reference(values: list[int], width: int) -> bytes:
    planes, rest = divmod(width, 8)
    out = b"".join(bytes(v >> 8 * plane & 255 for v in values) for plane in range(planes))
    for start in range(0, len(values), 8) if rest else ():
        group = sum((v >> 8 * planes) << rest * i for i, v in enumerate(values[start : start + 8]))
        out += group.to_bytes(rest, "little")
    return out


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 32).flatmap(lambda w: st.tuples(st.just(w), st.lists(st.integers(0, 2**w - 1), max_size=40))))
def test_against_the_reference(case: tuple[int, list[int]]) -> None:
    width, values = case
    array = np.array(values, bits.dtype(width))
    packed = bits.pack(array, width)
    assert packed.tobytes() == reference(values, width)
    assert packed.size == bits.packed_size(len(values), width)
    for kind in (bits.dtype(width), np.dtype("u4"), np.dtype("u8")):
        found = np.empty(len(values), kind)
        bits.unpack(packed, width, found)
        assert found.tolist() == values


@pytest.mark.parametrize("width", [1, 5, 8, 13])
def test_many(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several goes."""
    monkeypatch.setattr(bits, "_AT_ONCE", 16)
    for count in (15, 16, 17, 50):
        values = np.random.default_rng(count).integers(0, 2**width, count).astype(bits.dtype(width))
        packed = bits.pack(values, width)
        assert packed.tobytes() == reference(values.tolist(), width)
        found = np.empty_like(values)
        bits.unpack(packed, width, found)
        assert np.array_equal(found, values)


@pytest.mark.parametrize("width", range(1, 33))
def test_wider_types_and_views_are_packed_alike(width: int) -> None:
    values = np.random.default_rng(width).integers(0, 2**width, (5, 7), np.uint64)
    assert np.array_equal(bits.pack(values.T, width), bits.pack(values.T.astype(bits.dtype(width)), width))


def test_what_does_not_fit() -> None:
    for values, width in (
        (np.array([8], np.uint8), 3),
        (np.array([256], np.uint16), 8),
        (np.array([1 << 20], np.uint32), 20),
        (np.array([1], np.int8), 3),
        (np.array([1.0]), 3),
        (np.array([1], np.uint8), 0),
        (np.array([1], np.uint64), 33),
    ):
        with pytest.raises(ValueError, match=r"fit|travel"):
            bits.pack(values, width)


@pytest.mark.parametrize("width", [1, 3, 7, 12, 31])
def test_what_fills_up_is_zero(width: int) -> None:
    packed = bits.pack(np.zeros(5, bits.dtype(width)), width)
    packed[-1] |= 0x80
    with pytest.raises(ValueError, match="not zero"):
        bits.unpack(packed, width, np.empty(5, bits.dtype(width)))
