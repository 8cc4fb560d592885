"""Versions, updates and memories as safetensors files: the same tensors are the same bytes, and so have one hash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from verbund.errors import InputError

SHARED, TOLD, DIFFERENCE, AUX, CODED = "shared", "told", "difference", "aux", "coded"


def packed(**groups: Mapping[str, Tensor]) -> bytes:
    """A file's content; a tensor is called `GROUP/NAME` in it."""
    tensors = {
        f"{group}/{name}": values.detach().cpu().contiguous().clone()
        for group, named in groups.items()
        for name, values in sorted(named.items())
    }
    # A file without any tensor is one that cannot be told from a damaged one.
    return save(tensors or {"/": torch.zeros(0)})


def unpacked(path: Path, *groups: str) -> list[dict[str, Tensor]]:
    """The tensors of a file, one mapping for each group.

    Raises:
        InputError: if it is no such file, or has tensors of other groups.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"is no safetensors file: {error}", where=str(path)) from None
    tensors.pop("/", None)
    found: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
    for full, values in tensors.items():
        group, _, name = full.partition("/")
        if group not in found:
            raise InputError(f"has a tensor `{full[:80]}` that nobody asked for", where=str(path))
        found[group][name] = values
    return [found[group] for group in groups]
