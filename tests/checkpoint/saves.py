"""Small saves for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verbund.checkpoint import Checkpoint, Piece, commit, partial_folder, write_part


def content(step: int) -> dict[str, torch.Tensor]:
    """What a save of this step holds: two parameters that tell the step."""
    return {"a.weight": torch.full((6, 5), float(step)), "b": torch.arange(7) + step}


def save(checkpoints: Path, step: int, state: dict[str, Any] | None = None) -> Path:
    """Two workers: `a.weight` is cut into rows, `b` belongs to the second."""
    tensors = content(step)
    a, b = tensors["a.weight"], tensors["b"]
    folder = partial_folder(checkpoints, step)
    first = [
        Piece("parameters", "a.weight", (6, 5), a.dtype, (0, 0), (4, 5), a[:4]),
        Piece.whole("parameters", "b", b, owner=False),
    ]
    second = [
        Piece("parameters", "a.weight", (6, 5), a.dtype, (4, 0), (2, 5), a[4:]),
        Piece.whole("parameters", "b", b),
    ]
    parts = [write_part(folder, 0, first), write_part(folder, 1, second)]
    return commit(checkpoints, step, parts, {"step": step, **(state or {})})


def check(path: Path) -> int:
    """Reads a checkpoint that `save` wrote, whole; returns its step."""
    with Checkpoint.open(path) as checkpoint:
        step = checkpoint.step
        assert checkpoint.state["step"] == step
        expected = content(step)
        assert set(checkpoint.names("parameters")) == set(expected)
        for name, values in expected.items():
            assert torch.equal(checkpoint.read("parameters", name), values)
    return step
