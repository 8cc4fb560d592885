"""The simulation of a federation: what every worker of `verbund train` does where the exchange is `federated`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.cluster.worker import Worker
from verbund.data.prepare import Prepared
from verbund.exchange.federated.partition import Parts
from verbund.job import Strategy
from verbund.job.federated import PERSONAL
from verbund.mesh import equality
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal
from verbund.observe.network import Links
from verbund.run import CHECKPOINTS
from verbund.stage import flags
from verbund.stage.federated.asynchronous import AsynchronousRounds
from verbund.stage.federated.clients import Clients, Compressing
from verbund.stage.federated.local import LocalTraining
from verbund.stage.federated.parts import parts_alike, parts_of
from verbund.stage.federated.personal import evaluate_personal
from verbund.stage.federated.rounds import Round, Rounds
from verbund.stage.federated.simulated_server import SimulatedServer
from verbund.stage.federated.vectorised import clients_of
from verbund.stage.island import Island, augmentation
from verbund.stage.judge import Judge
from verbund.stage.lengths import Lengths
from verbund.stage.recording import count, journal_of
from verbund.stage.restore import restore
from verbund.stage.saving import Saver, state_of
from verbund.stage.validate import evaluate

_PROGRESS_SECONDS = 0.1


def work(worker: Worker) -> dict[str, Any]:
    """A worker's part of a simulation, from its fork to its last checkpoint."""
    island = Island.join(worker)
    job = island.job
    journal = journal_of(worker, job)
    links = Links()
    worker.at_end.insert(0, lambda: _close(journal, links, island))
    # Each client is trained by one worker, with a model of its own.
    alone = job.model_copy(update={"strategy": Strategy(exchange=job.strategy.exchange)})
    replica = Replica(island.task, alone, Mesh(), Groups.alone(island.groups.island.device), worker.doing)
    source = worker.settings["checkpoint"]
    saved_at = worker.location(source) if source else None
    state = restore(saved_at, replica) if saved_at is not None else {}
    prepared = Prepared.from_record(worker.settings["prepared"])
    parts = parts_of(job, island.train_set, prepared.train)
    total = worker.settings["total_steps"]
    local = LocalTraining(replica, alone, island.train_set, augmentation(job, island.task), total)
    server = SimulatedServer(job, local, parts)
    dropped: list[str] = []
    if saved_at is not None:
        with Checkpoint.open(saved_at, verify=False) as saved:
            dropped += server.load(saved)
    leads = island.mesh.rank == 0
    clients: Clients = clients_of(local, parts, lambda text: worker.send("note", text=text) if leads else None)
    if local.compression is not None:
        clients = Compressing(clients, local.compression)
    kind = AsynchronousRounds if job.strategy.exchange.asynchronous(parts.clients) else Rounds
    rounds = kind(job, server, clients, parts, island.groups.island)
    if saved_at is not None:
        with Checkpoint.open(saved_at, verify=False) as saved:
            dropped += rounds.load(saved)
    if job.strategy.exchange.statistics and leads:
        worker.send("note", text="`exchange.statistics` are asked of real clients alone")
    for text in dropped if leads else ():
        worker.send("note", text=text)
    tastes = None
    if island.validation_set is not None and job.strategy.exchange.rule.name in PERSONAL:
        theirs = prepared.validation or prepared.train
        tastes = parts_alike(job, parts, island.train_set, prepared.train, island.validation_set, theirs)
        if leads:
            worker.send("note", text="Validated are the clients' own models, each on samples like the client's")
    simulation = _Simulation(worker, island, local, server, rounds, parts, tastes, journal, links, state)
    journal.add("start", 0, worker.born, time.monotonic_ns())
    return simulation.run_to_end()


def _close(journal: Journal, links: Links, island: Island) -> None:
    count(journal, links, island.shared_bytes)
    journal.close()


class _Simulation:
    """The rounds from where a run is to one of its ends."""

    def __init__(
        self,
        worker: Worker,
        island: Island,
        local: LocalTraining,
        server: SimulatedServer,
        rounds: Rounds,
        parts: Parts,
        tastes: Parts | None,
        journal: Journal,
        links: Links,
        state: dict[str, Any],
    ) -> None:
        self.worker, self.island, self.local, self.server = worker, island, local, server
        self.replica, self._tastes = local.replica, tastes
        self.rounds, self.parts, self.journal, self.links = rounds, parts, journal, links
        self.job, self.rank = island.job, island.mesh.rank
        self.lengths = Lengths(self.job.train, self.job.strategy.exchange.rounds_per_epoch(parts.clients))
        checkpoints = worker.location(worker.settings["run"]) / CHECKPOINTS
        deadline = self.job.cluster.step_deadline
        self.saver = Saver(worker, checkpoints, self.replica, deadline, mesh=island.mesh, more=self._pieces)
        self.step = self._first = int(state.get("step", 0))
        self.samples = int(state.get("samples", 0))
        self.judge = Judge(self.job.train, state)
        self.former_seconds = float(state.get("seconds", 0.0))
        self.begun = time.monotonic()
        self.loss = math.nan
        self._reported, self._reported_samples = 0.0, self.samples
        self._validated = -1

    def _pieces(self) -> Iterator[Piece]:
        """What the first worker saves of the exchange, for all have the same."""
        return chain(self.server.pieces(), self.rounds.pieces()) if self.rank == 0 else iter(())

    def run_to_end(self) -> dict[str, Any]:
        """Plays rounds until one of the job's ends is reached or a stop is asked for."""
        reason = self.lengths.reached(self.step)
        if reason is not None and self.rank == 0:
            done = f"Nothing to do: the run has had its {reason} ({self.step} rounds)"
            self.worker.send("note", text=f"{done}. Raise `train.{reason}` to train on")
        self._look_ahead(reason)
        while reason is None:
            number = self.step
            if not self.rounds.affordable(number):
                reason = "budget"
                break
            self.worker.doing("training clients", number)
            start = time.monotonic_ns()
            played = self.rounds.play(number, self._flag())
            self.journal.add("compute", number, start, time.monotonic_ns())
            self.step += 1
            self.samples += int(played.samples)
            self._record(number, played)
            if self.job.train.check_replicas and self.step % self.job.train.check_replicas == 0:
                names, values = zip(*self.server.parameters.items(), strict=True)
                ranks = list(range(self.island.mesh.world))
                equality.check(list(names), list(values), self.island.groups.island, ranks, self.step)
            reason = self.lengths.reached(self.step) or flags.ends(played.flag)
            reason = self._after_round(reason)
        self._finish(reason)
        return {
            "stopped_by": reason,
            "steps": self.step,
            "samples": self.samples,
            "threads": self.island.threads,
            "randomness": self.replica.randomness.report(),
        }

    # -- the ends ------------------------------------------------------------------------------------------------

    def _look_ahead(self, reason: str | None) -> None:
        """Says before the first round if the privacy budget will end the training."""
        total = self.worker.settings["total_steps"]
        rounds = total - self.step if total is not None else 0
        if self.rank == 0 and reason is None and (text := self.server.outlook(rounds)):
            self.worker.send("note", text=text)

    def _flag(self) -> float:
        late = self.job.train.seconds is not None and self._elapsed() >= self.job.train.seconds
        return flags.INTERRUPT if self.worker.stopping else flags.TIME if self.rank == 0 and late else 0.0

    def _elapsed(self) -> float:
        return self.former_seconds + time.monotonic() - self.begun

    # -- after a round -------------------------------------------------------------------------------------------

    def _record(self, number: int, played: Round) -> None:
        now = time.monotonic()
        self.loss = played.loss / played.weight if played.weight else math.nan
        if self.rank == 0:
            rate = float(self.replica.optimizer.param_groups[0]["lr"])
            self.journal.step(number, self.loss, played.weight, int(played.samples), rate)
            record = played.record(number, self.rounds.down, self.rounds.up)
            self.journal.event("round", **record, cpu=time.process_time())
            if now - self._reported >= _PROGRESS_SECONDS:
                speed = (self.samples - self._reported_samples) / (now - self._reported) if self._reported else 0.0
                self.worker.mention("progress", step=self.step, loss=self.loss, samples_per_second=speed)
                self._reported, self._reported_samples = now, self.samples
        if self.journal.due:
            self._write()

    def _write(self) -> None:
        count(self.journal, self.links, self.island.shared_bytes)
        self.journal.flush()

    def _after_round(self, reason: str | None) -> str | None:
        if self.lengths.due(self.job.validate_.every, self.step) and self.island.validation_set is not None:
            reason = self._validate() or reason
        if self.lengths.due(self.job.checkpoint.every, self.step):
            self._save()
        return reason

    def _validate(self) -> str | None:
        assert self.island.validation_set is not None
        self._validated = self.step
        start = time.monotonic_ns()
        self.worker.doing("validating", self.step)
        self.server.show()
        if self._tastes is not None:
            metrics = evaluate_personal(self.local, self.server, self.island.validation_set, self._tastes, self.island)
        else:
            metrics = evaluate(self.replica, self.island.validation_set, self.island)
        self.journal.add("validate", self.step, start, time.monotonic_ns())
        if self.rank == 0:
            self.journal.event("validation", step=self.step, metrics=metrics)
            self.worker.send("validation", step=self.step, metrics=metrics)
        return self.judge.ends(metrics, self.step)

    def _save(self) -> None:
        self._write()
        start = time.monotonic_ns()
        self.worker.doing("saving", self.step)
        self.server.show()
        self.replica.optimizer.state.clear()  # a client's own, of a round that is over
        self.saver.save(
            self.step,
            state_of(
                self.job,
                self.worker.settings["data"],
                self.step,
                self.samples,
                self._elapsed(),
                self.judge,
                exchange={**self.server.record(), **self.rounds.record()},
            ),
        )
        self.journal.add("checkpoint", self.step, start, time.monotonic_ns())

    def _finish(self, reason: str | None) -> None:
        """The last validation and checkpoint, and the wait until it is written."""
        if reason != "interrupt" and self.island.validation_set is not None and self._validated != self.step:
            self._validate()
        if self.saver.last != self.step:
            self._save()
        self._tell()
        self._write()
        start = time.monotonic_ns()
        self.worker.doing("saving", self.step)
        self.saver.wait()
        self.journal.add("checkpoint", self.step, start, time.monotonic_ns())
        if self.rank == 0 and self.step > self._first:
            self.worker.send("progress", step=self.step, loss=self.loss, samples_per_second=0.0)

    def _tell(self) -> None:
        """What privacy was spent, for the report."""
        if self.rank == 0 and (accountant := self.server.accountant) is not None:
            spent = accountant.summary()
            self.journal.event("privacy", **spent)
