"""Blocks that are pushed and pulled whole: parameters, and sums that pushes are added to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verbund.exchange.parameter_server.plan import Block
from verbund.exchange.parameter_server.server_optimizer import ServerOptimizer


class Dense:
    """The parameters of a block, stepped by the optimiser.

    Args:
        block: which.
        values: flat; they become the block's.
        optimizer: takes the block in.
        state: what an optimiser had of it elsewhere, by torch's keys; it becomes the block's.
    """

    def __init__(
        self, block: Block, values: Tensor, optimizer: ServerOptimizer, state: dict[str, Tensor] | None = None
    ) -> None:
        self.block = block
        self.parameter = nn.Parameter(values.view(block.length))
        self.first = optimizer.first_state(block.name, values.dtype)
        self._optimizer = optimizer
        shaped = {
            key: value.view(block.length) if key in self.first.moments else value
            for key, value in (state or {}).items()
        }
        optimizer.add(block.name, self.parameter, shaped)

    @property
    def values(self) -> Tensor:
        """Flat."""
        return self.parameter.detach().view(-1)

    def move(self, memory: Tensor) -> None:
        """The values lie in this memory from now on, flat, which has them already."""
        self.parameter.data = memory.view(self.parameter.shape)

    def state(self) -> dict[str, Tensor]:
        """The optimiser's, by torch's keys; empty before the first step."""
        return {key: value for key, value in self._optimizer.state(self.parameter).items() if isinstance(value, Tensor)}

    def set_gradient(self, gradient: Tensor) -> None:
        """Before a step: what it goes by, flat."""
        self.parameter.grad = gradient.view(self.parameter.shape)

    def close(self) -> None:
        """Lets go of all."""
        self._optimizer.remove(self.parameter)


class Sum:
    """Values that pushes are added to.

    Args:
        block: which.
        values: flat; they become the block's.
    """

    def __init__(self, block: Block, values: Tensor) -> None:
        self.block = block
        self.values = values

    def move(self, memory: Tensor) -> None:
        """The values lie in this memory from now on, which has them already."""
        self.values = memory

    def add(self, total: Tensor) -> None:
        """Adds up."""
        with torch.no_grad():
            self.values.add_(total)

    def close(self) -> None:
        """Nothing else knows of it."""
