"""Activation checkpointing: modules that forget their activations and compute them again in the backward pass (Chen et
al., "Training Deep Nets with Sublinear Memory Cost", 2016)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verbund.errors import InputError

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def apply(model: nn.Module, spec: bool | list[str], context_fn: Callable[[], Contexts]) -> list[str]:
    """Makes the chosen modules checkpoint their forward pass; their names and states stay as they are.

    Args:
        model: the model.
        spec: True for every child of a ModuleList or Sequential, or glob patterns of module names.
        context_fn: contexts of the first forward pass and of its repetition, which must draw the same numbers.

    Returns:
        The names of the modules.

    Raises:
        InputError: if a pattern matches no module.
    """
    if spec is False or spec == []:
        return []
    chosen = _children(model) if spec is True else _matching(model, spec)
    for module in chosen.values():
        _wrap(module, context_fn)
    return list(chosen)


def _children(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # Of nested containers only the outer ones' children: a second checkpoint inside saves nothing more.
        inside = any(name.startswith(f"{outer}.") or name == outer for outer in found)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not inside:
            for child, part in module.named_children():
                if any(True for _ in part.parameters()):
                    found[f"{name}.{child}" if name else child] = part
    return found


def _matching(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        hit = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not hit:
            some = ", ".join(f"`{name}`" for name in list(modules)[:4])
            raise InputError(
                f"`{pattern}` matches no module",
                where="train.activation_checkpointing",
                fix=f"There are {some}",
            )
        found |= hit
    return found


def _wrap(module: nn.Module, context_fn: Callable[[], Contexts]) -> None:
    forward = module.forward

    def saving(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    module.forward = saving
