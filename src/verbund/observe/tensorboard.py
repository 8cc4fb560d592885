"""Scalars for TensorBoard, as an option (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verbund.errors import InputError


def check() -> None:
    """Whether event files can be written.

    Raises:
        InputError: if the package is not installed.
    """
    if find_spec("tensorboard") is None:
        raise InputError(
            "the package tensorboard is not installed",
            where="observe.tensorboard",
            fix="pip install 'verbund[tensorboard]', or set it to false",
        )


class Board:
    """Writes a run's steps and validations as event files; made by one worker of the island.

    Args:
        folder: where the event files go.
    """

    def __init__(self, folder: Path) -> None:
        check()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def step(self, step: int, loss: float, rate: float) -> None:
        """One optimiser step: its global loss and learning rate."""
        self._writer.add_scalar("train/loss", loss, step)
        self._writer.add_scalar("train/learning_rate", rate, step)

    def validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics that are single numbers."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"validation/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
