"""Training: the loop that every worker runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verbund.cluster.worker import Worker
from verbund.comm.peer_lost import PeerLost
from verbund.data.loader import Batch, Item, Loader
from verbund.errors import RunFailed
from verbund.exchange.local_steps import LocalSteps
from verbund.mesh import probe
from verbund.mesh.data import StepSums
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal
from verbund.observe.memory import peak_bytes
from verbund.observe.network import Links
from verbund.run import Run
from verbund.stage.elastic import elastic
from verbund.stage.island import Island, augmentation, example_of
from verbund.stage.judge import Judge
from verbund.stage.recording import journal_of
from verbund.stage.recovery import bring_together
from verbund.stage.restore import restore, restore_exchange
from verbund.stage.saving import Saver
from verbund.stage.slow_workers import SlowWorkers
from verbund.stage.stopping import Agreement
from verbund.stage.tickets import Tickets
from verbund.stage.validate import evaluate

_PROGRESS_SECONDS = 0.1
_REPLACED_SECONDS = 60.0
"""How long the place of a lost worker may stay empty, once its loss is known."""
# Reasons to stop that travel with the gradients, so that all workers stop after the same step. Only one worker looks
# at the clock, so that the sum tells the two apart.
_TIME, _INTERRUPT = 1.0, 2.0
# Their numbers among a step's collectives, beyond those of any gradients.
_GATHERING, _COMPARISON = 1 << 20, (1 << 20) + 1


def work(worker: Worker) -> dict[str, Any]:
    """A worker's part of a training run, from its fork to its last checkpoint."""
    run = Run.open(Path(worker.settings["run"]))
    island = Island.join(worker)
    job = island.job
    journal = journal_of(worker, run, job)
    links = Links()
    # Before this worker leaves its peers: a connection that they have ended tells no more what it moved.
    worker.at_end.insert(0, lambda: _close(journal, links, island))
    replica = island.replica(worker)
    if (whole := worker.settings["probe"]) is not None:
        worker.doing("comparing the divided model with the whole", 0)
        probe.check(replica, example_of(island.train_set), probe.Probe(**whole), job.train.precision)
    new = bool(worker.settings.get("era"))  # it takes the place of one that was lost
    source = worker.settings["checkpoint"] if not new else None
    state = restore(Path(source), replica) if source else {}
    tickets = Tickets(island.train_set, job, island.mesh, replica.division.unit, replica.balance)
    exchange = None
    if job.strategy.exchange.local:
        exchange = LocalSteps(job.strategy.exchange, replica, tickets.sizes, journal, job.seed)
    dropped = restore_exchange(Path(source), replica, exchange) if source else []
    if island.mesh.rank == 0:
        for text in dropped:
            worker.send("note", text=text)
    held = {} if exchange is None else {"exchange": exchange.held_bytes()}
    worker.at_end.insert(0, lambda: journal.totals("held", **replica.held_bytes(), **held))
    worker.at_end.insert(0, lambda: _count_combined(journal, replica, exchange))
    if replica.pipeline is not None and island.mesh.rank == 0:
        journal.event("pipeline", **replica.pipeline_plan(tickets.sizes(0)))
    training = _Training(worker, run, island, replica, tickets, exchange, journal, links, state)
    if new:
        training.meet(None)
    else:
        replica.check_equal(training.step)
    journal.add("start", 0, worker.born, time.monotonic_ns())
    return training.run_to_end()


def _close(journal: Journal, links: Links, island: Island) -> None:
    _count(journal, links, island)
    journal.close()


def _count(journal: Journal, links: Links, island: Island) -> None:
    """Records the running totals of bytes moved and memory."""
    journal.totals("links", links=links.sample(), wire=links.wire(), shared=island.groups.shared_bytes)
    journal.totals("memory", peak=peak_bytes())


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
        run: Run,
        island: Island,
        replica: Replica,
        tickets: Tickets,
        exchange: LocalSteps | None,
        journal: Journal,
        links: Links,
        state: dict[str, Any],
    ) -> None:
        job = island.job
        self.worker, self.island, self.replica, self.journal, self.links = (
            worker,
            island,
            replica,
            journal,
            links,
        )
        self.job, self.rank = job, island.mesh.rank
        self.tickets, self.exchange = tickets, exchange
        self.saver = Saver(worker, run, replica, job.cluster.step_deadline, exchange)
        self._agreement = Agreement(worker, job.cluster.step_deadline) if exchange is not None else None
        self.total_steps: int | None = worker.settings["total_steps"]
        self.step = int(state.get("step", 0))
        self._first_step = self.step
        self.samples = int(state.get("samples", 0))
        self.judge = Judge(job.train, state)
        self.former_seconds = float(state.get("seconds", 0.0))
        self.begun = time.monotonic()
        self.loss = math.nan
        self._reported = 0.0
        self._reported_samples = self.samples
        self._validated = -1
        self._elastic = elastic(job)
        self._slow = SlowWorkers(island.mesh, exchange is None, job.strategy.stragglers.rebalances)

    def meet(self, step: int | None) -> None:
        """Goes on together with those that have taken the places of lost workers, from the newest step that is done.

        Args:
            step: how many are done here; None: this worker is one of them.
        """
        known = {
            "samples": self.samples,
            "first_step": self._first_step,
            "seconds": self._elapsed(),
            "loss_scale": self.replica.loss_scale.state() if self.replica.loss_scale else None,
            **self.judge.state(),
        }
        self.step, state = bring_together(self.replica, step, known)
        self.samples, self._first_step = int(state["samples"]), int(state["first_step"])
        self._validated = -1  # one that some have not finished is done again by all
        if step != self.step:
            self.judge = Judge(self.job.train, state)
            if self.replica.loss_scale is not None:
                self.replica.loss_scale.load(state["loss_scale"])
        if step is None:
            self.former_seconds = float(state["seconds"]) - (time.monotonic() - self.begun)

    def _recover(self) -> None:
        """Waits until lost workers have been replaced, and goes on with all."""
        while True:
            if not self.worker.later_era(self.island.era, self.job.cluster.lost_after + _REPLACED_SECONDS):
                raise PeerLost("a worker was lost, and none has taken its place")
            self.worker.doing("recovering", self.step)
            try:
                self.saver.wait()
                self.island.meet_anew(self.worker)
                self.replica.regroup(self.island.groups)
                self.meet(self.step)
                return
            except PeerLost:
                continue  # another one

    def run_to_end(self) -> dict[str, Any]:
        """Trains until one of the job's ends is reached or a stop is asked for."""
        again = self.island.era > 0
        while True:
            try:
                reason = self._train(again)
                break
            except PeerLost:
                if not self._elastic or self.worker.orphaned:
                    raise
                self._recover()
                again = True
        return {
            "stopped_by": reason,
            "steps": self.step,
            "samples": self.samples,
            "threads": self.island.threads,
            "randomness": self.replica.randomness.report(),
        }

    def _train(self, again: bool) -> str | None:
        """Trains to the end, and says why it is there.

        Args:
            again: what is due after the last step may not have been done by all.
        """
        train, rank = self.job.train, self.rank
        reason = self.tickets.end_reached(self.step) or self._stopped(0.0)
        self.replica.balance.begin(self.step, self.tickets.whole)
        if again:
            if self.step > self._first_step:
                reason = self._after_step(reason)
        elif reason is not None and rank == 0:
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
                self.replica.update(step, sizes, sums, self.total_steps)
                self.loss = sums.loss / sums.weight if sums.weight else math.nan
                if not math.isfinite(self.loss) and sums.weight and self.replica.loss_scale is None:
                    raise self._diverged(step)
                self.step += 1
                self.samples += sum(sizes)
                self._notice_slow(step, sizes, sums)
                if train.check_replicas and self.step % train.check_replicas == 0:
                    compared = time.monotonic_ns()
                    self.replica.check_equal(self.step)
                    self._collective(_COMPARISON, compared, time.monotonic_ns())
                self.journal.add("compute", step, began, time.monotonic_ns())
                self._record(step, sums.weight, sum(self.replica.joint(sizes)))
                # Who is done anyway is not interrupted.
                reason = self.tickets.end_reached(self.step) or self._stopped(sums.flags)
                if self.exchange is not None:
                    self._combine(self.exchange, sums, reason)
                reason = self._after_step(reason)
        finally:
            loader.close()
        self._finish(reason)
        return reason

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
        return _INTERRUPT if self.worker.stopping else _TIME if self.rank == 0 and self._out_of_time() else 0.0

    def _stopped(self, flags: float) -> str | None:
        """Why all workers stop now, if they do.

        Args:
            flags: the sum of their flags.
        """
        if self._agreement is None:
            return "interrupt" if flags >= _INTERRUPT else "seconds" if flags >= _TIME else None
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
        now = time.monotonic()
        if self.rank == 0 or (self.exchange is not None and self.island.mesh.leads):
            rate = float(self.replica.optimizer.param_groups[0]["lr"])
            self.journal.step(step, self.loss, weight, size, rate)
        if self.rank == 0 and now - self._reported >= _PROGRESS_SECONDS:
            speed = (self.samples - self._reported_samples) / (now - self._reported) if self._reported else 0.0
            self.worker.mention("progress", step=self.step, loss=self.loss, samples_per_second=speed)
            self._reported, self._reported_samples = now, self.samples
        if self.journal.due:
            self._write()

    def _notice_slow(self, step: int, sizes: tuple[int, ...], sums: StepSums) -> None:
        """Tells of workers that stay slower than the others."""
        if self.rank == 0 or (self.exchange is not None and self.island.mesh.leads):
            for text in self._slow.record(self.replica.balance.counts(step, sizes), sums.told):
                self.worker.send("note", text=text)

    def _write(self) -> None:
        """Writes what was recorded, and the running totals, to the journal."""
        _count(self.journal, self.links, self.island)
        _count_combined(self.journal, self.replica, self.exchange)
        self.journal.flush()

    def _after_step(self, reason: str | None) -> str | None:
        if self.tickets.due(self.job.validate_.every, self.step) and self.island.validation_set is not None:
            reason = self._validate() or reason
        if self.tickets.due(self.job.checkpoint.every, self.step):
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
        self.saver.save(
            self.step,
            {
                "step": self.step,
                "samples": self.samples,
                "tickets": {"low_water": self.step, "outstanding": []},
                "seed": self.job.seed,
                "global_batch": self.job.train.global_batch,
                "data": self.worker.settings["data"],
                **self.judge.state(),
                "seconds": self._elapsed(),
                "exchange": self.exchange.state.record() if self.exchange is not None else None,
                "loss_scale": self.replica.loss_scale.state() if self.replica.loss_scale else None,
            },
        )
        self.journal.add("checkpoint", self.step, start, time.monotonic_ns())

    def _finish(self, reason: str | None) -> None:
        """The last validation and checkpoint, and the wait until it is written."""
        if reason != "interrupt" and self.island.validation_set is not None and self._validated != self.step:
            self._validate()
        if self.saver.last != self.step:
            self._save()
        self._write()  # a worker may be killed as soon as these steps are saved: they must not be missing then
        start = time.monotonic_ns()
        self.worker.doing("saving", self.step)
        self.saver.wait()
        self.journal.add("checkpoint", self.step, start, time.monotonic_ns())
        if self._elastic:  # whoever leaves has seen that nobody needs it any more
            self.island.groups.island.all_reduce(torch.zeros(1), "the end")
        if self.rank == 0 and self.step > self._first_step:
            self.worker.send("progress", step=self.step, loss=self.loss, samples_per_second=0.0)
