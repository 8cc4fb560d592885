"""A piece: a box of a global tensor, with its values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from verbund.checkpoint.box import Box
from verbund.checkpoint.manifest import DTYPES, KINDS
from verbund.checkpoint.sparse import Filler, whole_rows


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as `float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one process holds of a global tensor.

    Args:
        kind: one of `KINDS`: parameters, buffers, optimizer, ema, gradients, exchange.
        name: the global name, e.g. `layer.weight`; of optimiser state `layer.weight/exp_avg`.
        shape: the global shape.
        dtype: that of the global tensor and of `values`.
        offset: where the box begins, per dimension.
        length: how long the box is, per dimension.
        values: shape `length`, on any device; of a sparse piece [rows, …].
        owner: whether this process counts it. Of a replicated or tied piece exactly one process is the owner.
        rows: of a sparse piece, whose box has whole rows: which of them `values` has, by their numbers in the global
            tensor, int64, ascending, each once. None: it has all.
        filler: what the others hold.

    Raises:
        ValueError: if the parts do not fit together.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    length: tuple[int, ...]
    values: Tensor
    owner: bool = True
    rows: Tensor | None = None
    filler: Filler = field(default_factory=Filler)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"`{self.kind}` is no kind of piece; known: {', '.join(KINDS)}")
        if dtype_name(self.dtype) not in DTYPES:
            raise ValueError(f"{self.kind} `{self.name}` has the dtype {self.dtype}, which cannot be saved")
        stored = self.length if self.rows is None else (len(self.rows), *self.length[1:])
        if self.values.dtype != self.dtype or tuple(self.values.shape) != tuple(stored):
            raise ValueError(
                f"{self.kind} `{self.name}` is said to be {self.dtype} {list(stored)}, "
                f"its values are {self.values.dtype} {list(self.values.shape)}"
            )
        if not self.box.inside(self.shape):
            raise ValueError(f"{self.kind} `{self.name}`: the box {self.box} lies outside of {list(self.shape)}")
        if self.rows is not None and not whole_rows(self.box, tuple(self.shape)):
            raise ValueError(f"{self.kind} `{self.name}`: the box {self.box} does not have whole rows")

    @staticmethod
    def whole(kind: str, name: str, values: Tensor, owner: bool = True) -> Piece:
        """A tensor that this process holds whole."""
        shape = tuple(values.shape)
        return Piece(kind, name, shape, values.dtype, (0,) * len(shape), shape, values, owner)

    @property
    def box(self) -> Box:
        return Box(tuple(self.offset), tuple(self.length))
