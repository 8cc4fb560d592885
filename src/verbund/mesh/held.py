"""What a process holds of a global parameter, however the mesh cuts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from verbund.checkpoint.box import Box
from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.errors import InputError


@dataclass(frozen=True)
class Cut:
    """A tensor divided along one dimension among workers.

    Args:
        dim: the dimension.
        sections: sizes of what lies one after the other along it and is divided each for itself, e.g. query, key and
            value in one matrix.
        units: what is never divided, e.g. heads: each worker gets a run of them, as even as possible.
        worker: which share is meant.
        workers: how many there are.
    """

    dim: int
    sections: tuple[int, ...]
    units: int
    worker: int
    workers: int

    def ranges(self, worker: int | None = None) -> list[tuple[int, int]]:
        """The half-open range along `dim` that a worker (default: this one) holds of each section."""
        worker = self.worker if worker is None else worker
        low, high = self.units * worker // self.workers, self.units * (worker + 1) // self.workers
        found, start = [], 0
        for size in self.sections:
            unit = size // self.units
            found.append((start + low * unit, start + high * unit))
            start += size
        return found

    def length(self, worker: int | None = None) -> int:
        """Elements along `dim` that a worker holds."""
        return sum(high - low for low, high in self.ranges(worker))

    def share(self, whole: Tensor) -> Tensor:
        """This worker's share of a tensor, contiguous memory of its own."""
        parts = [whole.narrow(self.dim, low, high - low) for low, high in self.ranges()]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone()


def become(tensor: Tensor, other: Tensor) -> None:
    """Gives a tensor the memory and device of another, for all who hold it."""
    torch._C._swap_tensor_impl(tensor, other.detach().requires_grad_(tensor.requires_grad))


def cut(name: str, size: int, dim: int, parts: int | list[int], units: int | None, worker: int, workers: int) -> Cut:
    """Checks that a dimension of `size` can be cut so.

    Raises:
        InputError: naming the module and what would work.
    """
    sections = tuple(parts) if isinstance(parts, list) else (size // parts,) * parts
    if sum(sections) != size:
        raise InputError(
            f"`{name}` has {size} elements along dimension {dim}, its parts are {list(sections)}",
            where="tensor_plan()",
            fix="The parts must add up to the size",
        )
    count = units or min(sections)
    if any(section % count for section in sections):
        raise InputError(
            f"`{name}` has parts of {list(sections)} elements, which are not {count} units of equal size",
            where="tensor_plan()",
            fix="`units` must divide every part",
        )
    if count < workers:
        raise InputError(
            f"`{name}` has {count} units along dimension {dim}, which cannot be divided among {workers} workers",
            where="strategy.mesh.tensor",
            fix=f"Use tensor={count} or less",
        )
    return Cut(dim, sections, count, worker, workers)


@dataclass
class Held:
    """One global parameter as this process holds it.

    Args:
        name: the global name; of tied parameters the first.
        shape: the global shape.
        parameter: what the model computes with. Under the axis `shard` its memory comes and goes.
        values: what is trained here: `parameter` itself, or this worker's rows of it.
        tensor_cut: how the axis `tensor` cut it, if it did.
        rows: under the axis `shard`, the half-open range of rows of the (cut) parameter in `values`.
        primary: whether this process speaks for it among those of its data replica that hold the same: in a norm,
            in a save.
        stages: pipeline places that hold it; more than one for tied parameters.
    """

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    values: nn.Parameter
    tensor_cut: Cut | None = None
    rows: tuple[int, int] | None = None
    primary: bool = True
    stages: tuple[int, ...] = (0,)
    partial: bool = field(default=False)
    """Whether each worker of the axis `tensor` has only its part of the gradient, though all hold the whole value."""

    def spans(self) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """Boxes of the global tensor, and where each lies in `values`."""
        boxes = list(self._cut_boxes())
        if self.rows is None:
            yield from boxes
            return
        low, high = self.rows
        if self.shape and not self.shape[0]:  # every worker has all of nothing
            yield from boxes
            return
        if not self.shape:
            if high > low:
                yield from boxes
            return
        if not self.shape[0]:
            yield from boxes  # of nothing, but under its name: a checkpoint has it too
            return
        for box, place in boxes:
            first = place[0].start
            start, end = max(low, first), min(high, first + box.length[0])
            if start < end:
                offset = (box.offset[0] + start - first, *box.offset[1:])
                length = (end - start, *box.length[1:])
                yield Box(offset, length), (slice(start - low, end - low), *place[1:])

    def _cut_boxes(self) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        if self.tensor_cut is None:
            yield Box.whole(self.shape), tuple(slice(0, size) for size in self.shape)
            return
        dim, at = self.tensor_cut.dim, 0
        for low, high in self.tensor_cut.ranges():
            offset = tuple(low if d == dim else 0 for d in range(len(self.shape)))
            length = tuple(high - low if d == dim else size for d, size in enumerate(self.shape))
            place = tuple(slice(at, at + high - low) if d == dim else slice(0, n) for d, n in enumerate(self.shape))
            yield Box(offset, length), place
            at += high - low

    def pieces(self, kind: str, name: str, values: Tensor, owner: bool) -> Iterator[Piece]:
        """`values`, of the shape of this process's share, as pieces of the global tensor."""
        for box, place in self.spans():
            part = values if not self.shape else values[place]
            yield Piece(kind, name, self.shape, values.dtype, box.offset, box.length, part, owner)

    def fill(self, values: Tensor, checkpoint: Checkpoint, kind: str, name: str) -> None:
        """Reads what `pieces` gave, of any division, into `values`, of the shape of this process's share."""
        for box, place in self.spans():
            part = values if not self.shape else values[place]
            part.copy_(checkpoint.read(kind, name, box.offset, box.length))

    def sharded(self, values: nn.Parameter, rows: tuple[int, int]) -> Held:
        """The same parameter, of which this process trains some rows."""
        return replace(self, values=values, rows=rows)
