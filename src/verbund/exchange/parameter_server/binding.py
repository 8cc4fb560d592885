"""The binding: which blocks a worker speaks for with the servers, and where they lie in its model.

Of what several workers of an island hold one speaks; the others get from it what it has pulled, so that all of them
compute with the same values whatever happens on the servers meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verbund.checkpoint.piece import dtype_name
from verbund.comm.collectives import Group
from verbund.exchange.parameter_server.plan import Block, Consistency, Plan, Rule, cut
from verbund.job import Exchange, Train
from verbund.mesh.changing_buffers import Buffer
from verbund.mesh.replica import Replica

_RULES: dict[str, Consistency] = {
    "bulk_synchronous": "synchronous",
    "bounded_staleness": "bounded",
    "asynchronous": "asynchronous",
}


@dataclass(frozen=True)
class _Place:
    """Where a block lies: in a parameter's rows, or in a buffer."""

    block: Block
    parameter: nn.Parameter | None
    where: tuple[slice, ...]
    buffer: Buffer | None = None

    def values(self) -> Tensor:
        """The block within the model: a view."""
        tensor = self.parameter.data if self.parameter is not None else self._buffer()
        return tensor[self.where] if self.block.shape else tensor

    def gradient(self) -> Tensor | None:
        """Its gradient, flat; None if it has none."""
        if self.parameter is None or self.parameter.grad is None:
            return None
        gradient = self.parameter.grad
        return (gradient[self.where] if self.block.shape else gradient).reshape(-1)

    def _buffer(self) -> Tensor:
        assert self.buffer is not None
        return self.buffer.get()


class Binding:
    """A worker's blocks.

    Args:
        replica: of an island of its own; its parameters must stay where they are.
        tables: what the island's tables are as blocks.
        limit: bytes of a block.
    """

    def __init__(self, replica: Replica, tables: Sequence[Block], limit: int) -> None:
        self._replica = replica
        mesh = replica.mesh
        self.speaks = mesh.place("data") == 0
        """Whether this worker speaks for its part of the model."""
        self._held = [held for held in replica.divided.trained if held.primary]
        self._buffers = [b for b in replica.buffers.averaged() if b.get().is_floating_point()]
        places = []
        for held in self._held if self.speaks else []:
            for box, where in held.spans():
                for block in cut(
                    held.name, held.shape, dtype_name(held.values.dtype), box, limit, held.values.itemsize
                ):
                    inner = tuple(
                        slice(outer.start + start - base, outer.start + start - base + size)
                        for outer, start, base, size in zip(where, block.offset, box.offset, block.length, strict=True)
                    )
                    places.append(_Place(block, held.values, inner))
        for buffer in self._buffers if mesh.place("data", "shard", "tensor") == 0 else []:
            if buffer.name in replica.divided.buffers:
                shape = tuple(buffer.get().shape)
                block = Block(buffer.name, shape, dtype_name(buffer.get().dtype), (0,) * len(shape), shape, "sum")
                places.append(_Place(block, None, tuple(slice(0, n) for n in shape), buffer))
        self._places = {(place.block.name, place.block.offset): place for place in places}
        self._tables = list(tables)
        self.numbers: list[int] = []
        """Of this worker's dense and sum blocks, in the plan."""
        self._bound: list[_Place] = []
        self._before: dict[int, Tensor] = {}
        self._aside: dict[int, Tensor] = {}
        self._targets: dict[int, Tensor] | None = None

    def plan(self, settings: Exchange, train: Train, islands: int) -> Plan:
        """The plan of the whole model; all workers of the island call it together.

        Args:
            settings: of the exchange.
            train: says by which optimiser servers step, and to which norm they clip shares that they have added up.
            islands: that there are at the beginning.
        """
        own = [asdict(place.block) for place in self._places.values()]
        raw = np.frombuffer(json.dumps(own).encode(), np.uint8)
        rows = self._replica.groups.island.all_gather_arrays({"blocks": raw}, "the gathering of blocks")
        blocks = [Block.of(record) for row in rows for record in json.loads(row["blocks"].tobytes())]
        blocks += self._tables
        rule = Rule(
            _RULES[settings.consistency],
            settings.bound,
            islands if settings.divided else 1,
            settings.backup,
            settings.staleness_aware,
            settings.delay_compensation,
            train.clip_norm if settings.consistency == "bulk_synchronous" and islands > 1 else None,
        )
        blocks.sort(key=lambda b: (b.name, b.offset))
        plan = Plan(tuple(blocks), train.optimizer, rule, settings.compression)
        for number, block in enumerate(plan.blocks):
            if (place := self._places.get((block.name, block.offset))) is not None:
                self.numbers.append(number)
                self._bound.append(place)
        return plan

    # -- values --------------------------------------------------------------------------------------------------

    def read(self) -> list[tuple[int, Tensor]]:
        """The model's values of this worker's blocks, flat, by number."""
        return [(n, place.values().reshape(-1)) for n, place in zip(self.numbers, self._bound, strict=True)]

    def targets(self) -> dict[int, Tensor]:
        """Flat memory by number into which this worker's blocks are pulled: that of the model itself where it is
        contiguous."""
        if self._targets is None or self._replica.shards is not None:  # whose rows come and go
            self._targets = {}
            for number, place in zip(self.numbers, self._bound, strict=True):
                values = place.values()
                if values.is_contiguous() and place.buffer is None:
                    self._targets[number] = values.view(-1)
                else:
                    aside = self._aside.setdefault(number, torch.empty(place.block.count, dtype=values.dtype))
                    self._targets[number] = aside
        return self._targets

    @torch.no_grad()
    def pulled(self) -> None:
        """What was pulled into `targets` becomes the model's; all workers of the island call it."""
        for number, place in zip(self.numbers, self._bound, strict=True):
            if (aside := self._aside.get(number)) is not None:
                values = place.values()
                values.copy_(aside.view(values.shape))
        self._spread()

    @torch.no_grad()
    def remember_buffers(self) -> None:
        """What running statistics change from now on is what they have learnt from one ticket."""
        for number, place in zip(self.numbers, self._bound, strict=True):
            if place.buffer is not None:
                self._before[number] = place.values().clone()

    def gradients(self, share: float) -> list[tuple[int, Tensor | None]]:
        """What a ticket has given for each of this worker's blocks, by number: gradients, and of running statistics
        their change times `share`, this island's part of the ticket."""
        found: list[tuple[int, Tensor | None]] = []
        for number, place in zip(self.numbers, self._bound, strict=True):
            if place.buffer is None:
                found.append((number, place.gradient()))
            else:
                found.append((number, ((place.values() - self._before[number]) * share).reshape(-1)))
        return found

    def _spread(self) -> None:
        """Tensors that several workers of the island hold get the values of the one that speaks for them."""
        groups, replica = self._replica.groups, self._replica
        if groups.island.world == 1:
            return
        if groups.data.world > 1:
            _broadcast([held.values.data for held in self._held], groups.data)
        if groups.batch.world > 1:
            _broadcast([buffer.get() for buffer in self._buffers], groups.batch)
        if groups.tensor.world > 1:
            whole = [held.values.data for held in replica.divided.trained if held.tensor_cut is None]
            _broadcast(whole, groups.tensor)
        for group, tied in replica.divided.tied:
            _broadcast([held.values.data for held in tied], group)


def _broadcast(tensors: list[Tensor], group: Group) -> None:
    """All members get the first one's values."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for members in by_type.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        if group.rank:
            flat.zero_()
        group.all_reduce(flat, "the handing on of pulled parameters")
        if group.rank:
            parts: Any = torch.split(flat, [tensor.numel() for tensor in members])
            torch._foreach_copy_(members, [p.view(t.shape) for p, t in zip(parts, members, strict=True)])
