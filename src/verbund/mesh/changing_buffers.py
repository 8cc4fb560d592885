"""Which buffers a training forward pass can change.

Running statistics, codebooks, power iterations are state that training moves; masks and tables of positions are
constants. Which is which must be known before the first step, and the same on all workers, so it is read off the
code of the modules.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# A buffer of up to so many elements that the code mentions at all is taken for one that changes: watching a small
# constant costs next to nothing.
_SMALL = 1 << 16
# Methods that run before or outside of training.
_BEFORE = {"__init__", "reset_parameters", "reset_running_stats", "_load_from_state_dict", "extra_repr"}
# torch's functions that change the statistics they are given.
_UPDATING = {"batch_norm", "instance_norm"}


class Buffer(NamedTuple):
    """A place where a module keeps a buffer; the tensor there may be replaced by another."""

    module: nn.Module
    key: str
    name: str

    def get(self) -> Tensor:
        """The tensor that is there now."""
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Puts another tensor there."""
        self.module._buffers[self.key] = tensor


def persistent(model: nn.Module) -> list[Buffer]:
    """All buffers of a model's state, each once. Those that are not saved are caches and no state."""
    found: dict[int, Buffer] = {}
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and not tensor.is_meta and key not in module._non_persistent_buffers_set:
                found.setdefault(id(tensor), Buffer(module, key, f"{prefix}.{key}" if prefix else key))
    return list(found.values())


def changing(model: nn.Module) -> list[Buffer]:
    """Those of `persistent` that a training forward pass can change, in the model's order."""
    return [buffer for buffer in persistent(model) if _can_change(buffer)]


def _can_change(buffer: Buffer) -> bool:
    module = buffer.module
    if isinstance(module, _NormBase):
        return module.track_running_stats
    for hook in module._forward_pre_hooks.values():
        # torch.nn.utils.spectral_norm keeps its vectors beside the weight and moves them in a hook.
        if type(hook).__name__ == "SpectralNorm" and buffer.key.startswith(f"{getattr(hook, 'name', '')}_"):
            return True
    written, mentioned = _uses(type(module), buffer.key)  # type: ignore[arg-type]
    return written or (mentioned and buffer.get().numel() <= _SMALL)


@lru_cache(maxsize=4096)
def _uses(kind: type[nn.Module], key: str) -> tuple[bool, bool]:
    """Whether the methods of a class change `self.KEY`, and whether they mention it."""
    written = mentioned = False
    for base in kind.__mro__:
        if base is nn.Module or base is object:
            continue
        for name, member in vars(base).items():
            code = getattr(getattr(member, "__wrapped__", member), "__code__", None)
            if name in _BEFORE or not isinstance(code, CodeType):
                continue
            for part in _nested(code):
                if key in part.co_names:
                    mentioned = True
                    written = written or _writes(part, key)
    return written, mentioned


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _writes(code: CodeType, key: str) -> bool:
    if any(name in _UPDATING for name in code.co_names):
        return True
    if any(isinstance(constant, tuple) and "out" in constant for constant in code.co_consts):
        return True
    chain = False
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR") and step.argval == key:
            return True
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if step.argval == key:
                chain = True
            elif chain and step.argval.endswith("_") and not step.argval.endswith("__"):
                return True  # self.KEY.copy_(…), self.KEY.data.mul_(…)
        elif step.opname == "STORE_SUBSCR" and chain:
            return True  # self.KEY[…] = …
        elif step.opname.startswith(("STORE_", "RETURN", "POP_TOP")):
            chain = False
    return False
