"""Embedding tables on a server: a run of rows, of which a push and a pull touch few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verbund.exchange.parameter_server.memory import reserve
from verbund.exchange.parameter_server.plan import Block
from verbund.exchange.parameter_server.server_optimizer import ServerOptimizer
from verbund.randomness.draws import normal
from verbund.randomness.hash import combine, sample_keys, text_key


class Table:
    """The rows of a block and their optimiser's state.

    The rows of a push and their state are gathered into compact tensors, which the optimiser steps as it would a
    parameter of this size; so a step costs what its rows cost, whatever the size of the table. What an optimiser
    counts (`step`) it counts for the block.

    Args:
        block: which.
        optimizer: takes the block in.
        values: of all rows; they become the block's. None: a row is made when it is first needed, from `block.born`.
    """

    def __init__(self, block: Block, optimizer: ServerOptimizer, values: Tensor | None = None) -> None:
        dtype: torch.dtype = getattr(torch, block.dtype)
        self.block = block
        self.lazy = values is None
        self.all_rows = reserve(block.length, dtype) if values is None else values.view(block.length)
        self.stepped = reserve(block.length[:1], torch.bool)
        """Which rows have been stepped: only they have a state of their own, and if `lazy` only they are stored."""
        self.parameter = nn.Parameter(torch.empty((0, *block.length[1:]), dtype=dtype))
        self._optimizer = optimizer
        self.first = optimizer.first_state(block.name, dtype)
        self._numbers: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}
        self.has_state = False
        self._rows = torch.empty(0, dtype=torch.int64)
        optimizer.add(block.name, self.parameter)

    def local(self, rows: Tensor) -> Tensor:
        """Rows of the whole table as rows of the block."""
        return rows - self.block.offset[0] if self.block.offset[0] else rows

    def gather(self, rows: Tensor) -> Tensor:
        """A copy of some rows of the block."""
        found = self.all_rows.index_select(0, rows)
        if self.lazy:
            unmade = ~self.stepped[rows]
            if unmade.any():
                found[unmade] = self._made(rows[unmade])
        return found

    def set_gradient(self, rows: Tensor, gradient: Tensor) -> None:
        """Before a step: the rows of the block that it is for, and what it goes by."""
        self._rows = rows
        values = self.gather(rows)
        state = self._optimizer.state(self.parameter)
        state.clear()
        state.update({key: value.clone() for key, value in (self._numbers or self.first.numbers).items()})
        state.update({key: self._gathered(key, first, rows) for key, first in self.first.moments.items()})
        self.parameter.data = values
        self.parameter.grad = gradient.view(values.shape)

    def store(self) -> None:
        """After the step."""
        rows, state = self._rows, self._optimizer.state(self.parameter)
        self.all_rows.index_copy_(0, rows, self.parameter.detach())
        for key in self.first.moments:
            self._reserved(key).index_copy_(0, rows, state[key])
        self._numbers = {key: state[key] for key in self.first.numbers}
        self.has_state |= bool(state)
        self.stepped[rows] = True
        self.parameter.data = self.parameter.detach()[:0].clone()
        state.clear()

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        """The optimiser's, by torch's keys, its moments for some rows of the block; empty before the first step."""
        if not self.has_state:
            return {}
        moments = {key: self._gathered(key, first, rows) for key, first in self.first.moments.items()}
        return moments | {key: value.clone() for key, value in self._numbers.items()}

    def put(self, rows: Tensor, values: Tensor | None, state: dict[str, Tensor]) -> None:
        """Takes rows of the block that have been stepped elsewhere, and the optimiser's state of them.

        Args:
            rows: which.
            values: of these; None where all rows are there.
            state: as `state` gave it.
        """
        if values is not None:
            self.all_rows.index_copy_(0, rows, values.view((len(rows), *self.block.length[1:])))
        for key in self.first.moments.keys() & state.keys():
            moments = self._reserved(key)
            moments.index_copy_(0, rows, state[key].view((len(rows), *moments.shape[1:])))
        if state:
            self._numbers = {key: state.get(key, first).clone() for key, first in self.first.numbers.items()}
        self.has_state |= bool(state)
        self.stepped[rows] = True

    def close(self) -> None:
        """Lets go of all."""
        self._optimizer.remove(self.parameter)

    def _gathered(self, key: str, first: Tensor, rows: Tensor) -> Tensor:
        """The moments of some rows."""
        moments = self._moments.get(key)
        if moments is None:
            return first.expand((len(rows), *self.block.length[1:])).clone()
        found = moments.index_select(0, rows)
        if first:  # what is not stored is 0
            found[~self.stepped[rows]] = first
        return found

    def _reserved(self, key: str) -> Tensor:
        if key not in self._moments:
            self._moments[key] = reserve(self.block.length, self.first.moments[key].dtype)
        return self._moments[key]

    def _made(self, rows: Tensor) -> Tensor:
        """First values: normal, a function of seed, table and row alone."""
        assert self.block.born is not None
        seed, scale = self.block.born
        whole = rows + self.block.offset[0]
        made = normal(
            sample_keys(combine(seed, text_key(self.block.name)), whole), self.block.width, self.all_rows.dtype
        )
        return made.mul_(scale).view((len(rows), *self.block.length[1:]))
