"""Updates made no longer than a norm, and a norm that follows them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def clipped(tensors: Mapping[str, Tensor], bound: float) -> tuple[dict[str, Tensor], bool]:
    """The tensors, shortened so that the L2 norm of all together is at most `bound`, and whether it was before.

    What holds a number that is not finite becomes zero: it would not become shorter, and an error would tell of it.
    """
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors.values()))
    if not math.isfinite(norm):
        return {name: torch.zeros_like(t) for name, t in tensors.items()}, False
    if norm <= bound:
        return dict(tensors), True
    factor = bound / norm
    # Rounding to the tensors' type must not lengthen them again.
    factor *= 1.0 - 2.0 * max(torch.finfo(t.dtype).eps for t in tensors.values())
    return {name: t * factor for name, t in tensors.items()}, False


def followed(bound: float, share: float, quantile: float, rate: float) -> float:
    """The next clipping norm: geometric updates (Andrew et al., "Differentially Private Learning with Adaptive
    Clipping", NeurIPS 2021, algorithm 1).

    Args:
        bound: the norm until now.
        share: of the updates that were no longer than it, noisy; may lie outside of 0 … 1.
        quantile: what the share should be.
        rate: η of the paper.
    """
    return bound * math.exp(-rate * (share - quantile))


def split_noise(noise: float, count_noise: float) -> float:
    """The noise multiplier of the sum, so that the sum and the count together are as private as one release with
    `noise` (the same, theorem 1). The count is of ±½, so that its sensitivity is ½.

    Raises:
        ValueError: if the noise of the count alone is too little.
    """
    left = noise**-2 - (2.0 * count_noise) ** -2
    if left <= 0.0:
        raise ValueError(f"noise of {count_noise} on the count leaves nothing of {noise}")
    return float(left**-0.5)
