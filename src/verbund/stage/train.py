"""Training: the loop that every worker runs."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from verbund.cluster.supervisor import MEETING
from verbund.cluster.worker import Dismissed, Worker
from verbund.comm.peer_lost import PeerLost
from verbund.data.loader import Batch, Item, Loader
from verbund.errors import RunFailed
from verbund.exchange.local_steps import LocalSteps
from verbund.mesh import probe
from verbund.mesh.data import StepSums
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal
from verbund.observe.network import Links
from verbund.run import CHECKPOINTS
from verbund.stage import flags
from verbund.stage.elastic import goes_on
from verbund.stage.island import Island, augmentation, example_of
from verbund.stage.judge import Judge
from verbund.stage.mirrors import Mirrors
from verbund.stage.paces import Paces
from verbund.stage.recording import count, journal_of
from verbund.stage.recovery import bring_together
from verbund.stage.refill import refills
from verbund.stage.regain import Held, regain, take_place
from verbund.stage.restore import restore, restore_exchange
from verbund.stage.saving import Saver, state_of
from verbund.stage.stopping import Agreement
from verbund.stage.tickets import Tickets
from verbund.stage.validate import evaluate

_PROGRESS_SECONDS = 0.1
_RECENT_SECONDS = 3.0
"""For how long all workers keep what they know of steps, which one of them journals once a second."""
# Their numbers among a step's collectives, beyond those of any gradients.
_GATHERING, _COMPARISON = 1 << 20, (1 << 20) + 1


def work(worker: Worker) -> dict[str, Any]:
    """A worker's part of a training run, from its fork to its last checkpoint."""
    island = Island.join(worker)
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
    exchange = None
    if job.strategy.exchange.local:
        exchange = LocalSteps(job.strategy.exchange, replica, tickets.sizes, journal, job.seed)
    dropped = restore_exchange(worker.location(source), replica, exchange) if source else []
    if island.mesh.rank == 0:
        for text in dropped:
            worker.send("note", text=text)
    held = {} if exchange is None else {"exchange": exchange.held_bytes()}
    if replica.pipeline is not None and island.mesh.rank == 0:
        journal.event("pipeline", **replica.pipeline_plan(tickets.sizes(0)))
    training = _Training(worker, island, replica, tickets, exchange, journal, links, state, mirrors, refilled)
    worker.at_end.insert(0, lambda: journal.totals("held", **training.replica.held_bytes(), **held))
    worker.at_end.insert(0, lambda: _count_combined(journal, training.replica, exchange))
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
    replica.atomic = refills(island.job)
    source = worker.settings["checkpoint"] if not worker.joins else None
    return replica, restore(worker.location(source), replica) if source else {}


def _tickets(island: Island, replica: Replica) -> Tickets:
    """The tickets as this worker's island shares them by the replica's balance."""
    return Tickets(island.train_set, island.job, island.mesh, replica.division.unit, replica.balance)


def _close(journal: Journal, links: Links, island: Island) -> None:
    count(journal, links, island.shared_bytes)
    journal.close()


def _count_combined(journal: Journal, replica: Replica, exchange: LocalSteps | None) -> None:
    """Records the running totals of what replicas and islands sent each other."""
    if exchange is not None:
        journal.totals("exchange", **exchange.totals())
    if replica.compression is not None:
        journal.totals("compression", **replica.compression.totals())


class _Training:
    """The state of a training besides the replica's: where it is, what was best, why it ends."""

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
    ) -> None:
        job = island.job
        self.worker, self.island, self.replica, self.journal, self.links = (
            worker,
            island,
            replica,
            journal,
            links,
        )
        self.job = job
        self.tickets, self.exchange = tickets, exchange
        checkpoints = worker.location(worker.settings["run"]) / CHECKPOINTS
        self.saver = Saver(worker, checkpoints, replica, job.cluster.step_deadline, exchange)
        self._agreement = Agreement(worker, job.cluster.step_deadline) if exchange is not None else None
        self.total_steps: int | None = worker.settings["total_steps"]
        self.step = int(state.get("step", 0))
        self._first_step = int(state.get("first_step", self.step))
        self.samples = int(state.get("samples", 0))
        self.judge = Judge(job.train, state)
        self.former_seconds = float(state.get("seconds", 0.0))
        self.begun = time.monotonic()
        self.loss = math.nan
        self._reported = 0.0
        self._reported_samples = self.samples
        self._validated = self._saved = -1
        self._goes_on = goes_on(job)
        self._done_at = self.begun
        """When the last step was done."""
        self._mirrors = mirrors
        self._refilled = refilled
        """Whether it has taken the place of a lost worker, with all that that had."""
        self._kept: Held | None = None
        self._state = state
        self._new = worker.joins and not refilled
        """Whether it has nothing yet of what the others have trained."""
        self._recent: deque[tuple[float, tuple[int, float, float, int, float]]] = deque()
        """What the journal of another worker has of the last steps, and when they were done."""

    @property
    def rank(self) -> int:
        """This worker's place among the members; the first speaks for all."""
        return self.island.mesh.rank

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
                if self._goes_on:
                    self.worker.send("met", era=self.island.era)
                reason = self._train(again)
                if reason != "change":
                    break
            except PeerLost:
                if not self._goes_on or self.worker.orphaned:
                    raise
                enter, lost = self._regroup, True
        return {
            "stopped_by": reason,
            "steps": self.step,
            "samples": self.samples,
            "threads": self.island.threads,
            "randomness": self.replica.randomness.report(),
        }

    def _begin(self, lost: bool) -> bool:
        """Compares the replicas, or takes a place among those who have begun; see `_regroup`."""
        if self._refilled:
            self._record_again(self._state)
            again = True
        elif self._new:
            again = self._regroup(lost)
        elif self.island.era > 0 and not refills(self.job):  # a worker was lost before all had met
            again = self._catch_up(lost=True)
        else:
            self.replica.check_equal(self.step)
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
        limits = self.job.cluster
        if not self.worker.joins:
            self.worker.doing(MEETING, self.step)
        # A worker that is to come may take as long as a step to load task and data, and to build the model.
        if not self.worker.later_era(self.island.era, limits.step_deadline + limits.lost_after):
            raise RunFailed("a worker was lost, and the supervisor has not said who goes on")
        self.worker.joins = False
        self.worker.doing(MEETING, self.step)
        self.saver.wait()
        if not self._new:
            self._write()  # what its connections have moved can be read as long as they are there
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

    def _known(self) -> dict[str, Any]:
        """What another worker needs to go on from here besides the replica's tensors, JSON values."""
        return {
            "step": self.step,
            "samples": self.samples,
            "first_step": self._first_step,
            "seconds": self._elapsed(),
            "loss_scale": self.replica.loss_scale.state() if self.replica.loss_scale else None,
            "recent": [row for _, row in self._recent],
            "judged": self.judge.judged,
            **self.judge.state(),
        }

    def _held(self, lost: bool) -> Held:
        """What this worker has trained, for when all meet anew."""
        if self._kept is None:
            self.replica.undo()
            if self._mirrors is not None and not lost:  # who is asked to end leaves it to the others
                self._mirrors.take(self.step, self._known(), self.replica.state.tensors())
                self._mirrors.finish()
            self._kept = Held(self.replica, self.step, self._known())
        return self._kept

    def _regain(self, held: Held, lost: bool) -> None:
        """Goes on with a replica that is filled from memory, from where all can."""
        self.replica, choice, state = regain(self.worker, self.island, self._mirrors, held)
        self.saver.replica, self._kept = self.replica, None
        self.tickets = _tickets(self.island, self.replica)
        if choice.step != self.step:
            self.judge = Judge(self.job.train, state)
        self.step, self.samples = choice.step, int(state["samples"])
        self._validated = self._saved = -1
        self._tell_regrouped(lost)
        self._record_again(state)

    def _tell_regrouped(self, lost: bool) -> None:
        seconds = round(time.monotonic() - self._done_at, 4)
        self.journal.event("regrouped", era=self.island.era, step=self.step, seconds=seconds, lost=lost)

    def _record_again(self, state: dict[str, Any]) -> None:
        """Whoever journaled the last steps may have gone before it wrote them, or not have come so far."""
        if self.rank == 0:
            for row in {int(row[0]): row for row in [*(row for _, row in self._recent), *state["recent"]]}.values():
                if row[0] < self.step:
                    self.journal.step(*row)

    def _catch_up(self, lost: bool) -> bool:
        """Comes to the newest step that a member has done; see `_regroup`."""
        step = None if self._new else self.step
        self.step, state, lost = bring_together(self.replica, step, self._known(), lost)
        self.samples, self._first_step = int(state["samples"]), int(state["first_step"])
        self._validated = self._saved = -1  # what some have not finished is done again by all
        if step != self.step:
            self.judge = Judge(self.job.train, state)
            if self.replica.loss_scale is not None:
                self.replica.loss_scale.load(state["loss_scale"])
        if step is None:
            self.former_seconds = float(state["seconds"]) - (time.monotonic() - self.begun)
        else:
            self._tell_regrouped(lost)
        self._new = False
        self._record_again(state)
        return lost

    def _train(self, again: bool) -> str | None:
        """Trains to the end, and says why it is there.

        Args:
            again: what is due after the last step may not have been done by all.
        """
        train, rank = self.job.train, self.rank
        reason = self.tickets.lengths.reached(self.step) or self._stopped(0.0)
        self.replica.balance.begin(self.step, self.tickets.whole)
        self._paces = Paces(self.worker, self.island.mesh, self.exchange is None, self._members())
        if again:
            if self.step > self._first_step:
                reason = self._after_step(reason)
        elif reason is not None and rank == 0 and self.island.era == 0:
            text = (
                f"Nothing to do: the run has had its {reason} ({self.step} steps). Raise `train.{reason}` to train on"
            )
            self.worker.send("note", text=text)
        if self.exchange is not None and reason is not None and reason != "interrupt":
            self.exchange.finish(self.step)  # it was interrupted where it is to end now
        transform = augmentation(self.job, self.island.task)
        loader = Loader(
            self.island.train_set,
            self._plan(),
            transform=transform,
            prefetch=self.job.data.prefetch,
            processes=self.island.loaders,
        )
        batches = self._read(iter(loader))
        try:
            while reason is None:
                step = self.step
                sizes = self.tickets.sizes(step)
                count = len(self.replica.plan(sizes, step))
                sums = self.replica.gradients(batches, count, step, sizes, self._flag(), self.journal)
                began = time.monotonic_ns()
                if self._mirrors is not None:
                    self._mirrors.finish(step + 1)
                self.replica.update(step, sizes, sums, self.total_steps)
                self.loss = sums.loss / sums.weight if sums.weight else math.nan
                if not math.isfinite(self.loss) and sums.weight and self.replica.loss_scale is None:
                    raise self._diverged(step)
                self.step += 1
                self.samples += sum(sizes)
                self._paces.record(self.replica.balance.counts(step, sizes), sums.told)
                if train.check_replicas and self.step % train.check_replicas == 0:
                    compared = time.monotonic_ns()
                    self.replica.check_equal(self.step)
                    self._collective(_COMPARISON, compared, time.monotonic_ns())
                self.journal.add("compute", step, began, time.monotonic_ns())
                self._record(step, sums.weight, sum(self.replica.joint(sizes)))
                if self._mirrors is not None and self._mirrors.due(self.step):
                    self._mirror()
                # Who is done anyway is not interrupted.
                reason = self.tickets.lengths.reached(self.step) or self._stopped(sums.flags)
                if self.exchange is not None:
                    self._combine(self.exchange, sums, reason)
                reason = self._after_step(reason)
                if reason is None and flags.changes(sums.flags):
                    return "change"
        finally:
            loader.close()
        self._finish(reason)
        return reason

    def _mirror(self) -> None:
        assert self._mirrors is not None
        start = time.monotonic_ns()
        self._mirrors.take(self.step, self._known(), self.replica.state.tensors())
        self.journal.add("checkpoint", self.step, start, time.monotonic_ns())

    def _diverged(self, step: int) -> RunFailed:
        fix = "Lower `train.optimizer.lr`, add `train.clip_norm` or a warm-up"
        if self.saver.last is not None:
            fix += f"; the checkpoint of step {self.saver.last} is from before"
        elif self.worker.settings["checkpoint"]:
            fix += "; the checkpoint that it went on from is from before"
        return RunFailed(f"the loss became {self.loss} in step {step}", where="train", fix=fix)

    # -- the plan ------------------------------------------------------------------------------------------------

    def _plan(self) -> Iterator[Item]:
        step = self.step
        while self.total_steps is None or step < self.total_steps:
            if passes := self.replica.plan(self.tickets.sizes(step), step):
                ids = self.island.train_set.ids(self.tickets.positions(step))
                for low, high, phantom in passes:
                    yield Item(step, np.ascontiguousarray(ids[low:high]), phantom=phantom)
            step += 1

    def _read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; while one does not come, that is what this worker is said to wait for."""
        while True:
            self.worker.doing("waiting for data", self.step)
            batch = next(batches, None)
            if batch is None:
                return
            self.worker.doing("computing", self.step)
            yield batch

    # -- the ends ------------------------------------------------------------------------------------------------

    def _flag(self) -> float:
        """This worker's reason to stop after the step, which travels with the gradients."""
        if self._agreement is not None:
            return 0.0
        flag = flags.INTERRUPT if self.worker.stopping else 0.0
        if self.rank == 0:
            flag += flags.TIME * self._out_of_time() + flags.CHANGE * (self.worker.era.number > self.island.era)
        return flag

    def _stopped(self, told: float) -> str | None:
        """Why all workers stop now, if they do.

        Args:
            told: the sum of their flags.
        """
        if self._agreement is None:
            return flags.ends(told)
        if self.rank == 0 and self._out_of_time():
            self._agreement.wish("seconds")
        return self._agreement.ends(self.step)

    def _combine(self, exchange: LocalSteps, sums: StepSums, ends: str | None) -> None:
        """What is due between the islands after a step; where training ends here, all that is left."""
        exchange.after(self.step, sums.loss, sums.weight)
        if ends is not None and ends != "interrupt":
            exchange.finish(self.step)

    def _elapsed(self) -> float:
        return self.former_seconds + time.monotonic() - self.begun

    def _out_of_time(self) -> bool:
        return self.job.train.seconds is not None and self._elapsed() >= self.job.train.seconds

    # -- after a step --------------------------------------------------------------------------------------------

    def _record(self, step: int, weight: float, size: int) -> None:
        now = self._done_at = time.monotonic()
        row = (step, self.loss, weight, size, float(self.replica.optimizer.param_groups[0]["lr"]))
        if self.rank == 0 or (self.exchange is not None and self.island.mesh.leads):
            self.journal.step(*row)
        if self._goes_on:
            self._recent.append((now, row))
            while now - self._recent[0][0] > _RECENT_SECONDS and len(self._recent) > 2:
                self._recent.popleft()
        if self.rank == 0 and now - self._reported >= _PROGRESS_SECONDS:
            speed = (self.samples - self._reported_samples) / (now - self._reported) if self._reported else 0.0
            self.worker.mention("progress", step=self.step, loss=self.loss, samples_per_second=speed)
            self._reported, self._reported_samples = now, self.samples
        if self.journal.due:
            self._write()

    def _members(self) -> Sequence[int]:
        """The numbers of the workers, by their place in the mesh."""
        return self.worker.era.members if self._goes_on else range(self.island.mesh.world)

    def _write(self) -> None:
        """Writes what was recorded, and the running totals, to the journal."""
        count(self.journal, self.links, self.island.shared_bytes)
        _count_combined(self.journal, self.replica, self.exchange)
        self.journal.flush()

    def _after_step(self, reason: str | None) -> str | None:
        if self.tickets.lengths.due(self.job.validate_.every, self.step) and self.island.validation_set is not None:
            reason = self._validate() or reason
        if self.tickets.lengths.due(self.job.checkpoint.every, self.step):
            self._save()
        return reason

    def _validate(self) -> str | None:
        """Validates; the reason to end if a target is reached or patience is at its end."""
        assert self.island.validation_set is not None
        self._validated = self.step
        start = time.monotonic_ns()
        self.worker.doing("validating", self.step)
        metrics = evaluate(
            self.replica, self.island.validation_set, self.island, lambda *at: self._collective(_GATHERING, *at)
        )
        self.journal.add("validate", self.step, start, time.monotonic_ns())
        if self.rank == 0:
            self.journal.event("validation", step=self.step, metrics=metrics)
            self.worker.send("validation", step=self.step, metrics=metrics)
        return self.judge.ends(metrics, self.step)

    def _collective(self, index: int, start: int, end: int) -> None:
        """Records a collective that is none of a step's gradients."""
        if self.island.mesh.world > 1:
            self.journal.collective(self.step, index, start, start, end)

    def _save(self) -> None:
        self._write()  # a worker may be killed as soon as these steps are saved: they must not be missing then
        start = time.monotonic_ns()
        self.worker.doing("saving", self.step)
        self._saved = self.step
        self.saver.save(
            self.step,
            state_of(
                self.job,
                self.worker.settings["data"],
                self.step,
                self.samples,
                self._elapsed(),
                self.judge,
                exchange=self.exchange.state.record() if self.exchange is not None else None,
                loss_scale=self.replica.loss_scale.state() if self.replica.loss_scale else None,
            ),
            self.island.era,
        )
        self.journal.add("checkpoint", self.step, start, time.monotonic_ns())

    def _finish(self, reason: str | None) -> None:
        """The last validation and checkpoint, and the wait until it is written."""
        if reason != "interrupt" and self.island.validation_set is not None and self._validated != self.step:
            self._validate()
        if self._saved != self.step:
            self._save()
        self._write()  # a worker may be killed as soon as these steps are saved: they must not be missing then
        start = time.monotonic_ns()
        self.worker.doing("saving", self.step)
        self.saver.wait()
        self.journal.add("checkpoint", self.step, start, time.monotonic_ns())
        if self._goes_on:  # whoever leaves has seen that nobody needs it any more
            self.island.groups.island.all_reduce(torch.zeros(1), "the end")
        if self.rank == 0 and self.step > self._first_step:
            self.worker.send("progress", step=self.step, loss=self.loss, samples_per_second=0.0)
