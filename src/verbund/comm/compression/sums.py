"""Sums of flat stretches of memory over workers, compressed, with error feedback.

Each worker sends what it has plus what it could not send before, and keeps the difference between that and what the
others received of it. So nothing is lost; it comes later. All workers end up with the same bits.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verbund.comm.members import Members, Work

MEASURED_EVERY = 10
"""Compressed steps of which one is measured: how much was left out."""
_WHAT = "the compressed sum of the gradients"


@dataclass(frozen=True)
class Stamps:
    """When a collective was launched, when this worker had nothing but it to wait for, and when it was there (ns)."""

    arrival: int
    blocked: int
    done: int


@dataclass
class Totals:
    """What compression has come to on this worker.

    Args:
        workers: those who add up together; 0: each pushes its own, and no two do the same steps.
        steps: compressed ones.
        bytes_without: what the workers' all-reduces would have sent from here, by the size of what they were handed.
        bytes_with: what was sent from here, counted alike.
        seconds: computing for it, without waiting.
        left_out: squares of what was left out, added up over the measured steps; a share of the sum's error.
        summed: squares of the sums that came of it, over the same steps.
    """

    workers: int = 1
    steps: int = 0
    bytes_without: float = 0.0
    bytes_with: float = 0.0
    seconds: float = 0.0
    left_out: float = 0.0
    summed: float = 0.0

    def of_all_reduce(self, size: int) -> float:
        """Bytes that a worker sends in an all-reduce of `size` bytes."""
        return 2.0 * size * (self.workers - 1) / self.workers

    def plain(self, size: int) -> None:
        """So many bytes were added up as they are."""
        self.bytes_without += self.of_all_reduce(size)
        self.bytes_with += self.of_all_reduce(size)


@dataclass
class Tensors:
    """One flat stretch and the tensors in it.

    Args:
        flat: what is added up; gets the sum.
        names: of the tensors that lie in it one after the other.
        shapes: theirs, the dimensions in the order in which they lie in memory.
    """

    flat: Tensor
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    error: Tensor = field(init=False)
    """What was not sent yet, of the unscaled gradients."""
    values: Tensor = field(init=False)
    """Memory to compute in: `flat` itself unless its type is too coarse."""

    def __post_init__(self) -> None:
        exact = self.flat.dtype in (torch.float32, torch.float64)
        self.values = self.flat if exact else torch.empty_like(self.flat, dtype=torch.float32)
        self.error = torch.zeros_like(self.values)

    def load(self, part: slice, scale: float) -> Tensor:
        """What is to be sent of a part: what is there, and what was not sent before."""
        values = self.values[part]
        if self.values is not self.flat:
            values.copy_(self.flat[part])
        return values.add_(self.error[part], alpha=scale)

    def parts(self) -> dict[str, slice]:
        """Where each tensor lies."""
        found, at = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            found[name] = slice(at, at + math.prod(shape))
            at += math.prod(shape)
        return found


class CompressedSums(ABC):
    """Adds up stretches over the workers of a group. In each step `begin`, `start` for each stretch as soon as it is
    complete, the same order on all workers, `sent`, and `finish`.

    Args:
        group: the workers.
        stretches: the same on all workers.
        seed: of all that is drawn.
    """

    def __init__(self, group: Members, stretches: Sequence[Tensors], seed: int) -> None:
        self.group, self.stretches, self.seed = group, list(stretches), seed
        self.totals = Totals(group.world)
        self.stamps: list[Stamps] = []
        self.step, self.scale, self.measuring = 0, 1.0, False
        self._finite = True

    def begin(self, step: int, scale: float) -> None:
        """A new step.

        Args:
            step: its number.
            scale: of the gradients, by which what was left out before is multiplied.
        """
        self.step, self.scale = step, scale
        self.stamps = []
        self.measuring = self.totals.steps % MEASURED_EVERY == 0
        self.totals.steps += 1
        self._finite = True

    def start(self, number: int) -> None:
        """Stretch `number` is complete."""
        begun = time.monotonic()
        self.totals.bytes_without += self.totals.of_all_reduce(self.stretches[number].flat.nbytes)
        self._finite &= self._start(number)
        self.totals.seconds += time.monotonic() - begun

    def sent(self) -> bool:
        """All stretches were started; whether all that this worker had was finite."""
        return self._finite

    def finish(self, take: bool, finite: bool, unused: set[str]) -> None:
        """Waits, and leaves the sums in the stretches.

        Args:
            take: whether the step is to be taken; if not, nothing counts as sent.
            finite: whether what all workers had was; if not, the sums are NaN.
            unused: tensors whose sums nobody wants: nothing of theirs counts as sent.
        """
        begun, waited = time.monotonic(), sum(s.done - s.blocked for s in self.stamps)
        kept = [
            (stretch.error[part], stretch.values[part].div(self.scale))
            for stretch in self.stretches
            for name, part in stretch.parts().items()
            if name in unused
        ]
        self._finish(take and finite)
        for stretch in self.stretches:
            if not finite:
                stretch.flat.fill_(math.nan)
            elif stretch.values is not stretch.flat:
                stretch.flat.copy_(stretch.values)
        if take and finite:
            for error, values in kept:
                error.copy_(values)
        waited = sum(s.done - s.blocked for s in self.stamps) - waited
        self.totals.seconds += time.monotonic() - begun - waited / 1e9

    @abstractmethod
    def _start(self, number: int) -> bool:
        """Loads a stretch that is complete, and begins to send it; whether all of it is finite."""

    @abstractmethod
    def _finish(self, take: bool) -> None:
        """Waits for what is under way. If the step is taken, `values` become sums, and `error` what was left out."""

    def _wait(self, work: Work | None, arrival: int) -> None:
        blocked = time.monotonic_ns()
        self.group.finish(work, _WHAT)
        self.stamps.append(Stamps(arrival, blocked, time.monotonic_ns()))

    def errors(self) -> dict[str, Tensor]:
        """What of each tensor was not sent yet, flat; to save and restore."""
        return {name: s.error[part] for s in self.stretches for name, part in s.parts().items()}

    def warm(self) -> dict[str, Tensor]:
        """What else is kept from step to step, the same on all workers."""
        return {}
