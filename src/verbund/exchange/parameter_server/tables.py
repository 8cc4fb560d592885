"""Embedding tables on a server: a run of rows, of which a push and a pull touch few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verbund.exchange.parameter_server.memory import reserve
from verbund.exchange.parameter_server.plan import Block
from verbund.exchange.parameter_server.server_optimizer import ServerOptimizer
from verbund.randomness.rows import born


class Table:
    """The rows of a block and their optimiser's state.

    The rows of a push and their state are gathered into compact tensors, which the optimiser steps as it would a
    parameter of this size; so a step costs what its rows cost, whatever the size of the table. What an optimiser
    counts (`step`) it counts for the block.

    A row has a slot from its first step on, in which its moments lie and, where rows are made, its values: one after
    the other, so that memory is taken by rows that have been stepped, however far apart they are.

    Args:
        block: which.
        optimizer: takes the block in.
        values: of all rows; they become the block's. None: a row is made when it is first needed, from `block.born`.
    """

    def __init__(self, block: Block, optimizer: ServerOptimizer, values: Tensor | None = None) -> None:
        dtype: torch.dtype = getattr(torch, block.dtype)
        self.block = block
        self.lazy = values is None
        self.parameter = nn.Parameter(torch.empty((0, *block.length[1:]), dtype=dtype))
        self.first = optimizer.first_state(block.name, dtype)
        self.has_state = False
        self._values = reserve(block.length, dtype, block.name) if values is None else values.view(block.length)
        self._slots = reserve(
            block.length[:1], torch.int32, block.name
        )  # by row; 0: none, else one more than its number
        self._rows = reserve(block.length[:1], torch.int64, block.name)  # by slot
        self._used = 0
        self._moments: dict[str, Tensor] = {}
        self._numbers: dict[str, Tensor] = {}
        self._stepping = torch.empty(0, dtype=torch.int64)
        self._optimizer = optimizer
        optimizer.add(block.name, self.parameter)

    @property
    def stepped(self) -> Tensor:
        """The rows of the block that have been stepped, ascending. Of no other is anything stored, if `lazy`."""
        return self._rows[: self._used].sort().values

    @property
    def all_rows(self) -> Tensor:
        """The values of all rows, unless `lazy`: the block's own."""
        assert not self.lazy
        return self._values

    def local(self, rows: Tensor) -> Tensor:
        """Rows of the whole table as rows of the block."""
        return rows - self.block.offset[0] if self.block.offset[0] else rows

    def gather(self, rows: Tensor) -> Tensor:
        """A copy of some rows of the block."""
        if not self.lazy:
            return self._values.index_select(0, rows)
        slots = self._slots.index_select(0, rows)
        found, without = self._in_slots(self._values, slots)
        if without is not None:
            found[without] = self._made(rows[without])
        return found

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        """The optimiser's, by torch's keys, its moments for some rows of the block; empty before the first step."""
        if not self.has_state:
            return {}
        slots = self._slots.index_select(0, rows)
        moments = {key: self._gathered(key, slots) for key in self.first.moments}
        return moments | {key: value.clone() for key, value in self._numbers.items()}

    def put(self, rows: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
        """Takes rows of the block that have been stepped elsewhere, and the optimiser's state of them.

        Args:
            rows: which.
            values: of these.
            state: as `state` gave it.
        """
        at = self._given_slots(rows)
        values = values.view((len(rows), *self.block.length[1:]))
        self._values.index_copy_(0, at if self.lazy else rows, values)
        for key in self.first.moments.keys() & state.keys():
            self._reserved(key).index_copy_(0, at, state[key].view(values.shape))
        if state:
            self._numbers = {key: state.get(key, first).clone() for key, first in self.first.numbers.items()}
        self.has_state |= bool(state)

    def set_gradient(self, rows: Tensor, gradient: Tensor) -> None:
        """Before a step: the rows of the block that it is for, and what it goes by."""
        self._stepping = rows
        slots = self._slots.index_select(0, rows)
        state = self._optimizer.state(self.parameter)
        state.clear()
        state.update({key: value.clone() for key, value in (self._numbers or self.first.numbers).items()})
        state.update({key: self._gathered(key, slots) for key in self.first.moments})
        self.parameter.data = self.gather(rows)
        self.parameter.grad = gradient.view(self.parameter.shape)

    def store(self) -> None:
        """After the step."""
        self.put(self._stepping, self.parameter.detach(), self._optimizer.state(self.parameter))
        self.parameter.data = self.parameter.detach()[:0].clone()
        self._optimizer.state(self.parameter).clear()

    def close(self) -> None:
        """Lets go of all."""
        self._optimizer.remove(self.parameter)

    def _gathered(self, key: str, slots: Tensor) -> Tensor:
        """The moments in some slots; the first ones where there is no slot."""
        first, moments = self.first.moments[key], self._moments.get(key)
        if moments is None:
            return first.expand((len(slots), *self.block.length[1:])).clone()
        found, without = self._in_slots(moments, slots)
        if without is not None:
            found[without] = first
        return found

    def _in_slots(self, stored: Tensor, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """What lies in some slots, and a mask of those that are none, if there are such."""
        without = slots == 0
        if not without.any():
            return stored.index_select(0, slots - 1), None
        return stored.index_select(0, (slots - 1).clamp_(min=0)), without

    def _given_slots(self, rows: Tensor) -> Tensor:
        """The numbers of the rows' slots, after all of them have got one."""
        slots = self._slots.index_select(0, rows)
        new = rows[slots == 0]
        if len(new):
            end = self._used + len(new)
            self._rows[self._used : end] = new
            self._slots.index_copy_(0, new, torch.arange(self._used + 1, end + 1, dtype=torch.int32))
            self._used = end
            slots = self._slots.index_select(0, rows)
        return slots.long() - 1

    def _reserved(self, key: str) -> Tensor:
        if key not in self._moments:
            self._moments[key] = reserve(self.block.length, self.first.moments[key].dtype, self.block.name)
        return self._moments[key]

    def _made(self, rows: Tensor) -> Tensor:
        """First values: those that the rows have in a process that has the whole table."""
        assert self.block.born is not None
        seed, scale = self.block.born
        made = born(seed, rows + self.block.offset[0], self.block.width, scale).to(self._values.dtype)
        return made.view((len(rows), *self.block.length[1:]))
