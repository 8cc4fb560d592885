"""Joining an island: what every worker of a stage does first."""

from __future__ import annotations

from dataclasses import dataclass

from verbund import task as tasks
from verbund.cluster.worker import Worker
from verbund.comm.collectives import Group
from verbund.data.loader import LoaderProcesses
from verbund.data.prepare import Prepared
from verbund.data.samples import Samples
from verbund.data.sets import open_sets
from verbund.job import Job
from verbund.mesh import device
from verbund.mesh.axes import Mesh
from verbund.task import Task


@dataclass
class Island:
    """This worker's island: its place in the mesh, its peers, the job, the task and the data."""

    job: Job
    task: Task
    mesh: Mesh
    group: Group
    train_set: Samples
    validation_set: Samples | None
    loaders: LoaderProcesses | None
    threads: int

    @staticmethod
    def join(worker: Worker) -> Island:
        """Loads task and data, starts the loader processes, and meets the peers.

        The order matters: loader processes are forked while this process has a single thread, so before the signs of
        life and before anything is computed.
        """
        settings = worker.settings
        job = Job.build(settings["job"], {}, source="job.toml", folder=settings["folder"])
        world, rank = worker.spec.world, worker.spec.rank
        place = device.choose(rank, world)
        threads = device.use_threads(job.cluster.threads, world)
        task = tasks.load(job)
        prepared = Prepared.from_record(settings["prepared"])
        train_set, validation_set = open_sets(prepared, job, task)
        loaders = LoaderProcesses(job.data.loaders, train_set) if job.data.loaders else None
        worker.supervise()
        worker.doing("meeting the other workers", 0)
        store = worker.meeting.store(settings["store"])
        group = Group(store, rank, world, place, job.cluster.step_deadline + 60.0)
        return Island(job, task, Mesh(world, rank), group, train_set, validation_set, loaders, threads)
