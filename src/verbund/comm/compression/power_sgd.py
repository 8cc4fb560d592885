"""Sums of low rank: Vogels, Karimireddy and Jaggi, "PowerSGD" (2019), algorithm 1.

One step of the power iteration for the sum M of all workers' matrices, beginning with the Q of the step before:
P = M Q, made orthonormal, Q = M' P, and P Q' is what M becomes. Only P and Q are added up, those of all matrices in one
all-reduce each. Q lies transposed: reading M by rows is up to sixteen times as fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from verbund.comm.compression.sums import CompressedSums, Tensors
from verbund.comm.members import Members, Work
from verbund.randomness.hash import combine, text_key


def shrinks(shape: tuple[int, ...], rank: int, minimum_ratio: float) -> bool:
    """Whether a tensor, its first dimension against the rest, is so large a matrix that it is worth it."""
    rows, columns = as_matrix(shape)
    narrow = (rows + columns) * min(rank, rows, columns)
    return min(rows, columns) > 1 and rows * columns >= minimum_ratio * narrow


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The first dimension and all others."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


class _Matrix:
    """One tensor's views."""

    def __init__(self, name: str, stretch: Tensors, part: slice, shape: tuple[int, ...]) -> None:
        rows, columns = as_matrix(shape)
        self.name, self.stretch, self.part = name, stretch, part
        self.values = stretch.values[part].view(rows, columns)
        self.p = self.q = self.values  # views of the flat P and Q, which are made when all are known


class PowerSums(CompressedSums):
    """Compressed sums of low rank.

    Args:
        group: the workers.
        stretches: the same on all workers; every tensor is a matrix that `shrinks`.
        seed: of the first Q.
        rank: columns of P and Q.
    """

    def __init__(self, group: Members, stretches: Sequence[Tensors], seed: int, rank: int) -> None:
        super().__init__(group, stretches, seed)
        self._matrices = [
            [_Matrix(name, s, part, shape) for (name, part), shape in zip(s.parts().items(), s.shapes, strict=True)]
            for s in stretches
        ]
        every = [matrix for of_stretch in self._matrices for matrix in of_stretch]
        exact = any(matrix.values.dtype == torch.float64 for matrix in every)
        kind, device = torch.float64 if exact else torch.float32, group.device
        ranks = [min(rank, *matrix.values.shape) for matrix in every]
        self._p = torch.zeros(
            sum(m.values.shape[0] * r for m, r in zip(every, ranks, strict=True)), dtype=kind, device=device
        )
        self._q = torch.zeros(
            sum(m.values.shape[1] * r for m, r in zip(every, ranks, strict=True)), dtype=kind, device=device
        )
        at_p = at_q = 0
        for matrix, r in zip(every, ranks, strict=True):
            rows, columns = matrix.values.shape
            matrix.p = self._p[at_p : at_p + rows * r].view(rows, r)
            matrix.q = self._q[at_q : at_q + columns * r].view(r, columns)
            at_p, at_q = at_p + rows * r, at_q + columns * r
            generator = torch.Generator().manual_seed(combine(seed, text_key(matrix.name)) >> 1)
            matrix.q.copy_(torch.randn(r, columns, generator=generator, dtype=kind))
        self._every = every
        self._work: tuple[Work | None, int] = (None, 0)

    def _start(self, number: int) -> bool:
        finite = True
        for matrix in self._matrices[number]:
            matrix.stretch.load(matrix.part, self.scale)
            torch.mm(matrix.values.to(self._p.dtype), matrix.q.t(), out=matrix.p)
            # What is not finite in a row makes the product so.
            finite &= bool(matrix.p.isfinite().all())
        return finite

    def sent(self) -> bool:
        self.totals.bytes_with += self.totals.of_all_reduce(self._p.nbytes)
        self._work = (self.group.start_all_reduce(self._p), time.monotonic_ns())
        return super().sent()

    def _finish(self, take: bool) -> None:
        self._wait(*self._work)
        if not take:
            return
        before = 0.0
        for matrix in self._every:
            matrix.p.copy_(torch.linalg.qr(matrix.p)[0])
            torch.mm(matrix.p.t(), matrix.values.to(self._q.dtype), out=matrix.q)
            # What this worker's own part of the sum lacks, not what the mean lacks of its matrix: added up both are the
            # same, but in the latter the workers' differences pile up that never travel.
            error = matrix.stretch.error[matrix.part].view_as(matrix.values)
            torch.sub(matrix.values, matrix.p @ matrix.q, out=error)
            if self.scale != 1.0:
                error.div_(self.scale)
        if self.measuring:
            # P is orthonormal: what it does not span is left out.
            before = sum(float(torch.linalg.vector_norm(s.values)) ** 2 for s in self.stretches)
            self.totals.left_out += max(before - float(torch.linalg.vector_norm(self._q)) ** 2, 0.0)
        self.totals.bytes_with += self.totals.of_all_reduce(self._q.nbytes)
        arrival = time.monotonic_ns()
        self._wait(self.group.start_all_reduce(self._q), arrival)
        for matrix in self._every:
            if self._p.dtype == matrix.values.dtype:
                torch.mm(matrix.p, matrix.q, out=matrix.values)
            else:
                matrix.values.copy_(matrix.p @ matrix.q)
        if self.measuring:
            self.totals.summed += float(torch.linalg.vector_norm(self._q)) ** 2

    def warm(self) -> dict[str, Tensor]:
        return {matrix.name: matrix.q for matrix in self._every}
