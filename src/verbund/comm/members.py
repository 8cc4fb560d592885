"""What islands need of each other, whatever joins them: shared memory, gloo, NCCL or the wire."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Work = Any
"""A collective under way, for `finish`; None: it is over."""


class Members(Protocol):
    """Processes that exchange tensors; `comm.collectives.Group` and `comm.ring.WireGroup` say more of each method."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> Work | None: ...

    def start_all_gather(self, whole: Tensor, share: Tensor) -> Work | None: ...

    def start_all_to_all(self, received: Tensor, sent: Tensor) -> Work | None: ...

    def start_send(self, tensor: Tensor, to: int, tag: int = 0) -> Work | None: ...

    def receive(self, tensor: Tensor, source: int, tag: int, what: str) -> None: ...

    def finish(self, work: Work | None, what: str) -> None: ...

    def all_reduce(self, tensor: Tensor, what: str, maximum: bool = False) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None: ...

    def all_gather_arrays(self, arrays: dict[str, np.ndarray[Any, Any]], what: str) -> list[dict[str, Any]]: ...
