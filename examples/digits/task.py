"""A convolutional network for 8 × 8 digits; everything else is named in job.toml."""

import torch
from torch import nn


def model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def augment(batch, random):
    """Makes every image up to 10 % brighter or darker; drawn per sample, so the same for any number of workers."""
    brightness = random.uniform(1, 1, low=0.9, high=1.1)
    return {**batch, "image": batch["image"].to(torch.float32) * brightness}
