"""The way out: torch's own generator, seeded per worker."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from verbund.randomness.hash import combine


class WorkerRandomness:
    """Leaves torch's generator alone: results depend on how the work is divided.

    Args:
        model: not changed.
        seed: of the job.
        rank: of this worker, so that workers draw different numbers.
    """

    def __init__(self, model: nn.Module, seed: int, rank: int) -> None:
        torch.manual_seed(combine(seed, rank) >> 1)

    def active(self, step: int, ids: Tensor) -> AbstractContextManager[Any]:
        return nullcontext()

    def context_fn(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """torch's checkpointing keeps the generator's state by itself."""
        return nullcontext(), nullcontext()

    def report(self) -> str:
        return "worker"
