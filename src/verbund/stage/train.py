"""Training: what every worker runs, from its fork to its last checkpoint, whoever comes and goes meanwhile."""

from __future__ import annotations

import gc
import time
from typing import Any

from verbund.cluster.supervisor import MEETING
from verbund.cluster.worker import Dismissed, Worker
from verbund.comm.peer_lost import PeerLost
from verbund.errors import RunFailed
from verbund.exchange.local_steps import LocalSteps
from verbund.mesh import probe
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal
from verbund.observe.network import Links
from verbund.run import CHECKPOINTS
from verbund.stage import orphans
from verbund.stage.among_islands import AmongIslands
from verbund.stage.borders import Borders, LeftOut
from verbund.stage.elastic import goes_on, leaves_out
from verbund.stage.island import Island, example_of
from verbund.stage.mirrors import Mirrors
from verbund.stage.recording import count, journal_of
from verbund.stage.recovery import bring_together
from verbund.stage.refill import refills
from verbund.stage.regain import Held, regain, take_place
from verbund.stage.restore import restore, restore_exchange
from verbund.stage.saving import Saver
from verbund.stage.step_record import StepRecord, count_combined
from verbund.stage.steps import Steps
from verbund.stage.stopping import Agreement
from verbund.stage.tickets import Tickets
from verbund.stage.training_state import TrainingState


def work(worker: Worker) -> dict[str, Any]:
    """A worker's part of a training run, from its fork to its last checkpoint."""
    island = Island.join(worker)
    orphans.hold(worker)
    job = island.job
    journal = journal_of(worker, job)
    links = Links()
    # Before this worker leaves its peers: a connection that they have ended tells no more what it moved.
    worker.at_end.insert(0, lambda: _close(journal, links, island))
    mirrors = Mirrors.of(worker, job)
    refilled = False
    if refills(job):
        replica, state, refilled = take_place(worker, island, mirrors, lambda: _begun(worker, island))
    else:
        replica, state = _begun(worker, island)
    source = worker.settings["checkpoint"] if not (worker.joins or refilled) else None
    tickets = _tickets(island, replica)
    borders = exchange = None
    if leaves_out(job):
        borders = Borders(worker, job.cluster.step_deadline + job.cluster.lost_after)
    if job.strategy.exchange.local:
        exchange = LocalSteps(job.strategy.exchange, replica, journal, job.seed, borders)
    dropped = restore_exchange(worker.location(source), replica, exchange) if source else []
    if island.mesh.rank == 0:
        for text in dropped:
            worker.send("note", text=text)
    held = {} if exchange is None else {"exchange": exchange.held_bytes()}
    if replica.pipeline is not None and island.mesh.rank == 0:
        journal.event("pipeline", **replica.pipeline_plan(tickets.sizes(0)))
    training = _Training(worker, island, replica, tickets, exchange, journal, links, state, mirrors, refilled, borders)
    worker.at_end.insert(0, lambda: journal.totals("held", **training.replica.held_bytes(), **held))
    worker.at_end.insert(0, lambda: count_combined(journal, training.replica, exchange))
    if worker.joins:
        worker.send("ready")
    try:
        return training.run_to_end()
    except Dismissed:
        training.saver.wait()
        return {"stopped_by": "left"}


def _begun(worker: Worker, island: Island) -> tuple[Replica, dict[str, Any]]:
    """A replica as a run begins with it, and the training's state: of a checkpoint, if there is one."""
    replica = island.replica(worker)
    if (whole := worker.settings["probe"]) is not None:
        worker.doing("comparing the divided model with the whole", 0)
        probe.check(replica, example_of(island.train_set), probe.Probe(**whole), island.job.train.precision)
    replica.optimizer_step.atomic = refills(island.job)
    source = worker.settings["checkpoint"] if not worker.joins else None
    return replica, restore(worker.location(source), replica) if source else {}


def _tickets(island: Island, replica: Replica) -> Tickets:
    """The tickets as this worker's island shares them by the replica's balance."""
    return Tickets(island.train_set, island.job, island.mesh, replica.division.unit, replica.balance)


def _close(journal: Journal, links: Links, island: Island) -> None:
    count(journal, links, island.shared_bytes)
    journal.close()


class _Training:
    """A worker's part of a training, whoever comes and goes: each time that the members change, all meet anew."""

    def __init__(
        self,
        worker: Worker,
        island: Island,
        replica: Replica,
        tickets: Tickets,
        exchange: LocalSteps | None,
        journal: Journal,
        links: Links,
        state: dict[str, Any],
        mirrors: Mirrors | None,
        refilled: bool,
        borders: Borders | None = None,
    ) -> None:
        job = island.job
        self.worker, self.island, self.replica, self.journal, self.job = worker, island, replica, journal, job
        self.tickets, self.exchange = tickets, exchange
        checkpoints = worker.location(worker.settings["run"]) / CHECKPOINTS
        self.saver = Saver(worker, checkpoints, replica, job.cluster.step_deadline, exchange)
        self._agreement = Agreement(worker, job.cluster.step_deadline) if exchange is not None else None
        self.state = TrainingState(job.train, worker.settings["total_steps"], state)
        self._goes_on = goes_on(job)
        self._record = StepRecord(worker, island, journal, links, exchange, self._goes_on, self.state.samples)
        self._among: AmongIslands | None = None
        if borders is not None and exchange is not None:
            self._among = AmongIslands(worker, borders, island, replica, exchange, self._record, self.state)
        self._mirrors = mirrors
        self._refilled = refilled
        """Whether it has taken the place of a lost worker, with all that that had."""
        self._kept: Held | None = None
        self._begun_with = state
        self._new = worker.joins and not refilled
        """Whether it has nothing yet of what the others have trained."""

    def run_to_end(self) -> dict[str, Any]:
        """Trains until one of the job's ends is reached or a stop is asked for.

        Raises:
            Dismissed: if the others go on without this worker.
        """
        enter, lost = self._begin, False
        while True:
            try:
                again = enter(lost)
                enter, lost = self._regroup, False
                if self._goes_on or self._among is not None:
                    self.worker.send("met", era=self.island.era)
                reason = self._steps().run(again)
                if reason != "change":
                    break
            except LeftOut:
                enter = self._come_back
            except PeerLost:
                if not self._goes_on or self.worker.orphaned:
                    raise
                enter, lost = self._regroup, True
        return {
            "stopped_by": reason,
            "steps": self.state.step,
            "samples": self.state.samples,
            "samples_lost": self.state.samples_lost,
            "threads": self.island.threads,
            "randomness": self.replica.randomness.report(),
        }

    def _begin(self, lost: bool) -> bool:
        """Compares the replicas, or takes a place among those who have begun; see `_regroup`."""
        if self._refilled:
            self._record.again(self._begun_with, self.state.step)
            again = True
        elif self._new:
            again = self._regroup(lost) if self._among is None else self._come_back(lost)
        elif self.island.era > 0 and not refills(self.job):  # a worker was lost before all had met
            again = self._catch_up(lost=True)
        else:
            self.replica.check_equal(self.state.step)
            again = False
        self.journal.add("start", 0, self.worker.born, time.monotonic_ns())
        return again

    def _regroup(self, lost: bool) -> bool:
        """Meets the members of the next era as soon as there is one, and goes on with them from the newest step that
        anybody has done.

        Args:
            lost: whether a worker was lost; else the border of a step has come at which members change.

        Returns:
            whether what is due after that step may not have been done by all.

        Raises:
            PeerLost: if a member is lost meanwhile, or no era has come.
            Dismissed: if this worker is no member any more.
        """
        if self._among is not None:  # its islands have met
            self.tickets = _tickets(self.island, self.replica)
            return False
        limits = self.job.cluster
        if not self.worker.joins:
            self.worker.doing(MEETING, self.state.step)
        # A worker that is to come may take as long as a step to load task and data, and to build the model.
        if not self.worker.later_era(self.island.era, limits.step_deadline + limits.lost_after):
            raise RunFailed("a worker was lost, and the supervisor has not said who goes on")
        self.worker.joins = False
        self.worker.doing(MEETING, self.state.step)
        self.saver.wait()
        if not self._new:
            self._record.write(self.replica)  # what its connections have moved can be read as long as they are there
        held = self._held(lost) if refills(self.job) else None
        self.island.meet_anew(self.worker)
        if held is not None:
            self._regain(held, lost)
            del held
            gc.collect()  # the former replica, the parts of which refer to each other
            return True
        self.replica.regroup(self.island.mesh, self.island.groups)
        self.tickets = _tickets(self.island, self.replica)
        return self._catch_up(lost)

    def _come_back(self, lost: bool) -> bool:
        """Takes part again, where the others have gone on without this worker's island; see `_regroup`."""
        assert self._among is not None
        self.saver.wait()
        if not self._new:
            self._record.write(self.replica)
        self._among.come_back()
        self._new = False
        self.tickets = _tickets(self.island, self.replica)
        if self.exchange is not None and self.tickets.lengths.reached(self.state.step) is not None:
            self.exchange.finish(self.state.step)
        return True

    def _steps(self) -> Steps:
        """The training among the members that have met."""
        return Steps(
            self.worker,
            self.island,
            self.replica,
            self.tickets,
            self.exchange,
            self._agreement,
            self.saver,
            self._mirrors,
            self._record,
            self.state,
            self._among,
        )

    def _known(self) -> dict[str, Any]:
        """What another worker needs to go on from here besides the replica's tensors, JSON values."""
        scale = self.replica.loss_scale
        return self.state.known(scale.state() if scale else None, self._record.recent)

    def _held(self, lost: bool) -> Held:
        """What this worker has trained, for when all meet anew."""
        if self._kept is None:
            self.replica.optimizer_step.undo()
            if self._mirrors is not None and not lost:  # who is asked to end leaves it to the others
                self._mirrors.take(self.state.step, self._known(), self.replica.state.tensors())
                self._mirrors.finish()
            self._kept = Held(self.replica, self.state.step, self._known())
        return self._kept

    def _regain(self, held: Held, lost: bool) -> None:
        """Goes on with a replica that is filled from memory, from where all can."""
        self.replica, choice, state = regain(self.worker, self.island, self._mirrors, held)
        self.saver.replica, self._kept = self.replica, None
        self.tickets = _tickets(self.island, self.replica)
        self.state.go_on(choice.step, state, new=False)
        self._tell_regrouped(lost)
        self._record.again(state, choice.step)

    def _tell_regrouped(self, lost: bool) -> None:
        seconds = round(time.monotonic() - self._record.done_at, 4)
        self.journal.event("regrouped", era=self.island.era, step=self.state.step, seconds=seconds, lost=lost)

    def _catch_up(self, lost: bool) -> bool:
        """Comes to the newest step that a member has done; see `_regroup`."""
        step = None if self._new else self.state.step
        newest, known, lost = bring_together(self.replica, step, self._known(), lost)
        if self.state.go_on(newest, known, self._new) and self.replica.loss_scale is not None:
            self.replica.loss_scale.load(known["loss_scale"])
        if self._new:
            self.state.take_seconds(known)
        else:
            self._tell_regrouped(lost)
        self._new = False
        self._record.again(known, newest)
        return lost
