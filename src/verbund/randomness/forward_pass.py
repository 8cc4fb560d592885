"""One forward pass: the keys of its samples, and what has drawn so far."""

from __future__ import annotations

import torch
from torch import Tensor

from verbund.randomness.hash import combine, sample_keys, single_key, text_key, use_key

# What draws while no module is being called: the task's loss, its `inputs`.
OUTSIDE = "(outside the model)"
_SHARED = text_key("shared by the global batch")


class Pass:
    """One forward pass: whose samples, and what was drawn so far."""

    __slots__ = ("_bases", "_key", "ids", "moded", "name", "searching", "seed", "step", "training", "uses")

    def __init__(self, seed: int, step: int, ids: Tensor) -> None:
        self.seed = seed
        self.step = step
        self.ids = ids
        self.uses: dict[str, int] = {}
        self.name = OUTSIDE
        self.training = False
        self.moded = False
        self.searching = False
        self._key: int | None = None
        self._bases: dict[torch.device, Tensor] = {}

    def copy(self) -> Pass:
        """The same state, which then goes its own way."""
        copied = Pass(self.seed, self.step, self.ids)
        copied.uses = dict(self.uses)
        copied.name, copied.training = self.name, self.training
        copied.moded, copied.searching = self.moded, self.searching
        copied._key, copied._bases = self._key, self._bases
        return copied

    def _step_key(self) -> int:
        if self._key is None:
            self._key = combine(self.seed, self.step)
        return self._key

    def next_use(self, name: str) -> int:
        """How often a module has drawn in this pass before."""
        use = self.uses.get(name, 0)
        self.uses[name] = use + 1
        return use

    def sample_keys(self, name: str, use: int, device: torch.device) -> Tensor:
        """Row keys of all samples, int32 [2, B, 1]."""
        base = self._bases.get(device)
        if base is None:
            base = self._bases[device] = sample_keys(self._step_key(), self.ids).to(device)
        return base ^ use_key(name, use, device)

    def shared_key(self, name: str, use: int, device: torch.device) -> Tensor:
        """One row key for the whole global batch, int32 [2, 1, 1]."""
        return single_key(combine(self._step_key(), _SHARED, text_key(name), use), device)
