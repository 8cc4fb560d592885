"""What a worker holds of a divided model, without other workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import models
from verbund.cluster.local import LocalCluster
from verbund.comm.collectives import Group
from verbund.comm.compression.casts import Casts
from verbund.errors import InputError
from verbund.job import Compression, parse_strategy
from verbund.mesh.divide import whole
from verbund.mesh.held import Cut, Held, cut
from verbund.mesh.shard import Shards
from verbund.mesh.traffic import Traffic
from verbund.stage.verify import verify


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_shares_are_the_whole(sizes: list[int], units: int, workers: int, width: int) -> None:
    """Each element of every section is held by exactly one worker, and the spans say which."""
    sections = tuple(size * units for size in sizes)
    whole = torch.arange(sum(sections) * width).view(sum(sections), width)
    if units < workers:
        with pytest.raises(InputError, match=f"cannot be divided among {workers} workers"):
            cut("w", len(whole), 0, list(sections), units, 0, workers)
        return
    filled = torch.full_like(whole, -1)
    for worker in range(workers):
        made = cut("w", len(whole), 0, list(sections), units, worker, workers)
        share = made.share(whole)
        assert len(share) == made.length()
        parameter = torch.nn.Parameter(share.float())
        held = Held("w", tuple(whole.shape), parameter, parameter, made)
        for box, place in held.spans():
            at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.length, strict=True))
            assert (filled[at] == -1).all()
            filled[at] = share[place]
    assert torch.equal(filled, whole)


@given(st.integers(1, 3), st.integers(2, 9), st.integers(1, 4))
def test_rows_of_a_cut_tensor_are_boxes(parts: int, size: int, shards: int) -> None:
    """The axis `shard` takes rows of what the axis `tensor` has cut."""
    whole = torch.arange(parts * size * 2.0).view(parts * size, 2)
    filled = torch.full_like(whole, -1)
    for worker in range(2):
        made = Cut(0, (size,) * parts, size, worker, 2)
        share = made.share(whole)
        rows = -(-len(share) // shards)
        for shard in range(shards):
            low, high = min(rows * shard, len(share)), min(rows * (shard + 1), len(share))
            values = torch.nn.Parameter(share[low:high].clone())
            held = Held("w", tuple(whole.shape), values, values, made).sharded(values, (low, high))
            for piece in held.pieces("parameters", "w", values.detach(), True):
                at = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.length, strict=True))
                assert (filled[at] == -1).all()
                filled[at] = piece.values
    assert torch.equal(filled, whole)


@pytest.mark.parametrize(
    ("mesh", "most"),
    [("shard=4", 0.27), ("pipeline=2,balance=memory", 0.65), ("tensor=2", 0.55), ("shard=2,tensor=2", 0.29)],
)
def test_a_worker_holds_its_share(mesh: str, most: float, shared_cluster: LocalCluster, tmp_path: Path) -> None:
    found = verify(models.job("gpt", tmp_path, parse_strategy(mesh)), steps=1)
    divided, alone = found["tensor_bytes"]
    assert len(alone) == 1
    whole = alone[0]["parameters"] + alone[0]["gradients"]
    assert max(part["parameters"] + part["gradients"] for part in divided) <= most * whole


def test_few_blocks_gradients_are_added_up_at_a_time() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    group = Group(None, 0, 1, torch.device("cpu"), 0.0)
    shards = Shards(model, whole(model).held, group, 3, Traffic([0], 1, 2), Casts(Compression(), group))
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(unit._leaving is not None for unit in shards._order))

    for layer in model:
        layer.register_full_backward_pre_hook(look)
    shards.begin()
    shards.gather_rest(training=True)
    shards.before_backward(last=True)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    shards.after_backward()
    look()
    assert most == 2
    shards.finish()
    assert all(held.values.grad is not None for held in shards.held)
