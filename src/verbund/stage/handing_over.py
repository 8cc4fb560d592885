"""Handing over: an island that comes back gets from one that has it what the islands have in common, from memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.checkpoint.piece import dtype_name
from verbund.comm.members import Members
from verbund.exchange.local_steps import LocalSteps
from verbund.mesh.replica import Replica
from verbund.mesh.state import Tensors

_WHAT = "the return of an island"
_PART_BYTES = 1 << 28


def hand_over(
    group: Members, holders: Sequence[int], replica: Replica, exchange: LocalSteps, state: dict[str, Any]
) -> dict[str, Any] | None:
    """Gives those that lack it the common weights, the optimiser of the first that has them, and what the exchange
    needs. All members of the group call it together; each worker of an island with its peers.

    Args:
        group: this worker's peers in the other islands.
        holders: the places there of those that have what was trained.
        replica: this worker's; of who lacks it, is filled.
        exchange: likewise; what was under way there begins again with `LocalSteps.begin_again`.
        state: the training's own, JSON values; of who lacks it, of no interest.

    Returns:
        the giver's state; None for those that have had everything.

    Raises:
        PeerLost: if another island is lost meanwhile.
    """
    lacking = [place for place in range(group.world) if place not in holders]
    if not lacking:
        return None
    giver = holders[0]
    if group.rank == giver:
        with exchange.swapped():
            mine = {key: values.contiguous() for key, values in _tensors(replica, exchange).items()}
            described = [[*key, dtype_name(values.dtype), list(values.shape)] for key, values in mine.items()]
            record = {"tensors": described, "state": state, "exchange": exchange.record()}
            _gathered(group, record)
            for place in lacking:
                for tag, part in enumerate(_parts(mine)):
                    group.finish(group.start_send(part.cpu(), place, tag), _WHAT)
        return None
    said = _gathered(group, None)[giver]
    if group.rank not in lacking:
        return None
    shapes = {(kind, name): torch.empty(shape, dtype=getattr(torch, t)) for kind, name, t, shape in said["tensors"]}
    for tag, part in enumerate(_parts(shapes)):
        group.receive(part, giver, tag, _WHAT)
    _fill(replica, exchange, shapes)
    received: dict[str, Any] = said["state"]
    if replica.loss_scale is not None and received["loss_scale"] is not None:
        replica.loss_scale.load(received["loss_scale"])
    exchange.take(said["exchange"], int(received["step"]))
    return received


def _tensors(replica: Replica, exchange: LocalSteps) -> Tensors:
    return {**replica.state.tensors(), **{("exchange", name): t for name, t in exchange.state.shared().items()}}


@torch.no_grad()
def _fill(replica: Replica, exchange: LocalSteps, tensors: Tensors) -> None:
    replica.state.give({key: values for key, values in tensors.items() if key[0] != "exchange"})
    for name, target in exchange.state.shared().items():
        target.copy_(tensors["exchange", name])


def _gathered(group: Members, record: dict[str, Any] | None) -> list[Any]:
    raw = np.frombuffer(json.dumps(record).encode(), np.uint8)
    return [json.loads(row["record"].tobytes()) for row in group.all_gather_arrays({"record": raw}, _WHAT)]


def _parts(tensors: Tensors) -> Iterator[Tensor]:
    """The memory of tensors, in the same parts at both ends."""
    for values in tensors.values():
        if values.numel():
            yield from torch.split(values.reshape(-1).view(torch.uint8), _PART_BYTES)
