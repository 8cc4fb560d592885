"""What compression keeps between steps, taken up by another number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from verbund import checkpoint
from verbund.checkpoint.read import Checkpoint
from verbund.checkpoint.write import write_part
from verbund.comm.collectives import Group
from verbund.job import Compression
from verbund.mesh import compression
from verbund.mesh.axes import Mesh
from verbund.mesh.compression import GradientCompression, in_memory
from verbund.mesh.held import Held

SHAPES = {"w": (40, 30), "b": (40,), "scalar": ()}


def one(name: str, place: int, workers: int) -> GradientCompression:
    """Worker `place` of `workers`."""
    held = []
    for tensor, shape in SHAPES.items():
        values = nn.Parameter(torch.zeros(shape))
        if tensor == "w":  # as a transposed matrix lies in memory
            values = nn.Parameter(torch.zeros(shape[::-1]).t())
        held.append(Held(tensor, shape, values, values))
    made = GradientCompression(Compression.model_validate(name), held, Mesh(place, data=workers), 0)
    parameters = [h.values for h in held if made.takes(h.values)]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    made.build(Group.apart(place, workers, torch.device("cpu")), [(flat, parameters)])
    return made


def errors(made: GradientCompression) -> dict[str, torch.Tensor]:
    return {name: error.clone() for name, _, error in made._errors()}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str, int], tuple[Checkpoint, dict[str, torch.Tensor]]]:
    """A checkpoint of some workers with random errors, and the sums of these."""

    def save(name: str, workers: int) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
        records, total = [], {tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}
        for place in range(workers):
            made = one(name, place, workers)
            generator = torch.Generator().manual_seed(place)
            for tensor, _, error in made._errors():
                error.copy_(torch.randn(error.shape, generator=generator))
                total[tensor] += error
            assert made.sums is not None
            for q in made.sums.warm().values():
                q.fill_(7.0)
            folder = checkpoint.partial_folder(tmp_path, 3)
            records.append(write_part(folder, place, list(made.pieces())))
        checkpoint.commit(tmp_path, 3, records, {})
        return Checkpoint.open(checkpoint.folder(tmp_path, 3)), total

    return save


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["int8", "top_k", "power_sgd"])
def test_the_sum_of_errors_is_kept(
    name: str, before: int, after: int, saved: Callable[[str, int], tuple[Checkpoint, dict[str, torch.Tensor]]]
) -> None:
    source, total = saved(name, before)
    found = [one(name, place, after) for place in range(after)]
    notes = [compression.load(source, made) for made in found]
    assert all((note is None) == (before == after) for note in notes)
    for tensor in errors(found[0]):
        shared = sum(errors(made)[tensor] for made in found)
        assert torch.allclose(torch.as_tensor(shared), total[tensor], atol=1e-5)
    for made in found:
        assert made.sums is not None
        assert all(bool((q == 7).all()) for q in made.sums.warm().values())


def test_another_method_and_none(
    saved: Callable[[str, int], tuple[Checkpoint, dict[str, torch.Tensor]]],
) -> None:
    source, total = saved("top_k", 2)
    found = [one("sign", place, 2) for place in range(2)]
    assert [compression.load(source, made) for made in found] == [None, None]
    assert torch.allclose(errors(found[0])["w"] + errors(found[1])["w"], total["w"])
    assert "of 2 of 3 parameters" in (compression.load(source, one("power_sgd", 0, 2)) or "")
    assert "not compressed now" in (compression.load(source, None) or "")


def test_in_memory() -> None:
    assert in_memory(torch.zeros(3, 4)) == (3, 4)
    assert in_memory(torch.zeros(3, 4).t()) == (3, 4)
    assert in_memory(torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)) == (2, 4, 5, 3)
    assert in_memory(torch.zeros(())) == ()
