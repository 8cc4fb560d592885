"""Modules whose draws are keyed: their forward is replaced while class, name and state stay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from verbund.randomness import dropouts, recurrent
from verbund.randomness.override import Override
from verbund.randomness.source import Fill, Shape

if TYPE_CHECKING:
    from verbund.randomness.sample import SampleRandomness


class Keyed(Override):
    """A module that draws under its own name, mode or not."""

    def __init__(self, randomness: SampleRandomness, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self._randomness = randomness
        self._name = name

    def draw(
        self, shape: Shape, device: torch.device, what: str, fill: Fill, *, batch: bool, dimension: int | None = None
    ) -> Tensor:
        return self._randomness.draw(shape, device, what, fill, batch=batch, dimension=dimension, name=self._name)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


class KeyedDropout(Keyed):
    """A dropout module whose mask is keyed."""

    module: _DropoutNd

    def __call__(self, input: Tensor) -> Tensor:
        module, current = self.module, self._randomness.current
        if current is None or not module.training or module.p == 0.0:
            return self.inner(input)  # type: ignore[no-any-return]
        if current.moded:
            # None of what follows is for the mode, and it would cost at every call.
            with torch._C.DisableTorchFunction():
                return dropouts.dropout_of(self, module, input)
        return dropouts.dropout_of(self, module, input)


class KeyedRecurrent(Keyed):
    """A recurrent module whose dropout between layers is keyed."""

    module: nn.RNNBase

    def __call__(self, input: Any, hx: Any = None) -> Any:
        if self._randomness.current is None or not self.module.training:
            return self.inner(input, hx)
        return recurrent.forward(self.module, self._name, self._dropped, input, hx)

    def _dropped(self, x: Tensor, dimension: int) -> Tensor:
        module = self.module
        return dropouts.dropout(self, x, float(module.dropout), type(module).__name__, dimension=dimension)


class Watched(Override):
    """A module that draws by functions, or one below such: the mode is on in it, and its draws have its name."""

    def __init__(self, randomness: SampleRandomness, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self._randomness = randomness
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = self._randomness.current
        if current is None:
            return self.inner(*args, **kwargs)
        outer, current.name = current.name, self._name
        try:
            if current.moded or not current.training:
                return self.inner(*args, **kwargs)
            current.moded = True
            try:
                with self._randomness.mode:
                    return self.inner(*args, **kwargs)
            finally:
                current.moded = False
        finally:
            current.name = outer


def hide_from_compiler() -> None:
    """Torch's compiler, if it is there, passes by what draws: seed, step and uses would be constants in its graph."""
    if "torch._dynamo" not in sys.modules:
        return
    kinds: tuple[type[Override], ...] = (KeyedDropout, KeyedRecurrent, Watched)
    for kind in kinds:
        if not hasattr(kind.__call__, "_torchdynamo_disable"):
            kind.__call__ = torch.compiler.disable(kind.__call__)  # type: ignore[method-assign, no-untyped-call]
