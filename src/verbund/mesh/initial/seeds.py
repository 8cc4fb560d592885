"""Seeds of the generators that a model's constructor may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds torch, numpy and random, so that `model()` gives the same values in every process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
