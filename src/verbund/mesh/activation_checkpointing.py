"""Activation checkpointing: modules that forget their activations and compute them again in the backward pass (Chen
et al., "Training Deep Nets with Sublinear Memory Cost", 2016).

As torch.utils.checkpoint does it without re-entering autograd: hooks on saved tensors keep their place instead of their
value, and the first value that is asked for repeats the forward pass. That one imports `torch._dynamo` at its first
call, 1.1 to 1.5 s in every process; this one does not. It also leaves running statistics alone the second time, which
otherwise move twice in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from verbund.errors import InputError, TaskError
from verbund.mesh.changing_buffers import Buffer, changing
from verbund.randomness.override import Override

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_WHERE = "train.activation_checkpointing"


def apply(model: nn.Module, spec: bool | list[str], context_fn: Callable[[], Contexts]) -> list[str]:
    """Makes the chosen modules checkpoint their forward pass; their names, classes and states stay as they are.

    Of modules inside each other only the outer one is taken: another checkpoint inside would keep more, not less.

    Args:
        model: the model.
        spec: True for every child with parameters of a ModuleList or Sequential, or glob patterns of module names.
        context_fn: makes the contexts of a forward pass and of its repetition, which must draw the same numbers.

    Returns:
        The names of the modules.

    Raises:
        InputError: if a pattern matches no module, or there is nothing for True.
    """
    if spec is False or spec == []:
        return []
    modules = {name: module for name, module in model.named_modules() if name}
    names = _children(model) if spec is True else _matching(modules, spec)
    chosen: list[str] = []
    for name in modules:
        if name in names and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen.append(name)
            _Checkpointed(name, modules[name], context_fn).install()
    return chosen


def _children(model: nn.Module) -> set[str]:
    found = {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for child, part in module.named_children()
        if next(part.parameters(), None) is not None
    }
    if not found:
        raise InputError(
            "the model has no ModuleList or Sequential whose children could be checkpointed",
            where=_WHERE,
            fix='Give glob patterns of module names instead of true, e.g. ["encoder.*"]',
        )
    return found


def _matching(modules: dict[str, nn.Module], patterns: list[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        hit = {name for name in modules if fnmatchcase(name, pattern)}
        if not hit:
            some = ", ".join(f"`{name}`" for name in list(modules)[:4])
            raise InputError(
                f"`{pattern}` matches no module",
                where=_WHERE,
                fix=f"There are {some}{' and others' if len(modules) > 4 else ''}"
                if some
                else "The model has no modules inside",
            )
        found |= hit
    return found


class _Checkpointed(Override):
    """The forward of a checkpointed module."""

    def __init__(self, name: str, module: nn.Module, context_fn: Callable[[], Contexts]) -> None:
        super().__init__(module)
        self._name = name
        self._context_fn = context_fn
        self._buffers = changing(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler knows its own only, and has imported what that needs.
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
        first, again = self._context_fn()
        part = _Part(self._name, self.inner, args, kwargs, again, self._buffers)
        with saved_tensors_hooks(part.keep_place, part.value), first:
            return self.inner(*args, **kwargs)


class _Enough(Exception):
    """All that is needed has been computed again."""


class _Part:
    """One checkpointed forward pass: what its repetition needs, and places for what autograd saved."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any],
        buffers: list[Buffer],
    ) -> None:
        self._name = name
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._context = context
        self._buffers = [(buffer, buffer.get().clone()) for buffer in buffers]
        self._autocasts = _autocasts()
        inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self._versions = [(value, value._version) for value in inputs]
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._values: dict[int, Tensor] = {}

    def keep_place(self, tensor: Tensor) -> int:
        """Instead of a tensor autograd saves its number."""
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def value(self, place: int) -> Tensor:
        """The tensor that was to be saved; handed out once, so that its memory is free after its use."""
        if place not in self._values:
            self._values = self._repeat()
        return self._values.pop(place)

    def _repeat(self) -> dict[int, Tensor]:
        if any(value._version != version for value, version in self._versions):
            raise TaskError(
                f"the input of `{self._name}` was changed in place after its forward pass began, so it cannot be "
                "computed again",
                where=_WHERE,
                fix="Do without inplace=True and the like on that tensor, or leave the module out",
            )
        values: dict[int, Tensor] = {}

        def take(tensor: Tensor) -> Tensor:
            place = len(values)
            if place >= len(self._saved) or self._saved[place] != (tensor.shape, tensor.dtype):
                raise self._differs()
            values[place] = tensor = tensor.detach()
            if place == len(self._saved) - 1:
                raise _Enough
            return tensor

        current = [(buffer, buffer.get()) for buffer, _ in self._buffers]
        try:
            for buffer, start in self._buffers:
                buffer.put(start.clone())
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for device, options in self._autocasts.items():
                    stack.enter_context(torch.autocast(device, **options))
                stack.enter_context(self._context)
                stack.enter_context(saved_tensors_hooks(take, lambda tensor: tensor))
                self._function(*self._args, **self._kwargs)
        except _Enough:
            return values
        finally:
            for buffer, tensor in current:
                buffer.put(tensor)
        raise self._differs()

    def _differs(self) -> TaskError:
        return TaskError(
            f"`{self._name}` computes something else when its forward pass is repeated",
            where=_WHERE,
            fix="What it does must depend on its inputs and parameters only; leave the module out if it cannot",
        )


def _autocasts() -> dict[str, dict[str, Any]]:
    """Per type of device, how automatic casts are set now."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return {
        device: {
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device in devices
    }
