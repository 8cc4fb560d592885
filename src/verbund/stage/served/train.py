"""Training as a worker of an island that pulls from servers: what comes before its first ticket."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from verbund import checkpoint
from verbund.checkpoint.read import Checkpoint
from verbund.cluster.worker import Worker
from verbund.exchange.parameter_server.binding import Binding
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.left_out import CompressedPushes
from verbund.exchange.parameter_server.remote import RemoteTables
from verbund.exchange.parameter_server.served_rows import ServedRows, blocks_of
from verbund.job import Job
from verbund.mesh import probe
from verbund.observe.network import Links
from verbund.run import CHECKPOINTS
from verbund.stage.island import Island, example_of
from verbund.stage.recording import journal_of
from verbund.stage.restore import restore
from verbund.stage.served import meeting
from verbund.stage.served.saving import Saver
from verbund.stage.served.training import Served, Training


def work(worker: Worker) -> dict[str, Any]:
    """A worker's part of a training run, from its fork to its last push."""
    outer = Job.build(worker.settings["job"], {}, source="job.toml", folder=worker.settings["folder"])
    island = Island.join(worker)
    spec = worker.spec
    journal = journal_of(worker, outer)
    links = Links()
    worker.at_end.insert(0, journal.close)
    replica = island.replica(worker, RemoteTables.install)
    remote = replica.tables
    assert isinstance(remote, RemoteTables)
    if (whole := worker.settings["probe"]) is not None:
        worker.doing("comparing the divided model with the whole", 0)
        probe.check(replica, example_of(island.train_set), probe.Probe(**whole), outer.train.precision)
    checkpoints = Path(worker.settings["run"]) / CHECKPOINTS
    if source := worker.settings["checkpoint"]:
        restore(_still_there(Path(source), checkpoints), replica, elsewhere=remote.names)
        replica.optimizer.state.clear()  # servers have read theirs
    settings = outer.strategy.exchange
    binding = Binding(replica, blocks_of(remote, settings.servers), settings.block_bytes)
    plan = binding.plan(settings, outer.train, outer.strategy.islands)
    coordination = meeting.coordination(worker, outer.cluster.step_deadline)
    generation = spec.life + 1
    known = coordination.enter(island.number, generation, plan)
    coordination.watch()
    client = Client(
        plan,
        island.number,
        generation,
        coordination,
        meeting.credentials(worker),
        outer.cluster.step_deadline,
        settings.row_cache,
    )
    rows = ServedRows(remote, client, plan, replica.groups.batch)
    compressed = CompressedPushes(plan, island.number, outer.seed)
    if source and generation == 1 and island.number < outer.strategy.islands:  # others come to what has gone on since
        with Checkpoint.open(_still_there(Path(source), checkpoints), verify=False) as saved:
            note = compressed.load(saved, binding.numbers, island.number, outer.strategy.islands)
        if note is not None and island.number == 0 and island.mesh.leads:
            worker.send("note", text=note)
    served = Served(plan, binding, rows, compressed, client, coordination)
    if island.number == 0 and not known["begun"]:
        worker.doing("giving the servers their first values", int(known["rested"]))
        _begin(served, island, source, int(known["rested"]))
    saver = Saver(worker, checkpoints, replica, plan, client, outer.cluster.step_deadline)
    training = Training(worker, outer, island, replica, served, saver, journal, links, int(known["rested"]))
    worker.at_end.insert(0, training.count)
    journal.event("tickets", whole=not settings.divided)
    journal.add("start", 0, worker.born, time.monotonic_ns())
    worker.send("ready")
    return training.run_to_end()


def _still_there(source: Path, checkpoints: Path) -> Path:
    """The checkpoint that the run begins with, or for who comes later the newest one: what servers do not have, such as
    frozen parameters, is the same in it."""
    return source if source.exists() else checkpoint.newest_valid(checkpoints)[0]


def _begin(served: Served, island: Island, source: str | None, step: int) -> None:
    """Gives the servers the model's first values, or has them load a checkpoint's; harmless when repeated."""
    client, leads = served.client, island.mesh.leads
    if source is None:
        rows = served.rows.first(served.plan) if leads else []
        for block, values in [*(served.binding.read() if served.binding.speaks else []), *rows]:
            client.begin(block, values)
    elif leads:
        client.load(source, step)
    island.groups.island.all_reduce(torch.zeros(1), "the beginning")
    if leads:
        served.coordination.begun()
