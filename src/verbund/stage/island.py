"""Joining an island: what every worker of a stage does first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from verbund import task as tasks
from verbund.cluster.supervisor import MEETING
from verbund.cluster.worker import Dismissed, Worker
from verbund.comm.collectives import Group
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
from verbund.stage.elastic import goes_on, mesh_of
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
        if worker.joins:
            mesh, groups, era = Mesh(), Groups.alone(place), -1
        elif goes_on(job) and not number and worker.spec.entry.startswith("verbund.stage.train"):
            mesh, groups, era = _met(worker, job, place)
        else:
            mesh, era = Mesh.of(job.strategy, rank), 0
            groups = _meet(worker, job, mesh, place, f"island {number}, life {worker.spec.life}")
        for note in groups.notes():
            worker.send("note", text=note)
        return Island(job, task, mesh, groups, train_set, validation_set, loaders, threads, number, era)


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
        store = Store(ask or worker.ask, name, timeout)
        everybody = Group(store, mesh.rank, mesh.world, place, timeout, address, sockets)
        try:
            return Groups.of(mesh, everybody, synchronous=not job.strategy.exchange.local)
        except PeerLost:
            everybody.leave()
            raise
    own = mesh.place(*AXES)
    store = Store(worker.ask, f"island {mesh.island}", timeout)
    island = Group(store, own, mesh.size(*AXES), place, timeout, sockets=sockets)
    islands = WireGroup(
        Store(worker.ask, "islands", timeout),
        mesh.island,
        mesh.islands,
        str(Tcp(worker.address, 0)),
        worker.meeting.secret,
        timeout,
        f"islands/{own}",
        place,
    )
    worker.at_end.append(islands.leave)
    return Groups.apart(mesh, island, islands)
