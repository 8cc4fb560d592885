"""Compressed pushes of one worker, and what they have left out: error feedback (see `comm.compression`).

Of each block what was left out so far is added to what a ticket has taught, v = g + e, and of that the message C(v) is
pushed: e becomes v − C(v). So nothing is lost, it comes later. Nothing of a message that came too late to be used
counts as sent.

A ticket that other processes may have pushed before, as they were lost, travels as it is, and neither uses nor changes
what is kept: servers take one of the two pushes, whichever came first, and nobody here can know which. What a lost
process had kept is lost with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.comm.compression.codec import Codec
from verbund.comm.compression.sums import MEASURED_EVERY, Totals
from verbund.exchange.parameter_server.coded import codec_of, decode, encode
from verbund.exchange.parameter_server.plan import Block, Plan
from verbund.exchange.parameter_server.push import Outcome, Part
from verbund.mesh.compression import ERROR, KIND
from verbund.randomness.hash import combine


class CompressedPushes:
    """What one worker pushes.

    Args:
        plan: of the run, which says by what pushes are compressed.
        share: of each ticket that is this worker's island's.
        seed: of what is drawn.
    """

    def __init__(self, plan: Plan, share: int, seed: int) -> None:
        self.totals = Totals()
        self.errors: dict[int, Tensor] = {}
        """By block what was left out so far, flat: of the gradients as they are used, before they are weighted."""
        self._plan, self._share, self._seed = plan, share, seed
        self._left: dict[int, Tensor] = {}
        """What messages under way leave out."""

    def encoded(self, ticket: int, parts: Sequence[Part], factor: float | None, again: bool = False) -> list[Part]:
        """Parts of a push with the messages that they travel as; `settle` must follow.

        Args:
            ticket: its number.
            parts: what it has taught.
            factor: what their values are multiplied by to be gradients; None: they teach nothing.
            again: whether other processes may have pushed it.
        """
        begun = time.monotonic()
        exact = again or ticket < self._plan.compression.exact_steps
        usable = factor is not None and math.isfinite(factor) and factor != 0.0
        if not self.keeps or not usable:
            return list(parts)
        assert factor is not None
        measures = not exact and self.totals.steps % MEASURED_EVERY == 0
        self.totals.steps += not exact
        found = []
        for part in parts:
            if part.values is None or self._plan.blocks[part.block].kind == "sum":
                found.append(part)
                continue
            codec = None if exact else codec_of(self._plan, part.block, len(part.values))
            made = part if codec is None else self._encoded(codec, ticket, part, part.values, factor, measures)
            self.totals.bytes_without += part.values.nbytes
            self.totals.bytes_with += part.values.nbytes if made.message is None else made.message.nbytes
            found.append(made)
        self.totals.seconds += time.monotonic() - begun
        return found

    def settle(self, parts: Sequence[Part], outcomes: Sequence[Outcome]) -> None:
        """Servers have taken a push.

        Args:
            parts: as `encoded` gave them.
            outcomes: of each.
        """
        for part, outcome in zip(parts, outcomes, strict=True):
            left = self._left.pop(part.block, None)
            if left is not None and outcome.state != "late":
                self.errors[part.block] = left

    @property
    def keeps(self) -> bool:
        """Whether anything is left out that is kept between steps."""
        return self._plan.compression.name != "none"

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def pieces(self, mine: Sequence[int], place: int, of: int) -> Iterator[Piece]:
        """What is kept, under the names by which a mesh keeps what its workers have left out.

        Args:
            mine: the blocks that this worker speaks for.
            place: of its island among those that keep something.
            of: how many these are.
        """
        for number, block in self._kept(mine):
            kept = self.errors.get(number)
            values = torch.zeros(block.count, dtype=_exact(block)) if kept is None else kept
            shape, offset, length = (of, *block.shape), (place, *block.offset), (1, *block.length)
            yield Piece(KIND, ERROR + block.name, shape, values.dtype, offset, length, values.view(length))

    def load(self, checkpoint: Checkpoint, mine: Sequence[int], island: int, islands: int) -> None:
        """Takes up what was kept when a checkpoint was saved; of others than there are now an even share of it all.

        Args:
            checkpoint: of any strategy.
            mine: see `pieces`.
            island: whose worker this is.
            islands: how many there are.
        """
        saved = set(checkpoint.names(KIND))
        for number, block in self._kept(mine):
            if (name := ERROR + block.name) not in saved:
                continue
            former = checkpoint.shape(KIND, name)[0]
            sources = [island] if former == islands else range(former)
            total = torch.zeros(block.length, dtype=torch.float64)
            for source in sources:
                total += checkpoint.read(KIND, name, (source, *block.offset), (1, *block.length))[0]
            share = total if former == islands else total / islands
            self.errors[number] = share.to(_exact(block)).reshape(-1)

    def _kept(self, mine: Sequence[int]) -> Iterator[tuple[int, Block]]:
        """Of these blocks those of tensors of which anything is left out."""
        dense = [(number, block) for number, block in enumerate(self._plan.blocks) if block.kind == "dense"]
        names = {block.name for number, block in dense if codec_of(self._plan, number, block.count) is not None}
        for number in mine:
            block = self._plan.blocks[number]
            if block.kind == "dense" and block.name in names:
                yield number, block

    # -- messages ------------------------------------------------------------------------------------------------

    def _encoded(self, codec: Codec, ticket: int, part: Part, values: Tensor, factor: float, measures: bool) -> Part:
        block = self._plan.blocks[part.block]
        kept = self.errors.get(part.block)
        wanted = values.to(_exact(block))
        if kept is not None:
            wanted = torch.add(wanted, kept, alpha=1.0 / factor)
        message = encode(codec, wanted, combine(self._seed, ticket, self._share, part.block))
        said = decode(codec, message, len(values), values.dtype)
        if block.kind != "rows":
            self._left[part.block] = torch.sub(wanted, said).mul_(factor)
        if measures:
            self.totals.left_out += (float(torch.linalg.vector_norm(wanted - said)) * factor) ** 2
            self.totals.summed += (float(torch.linalg.vector_norm(said.float())) * factor) ** 2
        return replace(part, values=said, message=message)


def _exact(block: Block) -> torch.dtype:
    """Of what is kept of a block."""
    return torch.float64 if block.dtype == "float64" else torch.float32
