"""Recovery: when workers have come or gone, the members go on from the newest step that anybody has done.

A step is done once its update is applied, which is the same in all workers that have come so far: those that have not,
and those that are new, get parameters, optimiser state, running statistics and the training's own state from the memory
of the first that has.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.comm.collectives import Group
from verbund.errors import ClusterLost
from verbund.mesh.replica import Replica
from verbund.stage.saving import KINDS

_WHAT = "the recovery"


def bring_together(
    replica: Replica, step: int | None, state: dict[str, Any], lost: bool
) -> tuple[int, dict[str, Any], bool]:
    """All members of an era call it together.

    Args:
        replica: of a mesh that does not divide the model.
        step: how many steps are done here; None: this worker is new.
        state: the training's own, JSON values.
        lost: whether this worker has seen that another was lost.

    Returns:
        the step from which all go on, the state as it was there, and whether anybody has seen that another was lost.

    Raises:
        ClusterLost: if all are new.
    """
    group = replica.groups.data
    mine = -1 if step is None else step
    tensors = _described(replica) if mine >= 0 else []
    record: dict[str, Any] = {"step": mine, "state": state, "tensors": tensors, "lost": lost}
    raw = np.frombuffer(json.dumps(record).encode(), np.uint8)
    every = [json.loads(row["record"].tobytes()) for row in group.all_gather_arrays({"record": raw}, _WHAT)]
    newest = max(each["step"] for each in every)
    if newest < 0:
        raise ClusterLost("all workers were lost: nobody has what has been trained")
    giver = next(rank for rank, each in enumerate(every) if each["step"] == newest)
    if not all(each["step"] == newest for each in every):
        with torch.no_grad():
            _hand_over(replica, group, giver, every[giver]["tensors"], mine == newest)
    return newest, every[giver]["state"], any(each["lost"] for each in every)


def _tensors(replica: Replica) -> dict[tuple[str, str], Tensor]:
    return {(kind, piece.name): piece.values for kind in KINDS for piece in replica.pieces(kind)}


def _described(replica: Replica) -> list[list[Any]]:
    return [
        [kind, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for (kind, name), tensor in _tensors(replica).items()
    ]


def _hand_over(replica: Replica, group: Group, giver: int, described: list[list[Any]], has: bool) -> None:
    """Gives all the tensors of one; who has them already takes part only."""
    own = _tensors(replica)
    states: dict[str, dict[str, Tensor]] = {}
    for dtype in dict.fromkeys(entry[2] for entry in described):
        alike = [entry for entry in described if entry[2] == dtype]
        sizes = [int(np.prod(entry[3], dtype=np.int64)) for entry in alike]
        flat = torch.zeros(sum(sizes), dtype=getattr(torch, dtype))
        if group.rank == giver:
            flat = torch.cat([own[kind, name].reshape(-1).cpu() for kind, name, _, _ in alike])
        group.all_reduce(flat, _WHAT)  # of zeros and one
        if has:
            continue
        for (kind, name, _, shape), values in zip(alike, torch.split(flat, sizes), strict=True):
            if kind == "optimizer":
                parameter, _, key = name.rpartition("/")
                states.setdefault(parameter, {})[key] = values.view(shape).clone()
            else:
                target = own[kind, name]
                target.copy_(values.view(shape))
    if not has:
        replica.state.give_optimizer(states)
