"""Tensors without memory that stand for those of the ordinary construction while it is recorded."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from verbund.mesh.initial.tape import NotRecordable
from verbund.mesh.users_line import users_line

CPU = torch.device("cpu")
META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default
ASKED_OF_ALL = frozenset((_DEVICE, _COMPATIBLE))
"""Operations that every hollow tensor answers, whether anything is recorded or not."""


class Hollow(Tensor):
    """A tensor upon meta storage that says it is on the CPU, so that all code takes the paths it takes there."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is _DEVICE:
            return CPU
        if function is _COMPATIBLE:
            # Whether one's `data` can be the other's.
            return type(args[0]) is type(args[1])
        raise NotRecordable(f"`{function}` meets a tensor of a recorded constructor outside of it")

    def tolist(self) -> Any:
        return values(self, "tolist").tolist()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise refused("copy.deepcopy", "takes only tensors that no gradient flows through")
        with torch.no_grad():
            if isinstance(self, nn.Parameter):
                data = self.data.clone(memory_format=torch.preserve_format)
                made: Any = nn.Parameter(data, self.requires_grad)
            else:
                made = self._copy_of_storage(memo).requires_grad_(self.requires_grad)
                made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        memo[id(self)] = made
        return made

    def _copy_of_storage(self, memo: dict[Any, Any]) -> Tensor:
        """A tensor of the same geometry upon a copy of the storage, one copy for all tensors that share it."""
        storage = Tensor.untyped_storage(self)
        key = ("storage", storage._cdata, self.dtype)
        if key not in memo:
            count = storage.nbytes() // self.dtype.itemsize
            memo[key] = self.detach().as_strided((count,), (1,), 0).clone()
        copied: Tensor = memo[key]
        return copied.as_strided(self.size(), self.stride(), self.storage_offset()).detach()


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Hollow, *arguments: Any, **named: Any) -> Any:
        raise refused(name, "reaches past torch's operations to the memory of a tensor")

    return method


_REFUSED = (
    *("numpy", "data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__", "__reduce_ex__"),
    *("share_memory_", "is_shared", "pin_memory", "apply_", "map_", "map2_"),
)
for _name in _REFUSED:
    setattr(Hollow, _name, _refusing(_name))


def hollow(tensor: Tensor) -> Hollow:
    """What the constructor sees of a tensor on the meta device."""
    return torch.Tensor._make_subclass(Hollow, tensor, False, dispatch_device=True, device_for_backend_keys=CPU)


def values(tensor: Hollow, name: str) -> Tensor:
    """The values of a tensor while the constructor runs, if nothing random is in them."""
    mode: Any = _python_dispatch._get_current_dispatch_mode()
    if not hasattr(mode, "values"):
        raise NotRecordable(f"`{name}` of a tensor of a recorded constructor, outside of it")
    with _python_dispatch._pop_mode_temporarily():
        found: Tensor = mode.values(tensor, name)
    return found


def refused(name: str, why: str) -> NotRecordable:
    """The refusal of an operation, with the user's line; whoever records is told, should the user catch it."""
    error = NotRecordable(f"`{name}` {why}{users_line(sys._getframe(1))}")
    mode: Any = _python_dispatch._get_current_dispatch_mode()
    if hasattr(mode, "refusal"):
        mode.refusal = mode.refusal or str(error)
    return error
