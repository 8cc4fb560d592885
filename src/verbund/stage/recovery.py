"""Recovery: when workers have come or gone, the members go on from the newest step that anybody has done.

A step is done once its update is applied, which is the same in all workers that have come so far: those that have not,
and those that are new, get parameters, optimiser state, running statistics and the training's own state from the memory
of those that have, an equal part from each.
"""

from __future__ import annotations

import json
import math
from typing import Any

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
    raw = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    told = group.all_gather(torch.tensor([mine, len(raw), int(lost)]), _WHAT)
    steps, lengths, losses = torch.stack(told).T.tolist()
    newest = max(steps)
    if newest < 0:
        raise ClusterLost("all workers were lost: nobody has what has been trained")
    have = [rank for rank, each in enumerate(steps) if each == newest]
    lack = [rank for rank, each in enumerate(steps) if each < newest]
    if group.rank != have[0]:
        raw = torch.empty(lengths[have[0]], dtype=torch.uint8)
    group.finish(group.start_broadcast(raw, have[0]), _WHAT)
    with torch.no_grad():
        if mine < newest:
            _receive(replica, group, have)
        elif lack:
            _give(replica, group, have, lack)
    return newest, json.loads(raw.numpy().tobytes()), any(losses)


def _tensors(replica: Replica) -> dict[tuple[str, str], Tensor]:
    """By kind and name, in an order that is the same in all replicas."""
    return dict(sorted(((kind, piece.name), piece.values) for kind in KINDS for piece in replica.pieces(kind)))


def _give(replica: Replica, group: Group, have: list[int], lack: list[int]) -> None:
    """Each that has all gives an equal part of it to each that lacks it; the first also says what there is."""
    own = _tensors(replica)
    number, under_way = have.index(group.rank), []
    if number == 0:
        described = [[kind, name, _dtype(tensor), list(tensor.shape)] for (kind, name), tensor in own.items()]
        raw = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
        for to in lack:
            under_way += [group.start_send(torch.tensor([len(raw)]), to), group.start_send(raw, to, 1)]
    for tag, dtype in enumerate(dict.fromkeys(map(_dtype, own.values())), start=2):
        alike = [tensor for tensor in own.values() if _dtype(tensor) == dtype]
        start, stop = _stretch(sum(tensor.numel() for tensor in alike), number, len(have))
        if start < stop:
            part = _cut(alike, start, stop)
            under_way += [group.start_send(part, to, tag) for to in lack]
    for work in under_way:
        group.finish(work, _WHAT)


def _receive(replica: Replica, group: Group, have: list[int]) -> None:
    """Gets all tensors from those that have them."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, have[0], 0, _WHAT)
    raw = torch.empty(int(length), dtype=torch.uint8)
    group.receive(raw, have[0], 1, _WHAT)
    described = json.loads(raw.numpy().tobytes())
    own = _tensors(replica)
    states: dict[str, dict[str, Tensor]] = {}
    for tag, dtype in enumerate(dict.fromkeys(entry[2] for entry in described), start=2):
        alike = [entry for entry in described if entry[2] == dtype]
        sizes = [math.prod(entry[3]) for entry in alike]
        flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype))
        under_way = []
        for number, source in enumerate(have):
            start, stop = _stretch(sum(sizes), number, len(have))
            if start < stop:
                under_way.append(group.start_receive(flat[start:stop], source, tag))
        for work in under_way:
            group.finish(work, _WHAT)
        for (kind, name, _, shape), values in zip(alike, torch.split(flat, sizes), strict=True):
            if kind == "optimizer":
                parameter, _, key = name.rpartition("/")
                states.setdefault(parameter, {})[key] = values.view(shape).clone()
            else:
                own[kind, name].copy_(values.view(shape))
    replica.state.give_optimizer(states)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _stretch(count: int, number: int, parts: int) -> tuple[int, int]:
    """Begin and end of one of so many equal parts of `count` elements."""
    return count * number // parts, count * (number + 1) // parts


def _cut(tensors: list[Tensor], start: int, stop: int) -> Tensor:
    """The elements from `start` to `stop` of all these one after the other, in the host's memory."""
    pieces, at = [], 0
    for tensor in tensors:
        first, last = max(start - at, 0), min(stop - at, tensor.numel())
        if first < last:
            pieces.append(tensor.reshape(-1)[first:last].cpu())
        at += tensor.numel()
    return torch.cat(pieces)
