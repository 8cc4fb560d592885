"""The plan: the blocks that a model's parameters are cut into, and by which rule servers change them.

It is made once, and the same for all processes of a run: servers and clients speak of blocks by their numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from verbund.checkpoint.box import Box
from verbund.errors import InputError
from verbund.job import Compression, Optimizer

Kind = Literal["dense", "rows", "sum"]
KINDS = get_args(Kind)
Consistency = Literal["synchronous", "bounded", "asynchronous"]
CONSISTENCIES = get_args(Consistency)


@dataclass(frozen=True)
class Block:
    """A box of a global tensor that one server holds, with all that the optimiser keeps of it.

    Args:
        name: the global name of the tensor.
        shape: its global shape.
        dtype: as `float32`.
        offset: where the box begins, per dimension.
        length: how long it is, per dimension.
        kind: `dense`: pushed and pulled whole; `rows`: a run of rows of an embedding table, of which a push and a pull
            name those they touch; `sum`: no parameter, but what pushes are added to (running statistics).
        born: of `rows` that are made when they are first asked for: the seed and the scale of their first values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    length: tuple[int, ...]
    kind: Kind = "dense"
    born: tuple[int, float] | None = None

    @property
    def box(self) -> Box:
        return Box(self.offset, self.length)

    @property
    def count(self) -> int:
        """Elements."""
        return self.box.volume

    @property
    def width(self) -> int:
        """Elements of one row of a table."""
        return self.count // max(self.length[0], 1)

    @staticmethod
    def of(record: dict[str, Any]) -> Block:
        """The block that `asdict` gave, from JSON."""
        born = record.get("born")
        return Block(
            str(record["name"]),
            tuple(map(int, record["shape"])),
            str(record["dtype"]),
            tuple(map(int, record["offset"])),
            tuple(map(int, record["length"])),
            record["kind"],
            (int(born[0]), float(born[1])) if born else None,
        )


@dataclass(frozen=True)
class Rule:
    """What a server does with a push.

    Args:
        consistency: `synchronous`: the shares of a ticket are added up, and the optimiser steps once they are there;
            a reader at ticket t sees all tickets before it. `bounded`: each share is a step at once, by its part of the
            learning rate, and a reader at ticket t sees all shares of the tickets before t − staleness, and of later
            ones those that have come: stale-synchronous parallel (Ho et al., "More Effective Distributed ML via a
            Stale Synchronous Parallel Parameter Server", 2013, section 3). `asynchronous`: each push is a step.
        staleness: the bound of a bounded rule.
        shares: into how many a ticket is divided.
        backup: how many of them need not have come.
        staleness_aware: the learning rate of an asynchronous step is divided by its staleness.
        compensation: λ of delay compensation; 0: none.
        clip: the global norm that the gradient of a synchronous ticket may have. As no server has all of it, a ticket
            is taken only once a client has found that norm, and told it (`clipping`).
    """

    consistency: Consistency
    staleness: int = 0
    shares: int = 1
    backup: int = 0
    staleness_aware: bool = False
    compensation: float = 0.0
    clip: float | None = None

    @property
    def shared(self) -> bool:
        """Whether all islands have a share of each ticket; a block's version is then the ticket before which it has
        all, else how many tickets it has."""
        return self.consistency != "asynchronous"


@dataclass(frozen=True)
class Plan:
    """Blocks by number, the optimiser that steps on servers, the rule, and what gradients travel as."""

    blocks: tuple[Block, ...]
    optimizer: Optimizer
    rule: Rule
    compression: Compression = field(default_factory=Compression)

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "blocks": [asdict(block) for block in self.blocks],
            "optimizer": self.optimizer.model_dump(mode="json"),
            "rule": asdict(self.rule),
            "compression": self.compression.model_dump(mode="json"),
        }

    @staticmethod
    def of(record: dict[str, Any]) -> Plan:
        """The plan that `record` gave."""
        blocks = tuple(Block.of(block) for block in record["blocks"])
        optimizer, compression = Optimizer.model_validate(record["optimizer"]), record["compression"]
        return Plan(blocks, optimizer, Rule(**record["rule"]), Compression.model_validate(compression))

    @cached_property
    def model(self) -> str:
        """What tells one model from another: a hash of all blocks."""
        text = json.dumps([asdict(block) for block in self.blocks], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def cut(name: str, shape: tuple[int, ...], dtype: str, box: Box, limit: int, itemsize: int) -> list[Block]:
    """Blocks of at most `limit` bytes, or of one row each where a row has more, that cover a box of a tensor.

    Raises:
        InputError: if the limit is none.
    """
    if limit < 1:
        raise InputError(f"blocks of {limit} bytes hold nothing", where="strategy.exchange.block_bytes")
    if not box.length or not box.volume:
        return [Block(name, shape, dtype, box.offset, box.length)] if not box.length else []
    rows = box.length[0]
    row_bytes = box.volume // rows * itemsize
    step = max(1, limit // row_bytes)
    count = -(-rows // step)
    blocks = []
    for number in range(count):  # as even as possible
        low, high = rows * number // count, rows * (number + 1) // count
        offset = (box.offset[0] + low, *box.offset[1:])
        blocks.append(Block(name, shape, dtype, offset, (high - low, *box.length[1:])))
    return blocks
