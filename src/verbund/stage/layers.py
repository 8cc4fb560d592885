"""Which layers of a model are called, and with what: names the layer that failed and the one that made the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd


class _Call(NamedTuple):
    name: str
    module: nn.Module
    shapes: list[list[int]]


class Layers:
    """Follows the forward passes of a model.

    Args:
        model: whose layers are followed within `followed`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[_Call] = []
        self._made: list[tuple[str, nn.Module, list[int]]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within the block calls are noticed."""
        handles = []
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def failed(self) -> tuple[str, str | None] | None:
        """The layer that was called but did not return, with what it got; and what to do, where that is known."""
        call = next((call for call in reversed(self._open) if call.name), None)
        if call is None:
            return None
        inputs = ", ".join(map(str, call.shapes)) or "no tensor"
        return f"{_named(call.name, call.module)}, was called with {inputs}", _remedy(call.module, call.shapes)

    def maker(self, shape: list[int]) -> str | None:
        """The last layer whose output had that shape, one with parameters if there is one."""
        fitting = [call for call in reversed(self._made) if call[2] == shape and not list(call[1].children())]
        learning = (call for call in fitting if list(call[1].parameters()))
        call = next(learning, next(iter(fitting), None))
        return _named(call[0], call[1]) if call is not None else None

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is self._model:
                self._open.clear()
                self._made.clear()
            shapes = [list(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._open.append(_Call(name, module, shapes))

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # What is above it raised something that the model caught.
            while self._open and self._open.pop().module is not module:
                pass
            if isinstance(output, Tensor):
                self._made.append((name, module, list(output.shape)))

        return hook


def _named(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"layer `{name}`, {kind}({module.extra_repr()})" if not list(module.children()) else f"`{name}`, a {kind}"


def _remedy(module: nn.Module, shapes: list[list[int]]) -> str | None:
    """What would make a layer of torch's take these shapes."""
    if not shapes or not shapes[0]:
        return None
    shape = shapes[0]
    if isinstance(module, nn.Linear) and shape[-1] != module.in_features:
        if prod(shape[1:]) == module.in_features:
            return "Put nn.Flatten() before it"
        return f"It needs in_features={shape[-1]}, or other layers before it"
    if isinstance(module, _ConvNd) and len(shape) > 1 and shape[1] != module.in_channels:
        return f"It needs in_channels={shape[1]}, or other layers before it"
    if isinstance(module, _BatchNorm) and len(shape) > 1 and shape[1] != module.num_features:
        return f"It needs num_features={shape[1]}"
    if isinstance(module, nn.Embedding):
        return f"Its inputs must be whole numbers from 0 to {module.num_embeddings - 1}"
    return None
