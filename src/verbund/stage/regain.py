"""Regaining: after a loss in a mesh that divides the model, all go on from a step of which everything is still held.

Workers agree upon each update (`OptimizerStep.take`), so that after a loss all that are left have done the newest step,
or can conclude it by themselves. What a lost worker held, a peer along the axis `data` holds too; then no step is lost.
Else all go back to the newest step that is mirrored in memory; else training begins again from a checkpoint. Whoever
takes a lost worker's place has its place in the same mesh, and so needs exactly what that held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.checkpoint.piece import dtype_name
from verbund.cluster.supervisor import MEETING
from verbund.cluster.worker import Worker
from verbund.comm.collectives import Group
from verbund.comm.peer_lost import PeerLost
from verbund.errors import ClusterLost
from verbund.job import AXES
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.mesh.state import Tensors
from verbund.stage.island import Island
from verbund.stage.mirrors import Mirrors, unpacked

_WHAT = "the recovery"
_PART_BYTES = 1 << 28


class NothingTrained(ClusterLost):
    """All workers are new."""


@dataclass(frozen=True)
class Standing:
    """What one worker says of itself when all have met.

    Args:
        step: how many steps are done here; None: this worker is new.
        ready: whether it can do one more without anybody else.
        state: the training's own after `step`, JSON values.
        mirrors: of which workers it can read which mirrored steps.
    """

    step: int | None = None
    ready: bool = False
    state: dict[str, Any] | None = None
    mirrors: Mapping[int, Sequence[int]] | None = None

    def reaches(self, step: int) -> bool:
        """Whether this worker has, or can come to, what it held after so many steps."""
        return self.step is not None and step - int(self.ready) <= self.step <= step


@dataclass(frozen=True)
class Choice:
    """From where all go on.

    Args:
        step: how many steps are done.
        again: how many had been done, and are done once more.
        givers: by rank: who has in memory what the worker at this place is to have; itself, if it can.
        owners: by rank: whose mirror that is; empty if it is what the giver trains.
        state: the training's own after `step`; None: it lies beside the mirrors.
    """

    step: int
    again: int
    givers: tuple[int, ...]
    owners: tuple[int, ...] = ()
    state: dict[str, Any] | None = None

    @property
    def how(self) -> str:
        """Whose memory it is: `peers` or `mirrors`."""
        return "mirrors" if self.owners else "peers"


@dataclass
class Held:
    """What a worker that is left has trained.

    Args:
        replica: as it was when another worker was lost.
        step: how many steps are done.
        state: the training's own after that, JSON values.
    """

    replica: Replica
    step: int
    state: dict[str, Any]

    def come_to(self, choice: Choice) -> Tensors:
        """What this worker held after the step that was chosen, which others have done and this one can."""
        if self.step < choice.step:
            assert choice.state is not None
            self.replica.optimizer_step.conclude()
            self.step, self.state = choice.step, choice.state
        return self.replica.state.tensors()


def regain(worker: Worker, island: Island, mirrors: Mirrors | None, held: Held | None) -> tuple[Replica, Choice, Any]:
    """Builds this worker's replica anew for the groups that have just met, and fills it from memory. All workers call
    it together; after a `PeerLost` once more, when they have met again.

    Args:
        worker: this one.
        island: with the new groups.
        mirrors: this worker's, if there are any.
        held: what it has; None: it takes the place of one that was lost.

    Returns:
        the replica, from where all go on, and the training's own state as it was there.

    Raises:
        PeerLost: if another worker is lost meanwhile.
        NothingTrained: if all are new.
        ClusterLost: if something that is needed is in nobody's memory any more.
    """
    if mirrors is not None:
        mirrors.meet(island.groups, island.mesh.rank)
    standing = Standing(mirrors=mirrors.steps() if mirrors is not None else None)
    if held is not None:
        held.replica.optimizer_step.undo()
        standing = replace(standing, step=held.step, ready=held.replica.optimizer_step.ready, state=held.state)
    choice = choose(take_stock(island.groups, standing), island.mesh)
    mine = None
    if held is not None and not choice.owners and choice.givers[island.mesh.rank] == island.mesh.rank:
        mine = held.come_to(choice)
    worker.doing("recovering", choice.step)
    replica = island.replica(worker)
    replica.optimizer_step.atomic = True
    state = hand_over(choice, replica, mine, mirrors, island.groups)
    if replica.loss_scale is not None:
        replica.loss_scale.load(state["loss_scale"])
    if mirrors is not None:
        if choice.owners:
            mirrors.back_to(choice.step)
        mirrors.take(choice.step, state, replica.state.tensors())
    if island.mesh.rank == 0:
        worker.send("regained", how=choice.how, step=choice.step, again=choice.again)
    return replica, choice, state


def take_place(
    worker: Worker, island: Island, mirrors: Mirrors | None, begin: Callable[[], tuple[Replica, dict[str, Any]]]
) -> tuple[Replica, dict[str, Any], bool]:
    """What a worker begins with: a replica, and the training's state. Who takes the place of one that was lost gets
    what that held, as soon as the others have met with it; if nobody has trained yet, all begin.

    Args:
        worker: this one.
        island: that it has joined.
        mirrors: this worker's, if there are any.
        begin: makes the replica that a run begins with; all call it together.

    Returns:
        the replica, the state, and whether others have begun before.

    Raises:
        PeerLost: if the supervisor is lost.
        ClusterLost: if something that is needed is in nobody's memory any more, or there is no place.
    """
    limits = island.job.cluster
    if worker.joins:
        worker.send("ready")
    met = not worker.joins
    while True:
        try:
            if not met:
                if not worker.later_era(island.era, limits.step_deadline + limits.lost_after):
                    raise ClusterLost("a worker was lost, and the supervisor has not said who goes on")
                worker.joins = False
                worker.doing(MEETING, 0)
                island.meet_anew(worker)
                met = True
            if island.era > 0:  # else all begin
                try:
                    replica, choice, state = regain(worker, island, mirrors, None)
                    return replica, state | {"step": choice.step}, True
                except NothingTrained:
                    pass
            elif mirrors is not None:
                mirrors.meet(island.groups, island.mesh.rank)
            return *begin(), False
        except PeerLost:
            if worker.orphaned:
                raise
            met = False


def take_stock(groups: Groups, standing: Standing) -> list[Standing]:
    """What all workers say of themselves, by rank. All call it together."""
    raw = np.frombuffer(json.dumps(asdict(standing)).encode(), np.uint8)
    every = [json.loads(arrays["standing"].tobytes()) for arrays in groups.gather({"standing": raw}, _WHAT)]
    return [
        Standing(**{**each, "mirrors": {int(rank): steps for rank, steps in (each["mirrors"] or {}).items()}})
        for each in every
    ]


def choose(standings: Sequence[Standing], mesh: Mesh) -> Choice:
    """From where all go on; the same in all workers.

    Args:
        standings: by rank.
        mesh: the axes.

    Raises:
        NothingTrained: if all are new.
        ClusterLost: if something that is needed is in nobody's memory any more.
    """
    newest = max((each.step for each in standings if each.step is not None), default=None)
    if newest is None:
        raise NothingTrained("all workers were lost: nobody has what has been trained")
    ranks = range(mesh.world)
    alike = [_first(rank, replace(mesh, rank=rank).peers("islands", "data")) for rank in ranks]
    holders = [next((peer for peer in alike[rank] if standings[peer].reaches(newest)), -1) for rank in ranks]
    if -1 not in holders:
        state = next(each.state for each in standings if each.step == newest)
        return Choice(newest, 0, tuple(holders), state=state)
    readers = [_first(rank, replace(mesh, rank=rank).peers(*AXES)) for rank in ranks]
    mirrored = [_mirrors(alike[rank], readers[rank], standings) for rank in ranks]
    common = set(mirrored[0]).intersection(*mirrored[1:])
    if not common:
        missing = [str(rank) for rank in ranks if holders[rank] < 0]
        who = f"workers {', '.join(missing)}" if len(missing) > 1 else f"worker {missing[0]}"
        raise ClusterLost(f"what {who} held is in nobody's memory any more")
    step = max(common)
    givers, owners = zip(*(held[step] for held in mirrored), strict=True)
    return Choice(step, newest - step, givers, owners)


def _first(rank: int, peers: Sequence[int]) -> list[int]:
    """The same, itself before the others."""
    return [rank, *(peer for peer in peers if peer != rank)]


def _mirrors(
    owners: Sequence[int], readers: Sequence[int], standings: Sequence[Standing]
) -> dict[int, tuple[int, int]]:
    """By step: who can read a mirror of these owners, who hold the same, and whose; the first in either order."""
    found: dict[int, tuple[int, int]] = {}
    for reader in readers:
        for owner in owners:
            for step in (standings[reader].mirrors or {}).get(owner, ()):
                found.setdefault(step, (reader, owner))
    return found


def hand_over(
    choice: Choice, replica: Replica, mine: Tensors | None, mirrors: Mirrors | None, groups: Groups
) -> dict[str, Any]:
    """Gives a replica that was built anew what it is to go on with. All workers call it together.

    Args:
        choice: see there.
        replica: of the same place in the same mesh as before.
        mine: what this worker held after `choice.step` steps; None: nothing.
        mirrors: those that this worker can read.
        groups: of all.

    Returns:
        the training's own state after that step.

    Raises:
        PeerLost: if another worker is lost meanwhile.
    """
    rank = replica.mesh.rank
    if not choice.owners:
        peers = replica.mesh.peers("islands", "data")
        lacking = [peer for peer in peers if choice.givers[peer] != peer]
        if lacking:
            giver = peers.index(choice.givers[lacking[0]])
            mine = _broadcast(groups.data, giver, mine if rank not in lacking else None)
        assert mine is not None
        assert choice.state is not None
        replica.state.give(mine)
        return choice.state
    first = replica.mesh.peers(*AXES)[0]
    content: Tensor | None = None
    for receiver, (giver, owner) in enumerate(zip(choice.givers, choice.owners, strict=True)):
        if giver == rank:
            assert mirrors is not None
            content = _with_own(mirrors.read(owner, choice.step), receiver == rank, content, groups, receiver - first)
        elif receiver == rank:
            content = _received(groups.island, giver - first)
    assert content is not None
    state, tensors = unpacked(content)
    replica.state.give({key: values.clone() for key, values in tensors.items()})
    return state


def _with_own(values: Tensor, own: bool, content: Tensor | None, groups: Groups, receiver: int) -> Tensor | None:
    """A mirror that this worker reads: for itself, or for another."""
    if own:
        return values
    group = groups.island
    size = torch.tensor([values.numel()])
    for tag, part in enumerate((size, *torch.split(values, _PART_BYTES))):
        group.finish(group.start_send(part, receiver, tag), _WHAT)
    return content


def _received(group: Group, giver: int) -> Tensor:
    size = torch.empty(1, dtype=torch.int64)
    group.receive(size, giver, 0, _WHAT)
    values = torch.empty(int(size), dtype=torch.uint8)
    for tag, part in enumerate(torch.split(values, _PART_BYTES)):
        group.receive(part, giver, tag + 1, _WHAT)
    return values


def _broadcast(group: Group, giver: int, mine: Tensors | None) -> Tensors:
    """What one member has, for all; those that have it already take part only.

    Args:
        group: of those that hold the same.
        giver: its number there.
        mine: what this one has; None: nothing.
    """
    described = [[*key, dtype_name(t.dtype), list(t.shape), str(t.device.type)] for key, t in (mine or {}).items()]
    raw = np.frombuffer(json.dumps(described if group.rank == giver else []).encode(), np.uint8)
    header = json.loads(group.all_gather_arrays({"header": raw}, _WHAT)[giver]["header"].tobytes())
    given: Tensors = {}
    for kind, name, dtype, shape, device in header:
        place = "cpu" if device == "cpu" else group.device
        values = torch.empty(shape, dtype=getattr(torch, dtype), device=place)
        if group.rank == giver:
            assert mine is not None
            values.copy_(mine[kind, name])
        if values.numel():
            group.finish(group.start_broadcast(values.view(-1).view(torch.uint8), giver), _WHAT)
        given[kind, name] = values
    return given if mine is None else mine
