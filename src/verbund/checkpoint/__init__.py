"""Checkpoints: global tensors by global names, in safetensors shards with a manifest. They know no strategy.

A save: each worker copies its pieces (`Snapshot`) and calls `write_part` with `partial_folder` in a thread;
the supervisor calls `commit` with what they returned, then `prune`; or `discard`. A resume: `newest_valid`,
then each worker `Checkpoint.open(path, verify=False)` and `fill`.

`Piece`, `Snapshot`, `write_part` and `Checkpoint` import torch when they are first asked for; the rest never.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verbund.checkpoint.box import Box
from verbund.checkpoint.manifest import KINDS, Manifest
from verbund.checkpoint.store import (
    commit,
    discard,
    folder,
    generations,
    is_partial,
    latest,
    newest_valid,
    partial_folder,
    prune,
    sweep,
    verify,
)

if TYPE_CHECKING:
    from verbund.checkpoint.piece import Piece
    from verbund.checkpoint.read import Checkpoint
    from verbund.checkpoint.snapshot import Snapshot
    from verbund.checkpoint.write import write_part

__all__ = [
    "KINDS",
    "Box",
    "Checkpoint",
    "Manifest",
    "Piece",
    "Snapshot",
    "commit",
    "discard",
    "folder",
    "generations",
    "is_partial",
    "latest",
    "newest_valid",
    "partial_folder",
    "prune",
    "sweep",
    "verify",
    "write_part",
]

_TORCH = {"Piece": "piece", "Checkpoint": "read", "Snapshot": "snapshot", "write_part": "write"}


def __getattr__(name: str) -> Any:
    if name in _TORCH:
        return getattr(import_module(f"verbund.checkpoint.{_TORCH[name]}"), name)
    raise AttributeError(f"module 'verbund.checkpoint' has no attribute {name!r}")
