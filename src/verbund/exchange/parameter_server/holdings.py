"""What a server has of a model's parameters, and what a push does to it.

A deterministic state machine: the same calls in the same order give the same bits. Reads change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece, dtype_name
from verbund.checkpoint.read import Checkpoint
from verbund.errors import InputError
from verbund.exchange.parameter_server.dense import Dense, Sum
from verbund.exchange.parameter_server.ledger import Ledger
from verbund.exchange.parameter_server.plan import Block, Plan
from verbund.exchange.parameter_server.push import Outcome, Part, Push
from verbund.exchange.parameter_server.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class Image:
    """All that a server has of one block: for a replica, a snapshot, a beginning.

    Args:
        block: its number.
        fields: JSON values.
        tensors: by name.
    """

    block: int
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass
class _Held:
    block: Block
    store: Dense | Sum
    version: int
    ledger: Ledger


class Holdings:
    """The blocks of one server. Not thread-safe.

    Args:
        plan: of the run.

    Raises:
        InputError: if the plan's optimiser needs whole tensors.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._optimizer = ServerOptimizer(plan.optimizer, sorted({block.name for block in plan.blocks}))
        self._held: dict[int, _Held] = {}

    def create(
        self, block: int, values: Tensor | None, version: int = 0, optimizer: dict[str, Tensor] | None = None
    ) -> None:
        """Begins a block, or begins it anew.

        Args:
            block: its number.
            values: its first values, of any shape; copied. None: of a table whose rows are made when they are needed.
            version: its first version, and under a synchronous rule its first ticket.
            optimizer: what an optimiser had of it elsewhere, by torch's keys; copied.

        Raises:
            InputError: if they do not fit the block.
        """
        found = self._block(block)
        if found.kind == "rows":
            raise NotImplementedError
        if values is None or values.numel() != found.count or dtype_name(values.dtype) != found.dtype:
            raise InputError(f"block {block} (`{found.name}`) begins with values of another shape or dtype")
        self.drop(block)
        own = values.detach().reshape(-1).clone()
        store = Sum(own) if found.kind == "sum" else Dense(found, own, self._optimizer, optimizer)
        self._held[block] = _Held(found, store, version, Ledger(self.plan.rule.shares))

    def put(self, image: Image) -> None:
        """Takes a block as another server had it, in place of what is here. The image's tensors become the block's."""
        raise NotImplementedError

    def image(self, block: int, copy: bool = True) -> Image:
        """All of a block. Without `copy` its tensors are the block's own: valid until the next change."""
        raise NotImplementedError

    def drop(self, block: int) -> None:
        """Lets go of a block, if it is here."""
        held = self._held.pop(block, None)
        if held is not None and isinstance(held.store, Dense):
            held.store.close()

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def version(self, block: int) -> int:
        """How many tickets a block has taken, on top of the version that it began with."""
        return self._here(block).version

    def check(self, push: Push) -> None:
        """Looks whether `apply` can take a push.

        Raises:
            InputError: saying what is wrong with it.
        """
        for part in push.parts:
            self._here(part.block)

    def apply(self, push: Push) -> list[Outcome]:
        """Takes a push that `check` has passed, of blocks that are all here. Its tensors are neither changed nor kept.

        Returns:
            What became of each part.
        """
        return [self._apply(push, part) for part in push.parts]

    def read(self, blocks: Sequence[int]) -> Tensor:
        """The values of blocks of one dtype that are no tables, flat, one after the other: a copy.

        Raises:
            InputError: if a block is not here, is a table, or has another dtype than the first.
        """
        return torch.cat([self._here(block).store.values for block in blocks])

    def read_rows(self, block: int, rows: Tensor) -> Tensor:
        """Rows of a table, [len(rows), width], in any order: a copy. Those that nobody has changed yet are made.

        Args:
            block: its number.
            rows: numbers in the whole table, int64.

        Raises:
            InputError: if the block is not here or no table, or rows lie outside of it.
        """
        raise NotImplementedError

    def load(self, block: int, checkpoint: Checkpoint, version: int = 0) -> None:
        """Begins a block with what a universal checkpoint has of it: values, and the optimiser's state if it is there.

        Raises:
            CheckpointError: if the checkpoint does not fit.
        """
        raise NotImplementedError

    def pieces(self, blocks: Iterable[int]) -> Iterator[Piece]:
        """Blocks as pieces of a universal checkpoint: parameters, buffers (sums) and the optimiser's state.

        They are the blocks' own memory: valid until the next change.
        """
        raise NotImplementedError

    def _apply(self, push: Push, part: Part) -> Outcome:
        held = self._here(part.block)
        if not held.ledger.add(push.ticket, push.share):
            return Outcome("known", held.version, None)
        staleness = held.version - part.base
        if part.values is not None and push.weight:
            if isinstance(held.store, Sum):
                held.store.add(part.values * push.scale)
            else:
                held.store.set_gradient(part.values * (push.scale / push.weight))
                self._optimizer.step([held.store.parameter], push.rate)
        held.version += 1
        return Outcome("applied", held.version, staleness)

    def _block(self, number: int) -> Block:
        if not 0 <= number < len(self.plan.blocks):
            raise InputError(f"there is no block {number}", fix=f"The plan has {len(self.plan.blocks)}")
        return self.plan.blocks[number]

    def _here(self, number: int) -> _Held:
        held = self._held.get(number)
        if held is None:
            block = self._block(number)
            raise InputError(f"block {number} (`{block.name}` {block.box}) is not here")
        return held
