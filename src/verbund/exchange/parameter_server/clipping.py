"""Clipping a ticket whose shares servers add up: its norm is known once all blocks have the shares that count.

A client asks every server for the squares of what its blocks have added up, and tells all servers the norm, upon which
they take the ticket. All islands do so, as each of them may be lost in between: who comes second finds the norm where
the ticket has been taken, so that all blocks are clipped by the same. With `backup` a block counts the shares that come
first, as many as it waits for, and the norm is that of their sum; what comes while it waits for the norm is late.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verbund.errors import InputError
from verbund.exchange.parameter_server.asked import whole, wholes
from verbund.exchange.parameter_server.plan import Plan


@dataclass(frozen=True)
class Clipping:
    """A ticket's gradient has this global norm: its blocks are clipped by it, and take the ticket.

    Args:
        ticket: which.
        norm: of the mean gradient over all blocks of the model.
        blocks: their numbers.
    """

    ticket: int
    norm: float
    blocks: Sequence[int]

    def fields(self) -> dict[str, Any]:
        """As JSON values."""
        return {"ticket": self.ticket, "norm": self.norm, "blocks": list(self.blocks)}

    def of_blocks(self, blocks: Container[int]) -> Clipping:
        """The same, for these blocks alone."""
        return replace(self, blocks=[block for block in self.blocks if block in blocks])

    @staticmethod
    def of(fields: Mapping[str, Any], plan: Plan) -> Clipping:
        """What `fields` gave.

        Raises:
            InputError: if it is none.
        """
        norm, blocks = fields.get("norm"), wholes(fields, "blocks", len(plan.blocks))
        if type(norm) is not float or not norm >= 0.0:  # infinite where a sum overflows: then nothing is left of it
            raise InputError(f"`norm` of a ticket is a number from 0, not {norm!r}")
        if len(set(blocks)) < len(blocks):
            raise InputError("a clipping names a block twice")
        return Clipping(whole(fields, "ticket"), norm, blocks)


@dataclass(frozen=True)
class Square:
    """What a server knows of one block's part of a ticket's norm.

    Args:
        value: the square of the norm of the block's mean gradient; None: the block has taken the ticket.
        norm: by which it has taken it; None where it has not, or has taken later ones since.
    """

    value: float | None
    norm: float | None = None


def norm_of(squares: Sequence[Square]) -> float | None:
    """The global norm of a ticket, of what is known of all blocks in order; None if all have taken it long ago."""
    told = [square.norm for square in squares if square.norm is not None]
    if told:
        return told[0]
    if any(square.value is None for square in squares):
        return None
    return math.sqrt(math.fsum(square.value for square in squares if square.value is not None))
