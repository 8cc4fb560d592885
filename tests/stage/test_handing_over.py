"""What a new worker gets from the others: an equal part from each."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from verbund.stage.recovery import _cut, _stretch


@given(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=8), st.integers(1, 9))
def test_the_parts_of_all_are_the_whole(shapes: list[list[int]], givers: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = [_stretch(len(whole), number, givers) for number in range(givers)]
    assert torch.equal(torch.cat([whole[:0], *(_cut(tensors, *part) for part in parts if part[0] < part[1])]), whole)
    lengths = [stop - start for start, stop in parts]
    assert sum(lengths) == len(whole)
    assert max(lengths) - min(lengths) <= 1
