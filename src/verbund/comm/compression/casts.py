"""What the rows of an exchange of gradients travel as where nothing can be kept from step to step: as they are, or as
sixteen bits."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from verbund.comm.collectives import Group
from verbund.comm.compression.methods import codec
from verbund.comm.compression.sums import Totals
from verbund.job import CASTS, Compression


class Casts:
    """Casts of what workers send each other, who then add it up in float32.

    Args:
        settings: of the job; methods that are no casts do nothing here.
        group: the workers.
    """

    def __init__(self, settings: Compression, group: Group) -> None:
        self._codec = codec(settings) if settings.name in CASTS else None
        self._warmup = settings.exact_steps
        self._active = False
        self.totals = Totals(group.world) if self._codec is not None else None

    def begin(self, step: int, exact: bool) -> None:
        """A new step; `exact`: nothing is cast in it."""
        self._active = self._codec is not None and step >= self._warmup and not exact
        if self._active and self.totals is not None:
            self.totals.steps += 1

    def encoded(self, sent: Tensor) -> Tensor:
        """Rows of values, one for each worker, as they travel."""
        if self._codec is None or self.totals is None:
            return sent
        begun = time.monotonic()
        rows, size = sent.shape
        self.totals.bytes_without += sent.nbytes * (rows - 1) / rows
        if self._active:
            cast = torch.zeros(rows, self._codec.size(size), dtype=torch.uint8, device=sent.device)
            for values, message in zip(sent, cast, strict=True):
                for part, place in self._codec.slices(size):
                    self._codec.encode(values[part], message[place])
            sent = cast
        self.totals.bytes_with += sent.nbytes * (rows - 1) / rows
        self.totals.seconds += time.monotonic() - begun
        return sent

    def decoded(self, received: Tensor, like: Tensor) -> Tensor:
        """What came of `encoded` as values again, [rows, values] of the dtype of `like`."""
        if received.dtype != torch.uint8 or self._codec is None or self.totals is None:
            return received
        begun = time.monotonic()
        values = like.new_empty(like.shape)
        for row, message in zip(values, received, strict=True):
            for part, place in self._codec.slices(values.shape[1]):
                self._codec.decode(message[place], row[part])
        self.totals.seconds += time.monotonic() - begun
        return values
