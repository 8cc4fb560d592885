"""Activations and their gradients between neighbouring stages."""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from verbund.comm.collectives import Group, Work
from verbund.errors import TaskError

_TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MOST_TENSORS = 16
_MOST_DIMENSIONS = 6
_WIDTH = 3 + _MOST_DIMENSIONS  # dtype, needs a gradient, dimensions, sizes
_NOTHING = -1
_IN_FLIGHT = 64


class Transfer:
    """Messages of tensors to the other workers of the axis `pipeline`. A header of shapes goes before the values.

    Args:
        group: the workers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._flying: deque[tuple[Work | None, Tensor]] = deque()

    def send(self, tensors: list[Tensor | None], to: int, tag: int) -> None:
        """Starts sending; returns at once unless very much is under way."""
        if len(tensors) > _MOST_TENSORS:
            raise TaskError(
                f"{len(tensors)} tensors go from one pipeline stage to the next; at most {_MOST_TENSORS} can",
                where="strategy.mesh.pipeline",
                fix="Choose other cut points by `pipeline_plan()`",
            )
        header = torch.full((1 + _MOST_TENSORS * _WIDTH,), _NOTHING, dtype=torch.int64)
        header[0] = len(tensors)
        values: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if tensor.dim() > _MOST_DIMENSIONS or tensor.dtype not in _TYPES:
                raise TaskError(
                    f"a tensor of {tensor.dim()} dimensions of {tensor.dtype} cannot go from one stage to the next",
                    where="strategy.mesh.pipeline",
                    fix="Choose other cut points by `pipeline_plan()`",
                )
            row = [_TYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
            header[1 + index * _WIDTH : 1 + index * _WIDTH + len(row)] = torch.tensor(row)
            if tensor.numel():
                values.append(tensor.detach().contiguous())
        for number, value in enumerate([header, *values]):
            self._flying.append((self._group.start_send(_plain(value), to, tag + number), value))
        while len(self._flying) > _IN_FLIGHT:
            self._land()

    def receive(self, source: int, tag: int, what: str) -> tuple[list[Tensor | None], tuple[int, int]]:
        """Waits for a message.

        Returns:
            Its tensors, which require a gradient where the sent ones did, and the nanoseconds between which this
            worker was blocked.
        """
        start = time.monotonic_ns()
        header = torch.empty(1 + _MOST_TENSORS * _WIDTH, dtype=torch.int64)
        self._group.receive(header, source, tag, what)
        count, *rows = header.tolist()
        tensors: list[Tensor | None] = []
        number = 0
        for index in range(count):
            kind, grad, dimensions, *sizes = rows[index * _WIDTH : (index + 1) * _WIDTH]
            if kind == _NOTHING:
                tensors.append(None)
                continue
            value = torch.empty(sizes[:dimensions], dtype=_TYPES[kind], device=self._group.device)
            if value.numel():
                number += 1
                self._group.receive(_plain(value), source, tag + number, what)
            tensors.append(value.requires_grad_(bool(grad)))
        return tensors, (start, time.monotonic_ns())

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        work, _ = self._flying.popleft()
        self._group.finish(work, "the sending of activations")


def tag(stage: int, micro_batch: int, backward: bool) -> int:
    """A number for the messages between `stage` and the one before it."""
    return ((stage * 2 + int(backward)) * 4096 + micro_batch % 4096) * (_MOST_TENSORS + 1)


def _plain(tensor: Tensor) -> Tensor:
    """As a type that every backend moves."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bool, torch.bfloat16, torch.int16) else tensor
