"""The dropout family, drawing from keys."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from verbund.randomness import draws
from verbund.randomness.source import Source

# Minus scale times alpha of SELU, what alpha dropout sets elements to (Klambauer et al., "Self-Normalizing Neural
# Networks", NeurIPS 2017, section 3).
_ALPHA = -1.7580993408473766


def dropout(
    source: Source,
    x: Tensor,
    p: float,
    what: str,
    *,
    features: bool = False,
    inplace: bool = False,
    dimension: int | None = None,
) -> Tensor:
    """Zeroes elements, or whole features (dimension 1), with probability p and scales the rest by 1 / (1 − p)."""
    if x.numel() == 0:
        return x
    factor = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    mask = keep_mask(source, x, p, what, features, factor, dimension)
    return x.mul_(mask) if inplace else x * mask


def alpha_dropout(
    source: Source, x: Tensor, p: float, what: str, *, features: bool = False, inplace: bool = False
) -> Tensor:
    """Dropout that keeps mean and variance of SELU activations (Klambauer et al., 2017, section 3)."""
    if x.numel() == 0:
        return x
    if p >= 1.0:
        return x.mul_(0.0) if inplace else x * 0.0
    scale = ((1.0 - p) * (1.0 + p * _ALPHA**2)) ** -0.5
    mask = keep_mask(source, x, p, what, features, 1.0, None)
    shift = (1.0 - mask).mul_(_ALPHA * scale).sub_(scale * _ALPHA * p)
    mask.mul_(scale)
    return x.mul_(mask).add_(shift) if inplace else x * mask + shift


def keep_mask(
    source: Source, x: Tensor, p: float, what: str, features: bool, factor: float, dimension: int | None
) -> Tensor:
    """0 with probability p, else `factor`: of the shape of `x`, or a number for each of its features (dimension 1)."""
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if features else tuple(x.shape)
    dtype = x.dtype

    def fill(keys: Tensor, count: int) -> Tensor:
        return draws.keep(keys, count, p, dtype, factor)

    return source.draw(shape, x.device, what, fill, batch=True, dimension=dimension)


def dropout_of(source: Source, module: _DropoutNd, x: Tensor) -> Tensor:
    """What a module of torch's dropout family does in training."""
    kind = type(module).__name__
    p, inplace = float(module.p), bool(module.inplace)
    if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        return alpha_dropout(source, x, p, kind, features=isinstance(module, nn.FeatureAlphaDropout), inplace=inplace)
    if x.dim() == (2 if isinstance(module, nn.Dropout1d) else 4 if isinstance(module, nn.Dropout3d) else 0):
        # These two take an input with one dimension less as one sample without a batch.
        return dropout(source, x.unsqueeze(0), p, kind, features=True, inplace=inplace).squeeze(0)
    return dropout(source, x, p, kind, features=not isinstance(module, nn.Dropout), inplace=inplace)
