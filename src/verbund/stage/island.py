"""Joining an island: what every worker of a stage does first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from verbund import task as tasks
from verbund.cluster.supervisor import MEETING
from verbund.cluster.worker import Dismissed, Worker
from verbund.comm.collectives import Group
from verbund.comm.members import Members
from verbund.comm.peer_lost import PeerLost
from verbund.comm.ring import WireGroup
from verbund.comm.sockets import Sockets
from verbund.comm.store import Ask, Store
from verbund.comm.wire.address import Tcp
from verbund.data.loader import Batch, Item, LoaderProcesses, Transform, read
from verbund.data.prepare import Prepared
from verbund.data.samples import Samples
from verbund.data.sets import open_sets
from verbund.job import AXES, Job
from verbund.mesh import device
from verbund.mesh.axes import Mesh
from verbund.mesh.forward import Tables
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.randomness import BatchRandom
from verbund.stage.elastic import goes_on, leaves_out, mesh_of
from verbund.task import Task

_EXAMPLE = 2


def example_of(samples: Samples) -> Batch:
    """A few samples as they are, to learn the shapes that the model is called with."""
    ids = samples.ids(np.arange(min(_EXAMPLE, len(samples))))
    return read(samples, Item(0, ids, training=False), None)


def augmentation(job: Job, task: Task) -> Transform | None:
    """The task's augmentation, drawing from what is keyed by the sample."""
    augment = task.augment
    if augment is None:
        return None

    def transform(batch: Batch) -> Batch:
        random = BatchRandom(job.seed, batch.ticket, torch.from_numpy(batch.ids), "augment")
        return batch.with_columns(augment(batch.columns, random))

    return transform


@dataclass
class Island:
    """This worker's island: its place in the mesh, its peers, the job, the task and the data."""

    job: Job
    task: Task
    mesh: Mesh
    groups: Groups
    train_set: Samples
    validation_set: Samples | None
    loaders: LoaderProcesses | None
    threads: int
    number: int = 0
    """Of this island among those that pull from the same servers, each of which is a mesh of its own."""
    era: int = 0
    """The number of the groups'; -1 of who joins: it is alone until it has a place."""
    present: tuple[int, ...] = ()
    """The numbers of the islands that train together, this one among them."""
    shared_before: int = 0
    """Bytes that went through shared memory in groups that were left."""

    def replica(self, worker: Worker, take_tables: Callable[[nn.Module], Tables] | None = None) -> Replica:
        """This worker's part of the model, without its tables if they lie elsewhere."""
        example = None
        if self.mesh.divides_model:
            samples = self.train_set if len(self.train_set) else self.validation_set
            assert samples is not None
            example = example_of(samples)
        costs, deferred = worker.settings.get("costs"), bool(worker.settings.get("deferred", True))
        return Replica(
            self.task,
            self.job,
            self.mesh,
            self.groups,
            worker.doing,
            example,
            costs,
            deferred,
            take_tables=take_tables,
        )

    @property
    def shared_bytes(self) -> int:
        """Bytes that this process has handed over through shared memory, in all."""
        return self.shared_before + self.groups.shared_bytes

    @property
    def ranks(self) -> list[int]:
        """The workers of all islands that train together, by their place in the mesh."""
        size = self.mesh.size(*AXES)
        return [number * size + place for number in self.present for place in range(size)]

    def meet_islands(self, worker: Worker, era: int, members: Sequence[int]) -> None:
        """Leaves this worker's peers in the other islands, and meets those of an era; its own island stays as it is.

        Args:
            worker: this one.
            era: its number.
            members: the islands, by number, this one among them.

        Raises:
            PeerLost: if one did not come, or the era is over.
        """
        former = self.groups.islands
        if isinstance(former, Group):
            self.shared_before += former.shared_bytes
        former.cut()
        former.close()
        strategy = self.job.strategy.model_copy(update={"islands": len(members)})
        size = strategy.world // len(members)
        mesh = Mesh.of(strategy, members.index(worker.spec.rank // size) * size + worker.spec.rank % size)
        self.groups = replace(self.groups, islands=Group.apart(0, 1, self.groups.island.device))
        islands = _meet_islands(worker, self.job, mesh, self.groups.island.device, era, worker.ask_in(era))
        self.mesh, self.groups, self.era = mesh, replace(self.groups, islands=islands), era

    def meet_anew(self, worker: Worker) -> None:
        """Leaves all groups, and forms those of the newest era.

        Raises:
            PeerLost: if a member did not come, and no later era did.
            Dismissed: if this worker is no member.
        """
        self.shared_before += self.groups.shared_bytes
        self.groups.leave()  # whoever waits there for this worker sees that it is gone
        self.mesh, self.groups, self.era = _met(worker, self.job, self.groups.island.device)
        share = worker.spec.neighbours * self.mesh.world / worker.spec.world
        self.threads = device.use_threads(self.job.cluster.threads, max(1, round(share)))

    def leave_islands(self) -> None:
        """Tells the other islands that this worker needs nothing more of them."""
        if isinstance(self.groups.islands, WireGroup):
            self.groups.islands.leave()

    @staticmethod
    def join(worker: Worker) -> Island:
        """Loads task and data, starts the loader processes, and meets the peers.

        The order matters: loader processes are forked while this process has a single thread, so before the signs of
        life and before anything is computed.
        """
        settings = worker.settings
        job = Job.build(settings["job"], {}, source="job.toml", folder=settings["folder"])
        rank, number = worker.spec.rank, 0
        if job.strategy.exchange.served:
            number, rank = divmod(rank, job.world // job.strategy.islands)
            job = job.model_copy(update={"strategy": job.strategy.inside})
        place = device.choose(worker.spec.place, worker.spec.neighbours)
        threads = device.use_threads(job.cluster.threads, worker.spec.neighbours)
        task = tasks.load(job)
        prepared = Prepared.from_record(settings["prepared"])
        train_set, validation_set = open_sets(prepared, job, task)
        loaders = None
        if job.data.loaders and worker.spec.entry.startswith("verbund.stage.train"):
            loaders = LoaderProcesses(job.data.loaders, train_set, augmentation(job, task))
        worker.supervise()
        worker.doing("joining" if worker.joins else MEETING, 0)
        trains = worker.spec.entry.startswith("verbund.stage.train")
        if trains and leaves_out(job):
            mesh, era = Mesh.of(job.strategy, rank), -1 if worker.joins else 0
            groups = _meet_apart(worker, job, mesh, place, Sockets(), joins=worker.joins)
        elif worker.joins:
            mesh, groups, era = Mesh(), Groups.alone(place), -1
        elif goes_on(job) and not number and trains:
            mesh, groups, era = _met(worker, job, place)
        else:
            mesh, era = Mesh.of(job.strategy, rank), 0
            groups = _meet(worker, job, mesh, place, f"island {number}, life {worker.spec.life}")
        for note in groups.notes():
            worker.send("note", text=note)
        present = tuple(range(job.strategy.islands))
        island = Island(job, task, mesh, groups, train_set, validation_set, loaders, threads, number, era, present)
        worker.at_end.append(island.leave_islands)
        return island


def _met(worker: Worker, job: Job, place: torch.device) -> tuple[Mesh, Groups, int]:
    """The mesh and the groups of the newest era, once all of its members have met."""
    while True:
        era = worker.era
        if worker.spec.rank not in era.members:
            raise Dismissed
        mesh = mesh_of(job, era.members.index(worker.spec.rank), len(era.members))
        try:
            return mesh, _meet(worker, job, mesh, place, f"era {era.number}", worker.ask_in(era.number)), era.number
        except PeerLost:
            if not worker.later_era(era.number, job.cluster.lost_after):
                raise


def _meet(worker: Worker, job: Job, mesh: Mesh, place: torch.device, name: str, ask: Ask | None = None) -> Groups:
    timeout = job.cluster.step_deadline + 60.0
    sockets = Sockets()
    worker.cut, worker.stalled = sockets.shut, sockets.stalled  # also while they meet
    if not job.islands_apart:
        # Without a trusted network all are on one host.
        address = worker.address if job.cluster.trusted_network is not None else "127.0.0.1"
        store = Store(ask or worker.ask, name, timeout, once=True)
        everybody = Group(store, mesh.rank, mesh.world, place, timeout, address, sockets)
        try:
            return Groups.of(mesh, everybody, synchronous=not job.strategy.exchange.local)
        except PeerLost:
            everybody.leave()
            raise
    return _meet_apart(worker, job, mesh, place, sockets)


def _meet_apart(
    worker: Worker, job: Job, mesh: Mesh, place: torch.device, sockets: Sockets, joins: bool = False
) -> Groups:
    """The groups where islands train alone: this worker's island has a group of its own.

    Args:
        worker: this one.
        job: what is trained.
        mesh: the axes.
        place: where tensors lie.
        sockets: get those of the island's own group.
        joins: whether the other islands have begun without this one, which is to meet them later.
    """
    timeout, own = job.cluster.step_deadline + 60.0, mesh.place(*AXES)
    name = f"island {mesh.island}" + (f", life {worker.spec.life}" if worker.spec.life else "")
    address = worker.address if job.cluster.trusted_network is not None else "127.0.0.1"
    island = Group(Store(worker.ask, name, timeout, once=True), own, mesh.size(*AXES), place, timeout, address, sockets)
    worker.stalled = sockets.stalled
    if joins:
        return Groups.apart(mesh, island, Group(None, 0, 1, place, timeout))
    return Groups.apart(mesh, island, _meet_islands(worker, job, mesh, place, 0, worker.ask))


def _meet_islands(worker: Worker, job: Job, mesh: Mesh, place: torch.device, era: int, ask: Ask) -> Members:
    """This worker and its peers at the same place in the other islands, as they are in an era."""
    timeout, own = job.cluster.step_deadline + 60.0, mesh.place(*AXES)
    store = Store(ask, f"islands/{era}/{own}", timeout)
    if mesh.islands == 1:
        return Group(None, 0, 1, place, timeout)
    islands: Members
    if job.islands_apart:
        listen, secret = str(Tcp(worker.address, 0)), worker.meeting.secret
        islands = WireGroup(store, mesh.island, mesh.islands, listen, secret, timeout, f"islands/{own}", place)
    else:
        sockets = Sockets()
        if leaves_out(job):
            worker.cut = sockets.shut  # also while they meet
        address = worker.address if job.cluster.trusted_network is not None else "127.0.0.1"
        islands = Group(store, mesh.island, mesh.islands, place, timeout, address, sockets)
    if leaves_out(job):
        worker.cut = islands.cut
    return islands
