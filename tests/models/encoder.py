"""nn.TransformerEncoder over vectors, with dropout in every place torch has one, and a padding mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

ROWS, LENGTH, WIDTH, HEADS, CLASSES = 61, 9, 24, 4, 5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 40, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = x.abs().sum(-1) == 0
        y = self.encoder(self.drop(x), src_key_padding_mask=padding)
        return self.head(y.mean(1))


def model() -> nn.Module:
    return Classifier()


def raw_job(folder: Path) -> dict[str, Any]:
    """Writes `encoder.npz`, vectors of classes with centres of their own, and gives the job."""
    import models

    random = np.random.default_rng(3)
    y = random.integers(0, CLASSES, ROWS)
    centres = random.normal(size=(CLASSES, 1, WIDTH))
    x = (centres[y] + random.normal(size=(ROWS, LENGTH, WIDTH))).astype(np.float32)
    x[:, LENGTH - 2 :][random.random((ROWS, 2)) < 0.3] = 0.0
    np.savez(folder / "encoder.npz", x=x, y=y)
    data = {"train": "encoder.npz", "input": "x", "target": "y"}
    return models.raw_job(__file__, folder, data, objective="cross_entropy")
