"""The optimiser of a server: one of torch's over all blocks that the server has at the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbund.errors import JobError, Problem
from verbund.job import Optimizer
from verbund.mesh import schedule
from verbund.mesh.optimizer import ELEMENTWISE, build

# What optimisers count or keep one number of, before their first step; `eta` is the learning rate.
_NUMBERS = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}


@dataclass(frozen=True)
class FirstState:
    """What an optimiser has of a block before its first step.

    Args:
        moments: by torch's key, what each element has: a scalar.
        numbers: by torch's key, what there is one of.
    """

    moments: dict[str, Tensor]
    numbers: dict[str, Tensor]


def check(spec: Optimizer) -> list[Problem]:
    """What keeps servers from stepping with an optimiser that there is."""
    name = spec.name.lower()
    if name in ELEMENTWISE:
        return []
    what = f"`{name}` needs whole parameters, and parameter servers have blocks of them"
    fix = f"Use one of {', '.join(sorted(ELEMENTWISE))}, or another exchange"
    return [Problem("train.optimizer.name", what, fix)]


class ServerOptimizer:
    """Steps blocks, which come and go. A step is one call of torch's optimiser, however many blocks it is for.

    Args:
        spec: the job's.
        every: the names of all tensors of the plan, of which this server may have some only.

    Raises:
        JobError: if the optimiser needs whole tensors.
    """

    def __init__(self, spec: Optimizer, every: Sequence[str]) -> None:
        if problems := check(spec):
            raise JobError(problems)
        self._spec = spec
        self._every = every
        self._names: dict[nn.Parameter, str] = {}
        self._states: defaultdict[Tensor, Any] = defaultdict(dict)
        self._first: dict[str, FirstState] = {}
        self._torch: torch.optim.Optimizer | None = None

    def add(self, name: str, parameter: nn.Parameter, state: dict[str, Tensor] | None = None) -> None:
        """Takes in a block of the tensor `name`, with the state that it has from elsewhere."""
        self._names[parameter] = name
        self._torch = None
        if state:
            self._states[parameter] = dict(state)

    def remove(self, parameter: nn.Parameter) -> None:
        """Lets go of a block and its state."""
        del self._names[parameter]
        self._states.pop(parameter, None)
        self._torch = None

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What torch keeps of a block, by torch's keys; empty before its first step. May be changed."""
        self._ready()
        found: dict[str, Any] = self._states[parameter]
        return found

    def first_state(self, name: str, dtype: torch.dtype) -> FirstState:
        """What there is of a block of the tensor `name` before its first step: told by a step that changes nothing."""
        if name not in self._first:
            parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
            optimizer = build([(name, parameter)], self._spec, self._every)
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            state = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
            moments = {key: value[0].clone() for key, value in state.items() if value.dim()}
            rate = optimizer.param_groups[0]["lr"]
            numbers = {
                key: torch.full_like(value, _NUMBERS.get(key, rate)) for key, value in state.items() if not value.dim()
            }
            self._first[name] = FirstState(moments, numbers)
        return self._first[name]

    def step(self, parameters: Sequence[nn.Parameter], rate: float) -> None:
        """One step of the parameters, which have gradients; all others have none. The gradients are gone after it.

        Args:
            parameters: of some blocks.
            rate: factor on the learning rates.
        """
        optimizer = self._ready()
        schedule.apply(optimizer, rate)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def _ready(self) -> torch.optim.Optimizer:
        """Torch's optimiser over the blocks that there are now; states outlive it."""
        if self._torch is None:
            self._torch = build([(name, parameter) for parameter, name in self._names.items()], self._spec, self._every)
            for parameter, state in self._torch.state.items():  # some make it before the first step
                if not self._states[parameter]:
                    self._states[parameter] = state
            self._torch.state = self._states
        return self._torch
