"""The training loop: step after step, with what is due between them, until the training ends or its members change."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from verbund.cluster.worker import Worker
from verbund.data.loader import Batch, Item, Loader
from verbund.errors import RunFailed
from verbund.exchange.local_steps import LocalSteps
from verbund.mesh.data import StepSums
from verbund.mesh.replica import Replica
from verbund.stage import flags, orphans
from verbund.stage.among_islands import AmongIslands
from verbund.stage.elastic import goes_on
from verbund.stage.island import Island, augmentation
from verbund.stage.mirrors import Mirrors
from verbund.stage.paces import Paces
from verbund.stage.saving import Saver, state_of
from verbund.stage.step_record import COMPARISON, GATHERING, StepRecord
from verbund.stage.stopping import Agreement
from verbund.stage.tickets import Tickets
from verbund.stage.training_state import TrainingState
from verbund.stage.validate import evaluate


class Steps:
    """A training among the same members.

    Args:
        worker: the line to the supervisor.
        island: this worker's, as it has met last.
        replica: of it.
        tickets: as the islands share them.
        exchange: between islands that train alone.
        agreement: of those on the step after which all stop.
        saver: of checkpoints.
        mirrors: this worker's, if there are any.
        record: what is recorded.
        state: how far the training is.
        among: islands that come and go; None: they do not.
    """

    def __init__(
        self,
        worker: Worker,
        island: Island,
        replica: Replica,
        tickets: Tickets,
        exchange: LocalSteps | None,
        agreement: Agreement | None,
        saver: Saver,
        mirrors: Mirrors | None,
        record: StepRecord,
        state: TrainingState,
        among: AmongIslands | None = None,
    ) -> None:
        self.worker, self.island, self.replica, self.tickets = worker, island, replica, tickets
        self.job = island.job
        self.exchange, self._agreement, self.saver, self._mirrors = exchange, agreement, saver, mirrors
        self._record, self.state, self._among = record, state, among
        self.journal = record.journal
        members = worker.era.members if goes_on(self.job) else island.ranks
        self._sizes: Sequence[int] = ()
        """The samples that each island had in the last step."""
        self._paces = Paces(worker, island.mesh, exchange is None, members)

    @property
    def rank(self) -> int:
        """This worker's place among the members; the first speaks for all."""
        return self.island.mesh.rank

    def run(self, again: bool) -> str | None:
        """Trains to the end, and says why it is there; `change` if the members change.

        Args:
            again: what is due after the last step may not have been done by all.
        """
        state, era = self.state, self.island.era
        reason = self.tickets.lengths.reached(state.step) or self._stopped(0.0)
        self.replica.balance.begin(state.step, self.tickets.whole)
        if again:
            if state.step > state.first_step:
                reason = self._after_step(reason)
            if reason is None and self.island.era != era:
                return "change"
        elif reason is not None and self.rank == 0 and self.island.era == 0:
            text = (
                f"Nothing to do: the run has had its {reason} ({state.step} steps). Raise `train.{reason}` to train on"
            )
            self.worker.send("note", text=text)
        if self.exchange is not None and reason is not None and reason != "interrupt":
            self.exchange.finish(state.step)  # it was interrupted where it is to end now
        loader = Loader(
            self.island.train_set,
            self._plan(),
            transform=augmentation(self.job, self.island.task),
            prefetch=self.job.data.prefetch,
            processes=self.island.loaders,
        )
        batches = self._read(iter(loader))
        try:
            while reason is None:
                sums = self._step(batches)
                # Who is done anyway is not interrupted.
                reason = self.tickets.lengths.reached(state.step) or self._stopped(sums.flags)
                if self.exchange is not None:
                    self._combine(self.exchange, sums, reason)
                reason = self._after_step(reason)
                if reason is None and (flags.changes(sums.flags) or self.island.era != era):
                    return "change"
                if self._among is not None:
                    self._among.check_in()
        finally:
            loader.close()
        self._finish(reason)
        return reason

    def _step(self, batches: Iterator[Batch]) -> StepSums:
        """One step, and what is recorded of it."""
        state, replica, train = self.state, self.replica, self.job.train
        step = state.step
        sizes = self._sizes = self.tickets.sizes(step)
        count = len(replica.plan(sizes, step))
        sums = replica.gradients(batches, count, step, sizes, self._flag(), self.journal)
        began = time.monotonic_ns()
        if self._mirrors is not None:
            self._mirrors.finish(step + 1)
        replica.update(step, sizes, sums, state.total_steps)
        state.loss = sums.loss / sums.weight if sums.weight else math.nan
        if not math.isfinite(state.loss) and sums.weight and replica.loss_scale is None:
            raise self._diverged(step)
        state.step += 1
        state.samples += sum(sizes)
        self._paces.record(replica.balance.counts(step, sizes), sums.told)
        if train.check_replicas and state.step % train.check_replicas == 0:
            compared = time.monotonic_ns()
            replica.check_equal(state.step)
            self._record.collective(state.step, COMPARISON, compared, time.monotonic_ns())
        self.journal.add("compute", step, began, time.monotonic_ns())
        self._record.step(state, sums.weight, sum(replica.joint(sizes)), replica)
        if self._mirrors is not None and self._mirrors.due(state.step):
            self._mirror(self._mirrors)
        return sums

    def _mirror(self, mirrors: Mirrors) -> None:
        start, scale = time.monotonic_ns(), self.replica.loss_scale
        known = self.state.known(scale.state() if scale else None, self._record.recent)
        mirrors.take(self.state.step, known, self.replica.state.tensors())
        self.journal.add("checkpoint", self.state.step, start, time.monotonic_ns())

    def _diverged(self, step: int) -> RunFailed:
        fix = "Lower `train.optimizer.lr`, add `train.clip_norm` or a warm-up"
        if self.saver.last is not None:
            fix += f"; the checkpoint of step {self.saver.last} is from before"
        elif self.worker.settings["checkpoint"]:
            fix += "; the checkpoint that it went on from is from before"
        return RunFailed(f"the loss became {self.state.loss} in step {step}", where="train", fix=fix)

    # -- the plan ------------------------------------------------------------------------------------------------

    def _plan(self) -> Iterator[Item]:
        step, total = self.state.step, self.state.total_steps
        while total is None or step < total:
            if passes := self.replica.plan(self.tickets.sizes(step), step):
                ids = self.island.train_set.ids(self.tickets.positions(step))
                for low, high, phantom in passes:
                    yield Item(step, np.ascontiguousarray(ids[low:high]), phantom=phantom)
            step += 1

    def _read(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; while one does not come, that is what this worker is said to wait for."""
        while True:
            self.worker.doing("waiting for data", self.state.step)
            batch = next(batches, None)
            if batch is None:
                return
            self.worker.doing("computing", self.state.step)
            yield batch

    # -- the ends ------------------------------------------------------------------------------------------------

    def _flag(self) -> float:
        """This worker's reason to stop after the step, which travels with the gradients."""
        if self._agreement is not None:
            return 0.0
        flag = flags.INTERRUPT if self.worker.stopping else 0.0
        if self.rank == 0:
            flag += flags.TIME * self.state.out_of_time + flags.CHANGE * (self.worker.era.number > self.island.era)
        return flag

    def _stopped(self, told: float) -> str | None:
        """Why all workers stop now, if they do.

        Args:
            told: the sum of their flags.
        """
        if self._agreement is None:
            return flags.ends(told)
        if self.rank == 0 and self.state.out_of_time:
            self._agreement.wish("seconds")
        return self._agreement.ends(self.state.step)

    def _combine(self, exchange: LocalSteps, sums: StepSums, ends: str | None) -> None:
        """What is due between the islands after a step; where training ends here, all that is left."""
        exchange.after(self.state.step, self._sizes, sums.loss, sums.weight)
        if self._among is not None and ends is None:
            self._among.after_exchange()
        if ends is not None and ends != "interrupt":
            exchange.finish(self.state.step)

    # -- after a step --------------------------------------------------------------------------------------------

    def _after_step(self, reason: str | None) -> str | None:
        if (
            self.tickets.lengths.due(self.job.validate_.every, self.state.step)
            and self.island.validation_set is not None
        ):
            reason = self._validate() or reason
        if self.tickets.lengths.due(self.job.checkpoint.every, self.state.step):
            self._save()
        return reason

    def _validate(self) -> str | None:
        """Validates; the reason to end if a target is reached or patience is at its end."""
        assert self.island.validation_set is not None
        step = self.state.validated = self.state.step
        start = time.monotonic_ns()
        self.worker.doing("validating", step)
        evaluated = partial(
            evaluate,
            self.replica,
            self.island.validation_set,
            self.island,
            lambda *at: self._record.collective(step, GATHERING, *at),
        )
        metrics = evaluated() if self._among is None else self._among.evaluated(evaluated)
        self.journal.add("validate", step, start, time.monotonic_ns())
        if self.rank == 0:
            self.journal.event("validation", step=step, metrics=metrics)
            self.worker.send("validation", step=step, metrics=metrics)
        return self.state.judge.ends(metrics, step)

    def _save(self) -> None:
        self._record.write(self.replica)  # a worker may be killed once these steps are saved: they must not be missing
        state, scale = self.state, self.replica.loss_scale
        start = time.monotonic_ns()
        if self._among is not None:
            self._among.ready_to_save()
        self.worker.doing("saving", state.step)
        state.saved = state.step
        self.saver.save(
            state.step,
            state_of(
                self.job,
                self.worker.settings["data"],
                state.step,
                state.samples,
                state.seconds,
                state.judge,
                exchange=self.exchange.state.record() if self.exchange is not None else None,
                loss_scale=scale.state() if scale else None,
                samples_lost=state.samples_lost,
            ),
            self.island.era,
        )
        self.journal.add("checkpoint", state.step, start, time.monotonic_ns())

    def _finish(self, reason: str | None) -> None:
        """The last validation and checkpoint, and the wait until it is written."""
        state = self.state
        if reason != "interrupt" and self.island.validation_set is not None and state.validated != state.step:
            self._validate()
        if state.saved != state.step:
            self._save()
        self._record.write(self.replica)
        self._wait_for_save()
        if self._among is not None:
            self._among.saved(self._save_again)
        if self.exchange is None:
            orphans.commit(self.worker, self.island, self.saver, self.journal)
        if goes_on(self.job):  # whoever leaves has seen that nobody needs it any more
            self.island.groups.island.all_reduce(torch.zeros(1), "the end")
        if self.rank == 0 and state.step > state.first_step:
            self.worker.send("progress", step=state.step, loss=state.loss, samples_per_second=0.0)

    def _save_again(self) -> None:
        self._save()
        self._wait_for_save()

    def _wait_for_save(self) -> None:
        start = time.monotonic_ns()
        self.worker.doing("saving", self.state.step)
        self.saver.wait()
        self.journal.add("checkpoint", self.state.step, start, time.monotonic_ns())
