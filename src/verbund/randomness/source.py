"""Where keyed numbers come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Shape = torch.Size | tuple[int, ...]
Fill = Callable[[Tensor, int], Tensor]
"""Makes [R, count] numbers from row keys [2, R, 1] and `count`."""


class Source(Protocol):
    """Where keyed numbers come from."""

    def draw(
        self,
        shape: Shape,
        device: torch.device,
        what: str,
        fill: Fill,
        *,
        batch: bool,
        dimension: int | None = None,
    ) -> Tensor:
        """Numbers of `shape`, row by row from the samples' keys; `batch`: it must have a batch dimension."""
        ...

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function whose inner random functions are to be replaced too."""
        ...
