"""What a user's loss or metric returns: one value per sample, never a mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbund.errors import TaskError

if TYPE_CHECKING:
    from verbund.sums import Sums

PER_SAMPLE = (
    "Return one value per sample, shape [B] (e.g. reduction='none'), or verbund.sums.Sums(total, weight): "
    "never a mean, so that sums over any division of the batch are exact"
)


def as_sums(value: Any, what: str, path: Path) -> Sums:
    """What a user's function returned as `Sums`: they themselves, (total, weight), or one value per sample.

    Raises:
        TaskError: for a mean or anything else that is not per sample.
    """
    import torch

    from verbund.sums import Sums

    if isinstance(value, tuple) and len(value) == 2:
        value = Sums(*value)
    if isinstance(value, torch.Tensor):
        value = Sums(value, torch.ones_like(value, requires_grad=False))
    if not isinstance(value, Sums):
        raise TaskError(f"`{what}` returned a {type(value).__name__}", where=str(path), fix=PER_SAMPLE)
    if value.total.dim() != 1 or value.weight.shape != value.total.shape:
        shapes = f"total {list(value.total.shape)}, weight {list(value.weight.shape)}"
        raise TaskError(f"`{what}` returned {shapes}, not one value per sample", where=str(path), fix=PER_SAMPLE)
    return value
