"""A forward of one module instance that takes the place of its class's."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn


class Override(ABC):
    """Called instead of the module's own `forward`; the module's class, names and state stay as they are.

    A plain function would still belong to the original module after a deep copy of it, and run with the original's
    weights. A copy of an overridden module has its own, stock forward.

    Args:
        module: the module; `inner` is the forward that it had so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] = module.forward

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes instead."""

    def install(self) -> None:
        """Puts this in the place of the module's forward."""
        self.module.forward = self

    def install_within(self) -> None:
        """Puts this in the place of the module's own forward, inside of what took its place before."""
        outer = self.module.__dict__.get("forward")
        if not isinstance(outer, Override):
            self.install()
            return
        while isinstance(outer.inner, Override):
            outer = outer.inner
        self.inner, outer.inner = outer.inner, self

    def remove(self) -> None:
        """Puts the former forward back, unless another took this one's place in the meantime."""
        if self.module.__dict__.get("forward") is self:
            function = getattr(self.inner, "__func__", None)
            if function is not None and function is type(self.module).forward:
                del self.module.__dict__["forward"]
            else:
                self.module.forward = self.inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.inner, memo)
