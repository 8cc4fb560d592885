"""What a task's `augment(batch, random)` draws from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verbund.errors import TaskError
from verbund.randomness import draws
from verbund.randomness.hash import combine, sample_keys, text_key


class BatchRandom:
    """Random tensors whose row i depends on sample i alone (and on the step, and on how often was drawn before).

    Args:
        seed: of the job.
        step: the optimiser step, so that a sample is augmented anew each time.
        ids: the sample ids, int64 [B].
        scope: a name that keeps these numbers apart from others of the same step.
    """

    def __init__(self, seed: int, step: int, ids: Tensor, scope: str) -> None:
        self._key = combine(seed, step, text_key(scope))
        self._ids = ids
        self._size = len(ids)
        self._uses = 0

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform in [low, high): float32 [B, *shape]."""
        values = draws.uniform(self._keys(), math.prod(shape), torch.float32)
        return values.mul_(high - low).add_(low).view(self._size, *shape)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Normal: float32 [B, *shape]."""
        return draws.normal(self._keys(), math.prod(shape), torch.float32).mul_(std).add_(mean).view(self._size, *shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers low … high − 1: int64 [B, *shape].

        Raises:
            TaskError: if there is no such integer.
        """
        if low >= high:
            raise TaskError(
                f"no integer lies in {low} … {high - 1}",
                where="random.integers in `augment`",
                fix="Give low < high; high itself is not drawn",
            )
        return draws.integers(self._keys(), math.prod(shape), low, high).view(self._size, *shape)

    def bernoulli(self, p: float, *shape: int) -> Tensor:
        """1 with probability p, else 0: float32 [B, *shape]."""
        return draws.bernoulli(self._keys(), math.prod(shape), p, torch.float32).view(self._size, *shape)

    def _keys(self) -> Tensor:
        self._uses += 1
        return sample_keys(combine(self._key, self._uses), self._ids)
