"""What geometry an operation's results have, without computing them.

Torch answers that on the meta device. But most of its answers are written in Python, and the first that is asked for
imports symbolic algebra and a compiler, which takes two seconds. So the CPU's own kernel is asked where that costs next
to nothing: on the same arguments if they are small, else, where each number of the result comes from one number of each
argument, on tensors of the same order of strides but two numbers a dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verbund.mesh.initial.signature import Signature
from verbund.mesh.initial.tape import Ref, convert, flat_refs, tensors

_META = torch.device("meta")
_SMALL_BYTES = 2**24
# On the meta device these are not written in Python.
_CHEAP = frozenset(("clone", "_to_copy", "zeros", "ones", "full"))
# These take a size and fill it at random.
_OF_SIZE = frozenset(("rand", "randn"))


def results(
    function: Any,
    traits: Signature,
    arguments: list[Any],
    named: dict[str, Any],
    meta: Callable[[Ref], Tensor],
) -> Any:
    """What `function` returns, with tensors on the meta device; fresh ones have storages of their own.

    Args:
        function: an operation of the dispatcher.
        traits: its signature.
        arguments: positional ones; tensors are references.
        named: the others.
        meta: gives the tensor on the meta device that a reference stands for.
    """
    if traits.like or traits.name in _OF_SIZE:
        named = {key: value for key, value in named.items() if key != "generator"}
        function, arguments = getattr(torch.ops.aten, "empty_like" if traits.like else "empty"), arguments[:1]
    refs = flat_refs([arguments, list(named.values())])
    on_meta = traits.views or traits.reshapes or traits.random or traits.empty or traits.name in _CHEAP
    if (traits.like or not on_meta) and not any(ref.conj or ref.neg for ref in refs):
        found = None
        if sum(high - low for low, high in map(Ref.span, refs)) + _asked(arguments) <= _SMALL_BYTES:
            found = _tried(function, arguments, named, _same, _as_it_is)
        elif refs and (traits.pointwise or traits.like):
            shape = _broadcast([ref.size for ref in refs])
            found = _tried(function, arguments, named, _tiny, lambda tensor: _grown(tensor, shape))
        if found is not None:
            return found
    named = {key: convert(value, Ref, meta) for key, value in named.items()}
    if traits.has_device:
        named["device"] = _META
    if "generator" in named:
        named["generator"] = None
    return function(*convert(arguments, Ref, meta), **named)


def _broadcast(sizes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The size that these have together. Torch's own function of this kind imports much."""
    dims = max(map(len, sizes))
    full = [(1,) * (dims - len(size)) + size for size in sizes]
    return tuple(next((n for n in column if n != 1), 1) for column in zip(*full, strict=True))


def _asked(value: Any) -> int:
    """At most so many bytes a factory makes, going by the numbers it gets."""
    if isinstance(value, (list, tuple)):
        return math.prod(max(1, _asked(item)) for item in value)
    return 8 * int(abs(value)) if isinstance(value, (int, float)) and math.isfinite(value) else 1


def _tried(
    function: Any,
    arguments: list[Any],
    named: dict[str, Any],
    stand_in: Callable[[Ref], Tensor],
    outline: Callable[[Tensor], Tensor | None],
) -> Any:
    """The results on the meta device according to the CPU's kernel; None if it does not tell."""
    made: dict[int, Tensor] = {}

    def given(ref: Ref) -> Tensor:
        return made.setdefault(id(ref), stand_in(ref))

    try:
        found = function(*convert(arguments, Ref, given), **{k: convert(v, Ref, given) for k, v in named.items()})
    except Exception:
        # The numbers of a stand-in need not suit the operation.
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in made.values()}
    flat = list(tensors(found))
    own = {tensor.untyped_storage()._cdata for tensor in flat}
    if own & storages or len(own) < len(flat):
        return None
    outlines = {id(tensor): outline(tensor) for tensor in flat}
    if any(drawn is None for drawn in outlines.values()):
        return None
    return convert(found, Tensor, lambda tensor: outlines[id(tensor)])


def _same(ref: Ref) -> Tensor:
    return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype).zero_()


def _as_it_is(tensor: Tensor) -> Tensor | None:
    if tensor.layout is not torch.strided or tensor.storage_offset():
        return None
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _tiny(ref: Ref) -> Tensor:
    """A tensor with at most two numbers a dimension, and strides in the same order."""
    size = [min(n, 2) for n in ref.size]
    stride = _dense(size, ref.stride)
    made = torch.empty_strided(
        size, [new if old else 0 for new, old in zip(stride, ref.stride, strict=True)], dtype=ref.dtype
    )
    # Ones, as zeros cannot be divided by.
    return made.fill_(1)


def _grown(tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Dense, of that shape, with strides in the order that the tiny tensor's have."""
    tiny = Ref.of(tensor, 0)
    if tiny.size != tuple(min(n, 2) for n in shape) or not tiny.is_dense() or tiny.offset:
        return None
    return torch.empty_strided(shape, _dense(shape, tiny.stride), dtype=tensor.dtype, device=_META)


def _dense(size: Any, order: Any) -> list[int]:
    """Strides of a dense tensor that are in the same order as those in `order`."""
    stride, step = [0] * len(size), 1
    for dim in sorted(range(len(size)), key=lambda dim: (order[dim], size[dim], -dim)):
        stride[dim] = step
        step *= max(1, size[dim])
    return stride
