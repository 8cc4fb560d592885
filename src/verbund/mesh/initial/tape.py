"""What a recording consists of: storages by number, boxes of them, and operations upon them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class NotRecordable(Exception):
    """A constructor that cannot be recorded; the message says why. The ordinary construction is the way out."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor by its storage's number and its geometry there. Views of one storage differ in geometry alone."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False

    @staticmethod
    def of(tensor: Tensor, storage: int) -> Ref:
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return Ref(storage, tensor.dtype, size, stride, int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg())

    def span(self) -> tuple[int, int]:
        """The first byte and the one past the last."""
        if 0 in self.size:
            return 0, 0
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize

    def is_dense(self) -> bool:
        """Whether its elements fill its span, each once."""
        expected = 1
        for step, n in sorted(zip(self.stride, self.size, strict=True)):
            if n != 1:
                if step != expected:
                    return False
                expected *= n
        return True

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """This tensor, upon `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.neg else tensor

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` has this geometry; the strides of dimensions of size 1 mean nothing."""
        if tensor.dtype != self.dtype or tuple(tensor.size()) != self.size or tensor.storage_offset() != self.offset:
            return False
        if tensor.is_conj() != self.conj or tensor.is_neg() != self.neg:
            return False
        pairs = zip(self.size, self.stride, tensor.stride(), strict=True)
        return 0 in self.size or all(n == 1 or a == b for n, a, b in pairs)


@dataclass(frozen=True, slots=True)
class Draw:
    """That an operation draws random numbers."""

    generator: torch.Generator
    number: int
    """Counts the draws of all generators."""
    start: int | Tensor | None
    """The state it begins with: that after the draw of a number, a given one, or where the generator stands."""


@dataclass(slots=True, eq=False)
class Operation:
    """One call: what it reads, what it changes, and the storages it makes."""

    call: Callable[..., Any]
    arguments: list[Any]
    """Tensors are `Ref`s here, at any depth of lists."""
    named: dict[str, Any]
    reads: list[Ref]
    writes: list[Ref]
    made: list[Ref | None]
    """For each tensor it returns: the storage it is the first of, or None."""
    overwrites: bool
    """It does not read what it writes."""
    draw: Draw | None = None
    default: torch.dtype = field(default_factory=torch.get_default_dtype)
    """What torch made of numbers without a type at that time."""
    touched: list[Ref] = field(init=False)
    """All that it writes or makes."""

    def __post_init__(self) -> None:
        self.touched = self.writes + [ref for ref in self.made if ref is not None]

    def replaces(self, storage: int, nbytes: int) -> bool:
        """Whether nothing of what was in `storage` remains."""
        if any(ref is not None and ref.storage == storage for ref in self.made):
            return True
        whole = any(w.storage == storage and w.span() == (0, nbytes) and w.is_dense() for w in self.writes)
        return whole and self.overwrites and all(ref.storage != storage for ref in self.reads)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def flat_refs(value: Any) -> list[Ref]:
    """All references in arguments."""
    if isinstance(value, Ref):
        return [value]
    return [ref for item in value for ref in flat_refs(item)] if isinstance(value, (list, tuple)) else []


def convert(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """`value` with everything of class `kind` replaced, at any depth of lists; tuples become lists."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [convert(item, kind, function) for item in value]
    return value
