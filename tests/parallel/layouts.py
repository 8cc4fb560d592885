"""All meshes of a number of workers, and the models they are tried on. `make sweep` runs them all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from verbund.job import AXES

WORKERS = (2, 3, 4, 8)
MODELS = ("mlp", "convnet", "gpt", "encoder", "llama", "bert")
# Any two of them, saved under one and loaded under the other.
CHECKPOINTS = (
    "data=1",
    "data=2",
    "shard=2",
    "shard=3",
    "tensor=2",
    "pipeline=2",
    "data=2,tensor=2",
    "shard=2,pipeline=2",
)


def meshes(workers: int) -> Iterator[str]:
    """Every product of the four axes with so many workers, as `--strategy` takes it."""
    for sizes in product(range(1, workers + 1), repeat=len(AXES)):
        if math.prod(sizes) == workers:
            yield ",".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1)
