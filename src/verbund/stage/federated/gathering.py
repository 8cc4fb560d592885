"""Updates that the workers of a simulation share among each other, so that all aggregate the same in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.comm.collectives import Group
from verbund.exchange.federated.update import Update
from verbund.stage.federated.clients import Trained

_WHAT = "the gathering of updates"
_FLAG = "flag"


def gather(own: Sequence[Trained], flag: float, group: Group) -> tuple[list[Trained], float]:
    """All workers' updates, those of the first worker first, and the largest of their flags.

    Args:
        own: this worker's.
        flag: a reason to stop after this round, or 0.
        group: all workers.
    """
    if group.world == 1:
        return list(own), flag
    arrays: dict[str, np.ndarray[Any, Any]] = {_FLAG: np.array([flag])}
    for place, (update, kept) in enumerate(own):
        losses = update.metrics["loss"]
        arrays[f"{place}|head|"] = np.array([update.weight, update.base_version, update.local_steps, *losses])
        for kind, tensors in (("difference", update.difference), ("aux", update.aux), ("kept", kept)):
            for name, values in tensors.items():
                arrays[f"{place}|{kind}|{name}"] = values.detach().cpu().numpy()
    rows = group.all_gather_arrays(arrays, _WHAT)
    return [each for row in rows for each in _unpacked(row)], max(float(row[_FLAG][0]) for row in rows)


def _unpacked(row: dict[str, np.ndarray[Any, Any]]) -> list[Trained]:
    heads: dict[int, np.ndarray[Any, Any]] = {}
    tensors: dict[tuple[int, str], dict[str, Tensor]] = {}
    for full, values in row.items():
        if full == _FLAG:
            continue
        number, kind, name = full.split("|", 2)
        if kind == "head":
            heads[int(number)] = values
        else:
            tensors.setdefault((int(number), kind), {})[name] = torch.from_numpy(values.copy())
    found: list[Trained] = []
    for place, head in sorted(heads.items()):
        weight, version, steps, loss, counted = head.tolist()
        update = Update(
            tensors.get((place, "difference"), {}),
            weight,
            int(version),
            int(steps),
            tensors.get((place, "aux"), {}),
            {"loss": (loss, counted)},
        )
        found.append((update, tensors.get((place, "kept"), {})))
    return found
