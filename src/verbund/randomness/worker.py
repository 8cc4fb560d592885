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
        self._nothing = nullcontext()

    def active(self, step: int, ids: Tensor) -> AbstractContextManager[Any]:
        """Nothing is done for the block."""
        return self._nothing

    def context_fn(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For activation checkpointing: the repetition starts from the generators' states of now, and leaves them as
        it found them."""
        return nullcontext(), _Replayed()

    def report(self) -> str:
        return "worker"


class _Replayed:
    """The block draws from the states that torch's generators had when this was made."""

    def __init__(self) -> None:
        self._states = _states()

    def __enter__(self) -> None:
        self._former = _states()
        _restore(self._states)

    def __exit__(self, *_: object) -> None:
        _restore(self._former)


def _states() -> tuple[Tensor, Tensor | None]:
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), torch.cuda.get_rng_state() if used else None


def _restore(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
