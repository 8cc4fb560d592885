"""Several workers as threads of the test's process, joined by real groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from verbund.comm.collectives import Group

CPU = torch.device("cpu")


def together(world: int, folder: Path, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` returns in each of `world` workers, by rank."""

    def one(rank: int) -> Any:
        group = Group(folder / "store" if world > 1 else None, rank, world, CPU, 20.0)
        try:
            return work(group)
        finally:
            group.leave()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))
