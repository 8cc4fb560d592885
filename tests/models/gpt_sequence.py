"""The small GPT with dropout, whose norms and dropout work on a share of the sequence under the axis `tensor`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

# As a task file this is no module of a package.
gpt: Any = import_module("models.gpt" if __package__ else "gpt")


def model() -> nn.Module:
    made: nn.Module = gpt.GPT()
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return made


def tensor_plan() -> dict[str, Any]:
    """Between the divided operations each worker has its share of the sequence."""
    heads = {"units": gpt.HEADS}
    return {
        "tokens": {"cut": "embedding", "scatter": True},
        "positions": {"cut": "embedding", "scatter": True, "dim": 0},
        "blocks.*.norm*": "sequence",
        "blocks.*.attention": "gather",
        "blocks.*.attention.qkv": {"cut": "column", "parts": 3, **heads},
        "blocks.*.attention.out": {"cut": "row", "scatter": True, **heads},
        "blocks.*.up": {"cut": "column", "scatter": True},
        "blocks.*.down": {"cut": "row", "scatter": True},
        "norm": "sequence",
        "lm_head": {"cut": "column", "gather": True, "scatter": True},
    }


def raw_job(folder: Path) -> dict[str, Any]:
    """The job of the small GPT, with this task."""
    return {**gpt.raw_job(folder), "task": __file__}
