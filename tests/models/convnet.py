"""A convolutional network over images of 3 × 8 × 8, 4 classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

ROWS, SIDE, CLASSES = 61, 8, 4


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def raw_job(folder: Path) -> dict[str, Any]:
    """Writes `convnet.npz`, images of bytes with one bright quarter, and gives the job."""
    import models

    random = np.random.default_rng(2)
    label = random.integers(0, CLASSES, ROWS)
    image = random.integers(0, 160, (ROWS, 3, SIDE, SIDE), np.uint8)
    half = SIDE // 2
    for row, quarter in enumerate(label):
        image[row, :, quarter // 2 * half :, quarter % 2 * half :][:, :half, :half] += 90
    np.savez(folder / "convnet.npz", image=image, label=label)
    data = {"train": "convnet.npz", "input": "image", "target": "label", "scale": {"image": 255.0}}
    return models.raw_job(__file__, folder, data, objective="cross_entropy")
