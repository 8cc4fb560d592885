"""A multi-layer perceptron over 12 numbers, 5 classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

ROWS, INPUTS, HIDDEN, CLASSES = 61, 12, 32, 5


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def raw_job(folder: Path) -> dict[str, Any]:
    """Writes `mlp.npz` and gives the job."""
    import models

    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
    np.savez(folder / "mlp.npz", x=x, y=np.abs(x[:, :CLASSES]).argmax(1))
    return models.raw_job(
        __file__, folder, {"train": "mlp.npz", "input": "x", "target": "y"}, objective="cross_entropy"
    )
