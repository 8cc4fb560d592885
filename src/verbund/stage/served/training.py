"""The state of a training as one worker of an island sees it: tickets, pushes and pulls, rests."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from verbund.checkpoint.piece import Piece
from verbund.cluster.worker import Worker
from verbund.data.loader import Batch, Item, Loader
from verbund.errors import RunFailed
from verbund.exchange.parameter_server.binding import Binding
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.coordination import Coordination, End, Keep, Leased, Rest
from verbund.exchange.parameter_server.left_out import CompressedPushes
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Outcome, Part
from verbund.exchange.parameter_server.served_rows import ServedRows
from verbund.job import Job
from verbund.mesh import schedule
from verbund.mesh.axes import Mesh
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal
from verbund.observe.network import Links
from verbund.stage.island import Island, augmentation
from verbund.stage.judge import Judge
from verbund.stage.paces import Paces
from verbund.stage.recording import count
from verbund.stage.saving import state_of
from verbund.stage.served.progress import Progress
from verbund.stage.served.saving import Saver
from verbund.stage.served.staleness import Staleness
from verbund.stage.tickets import Tickets
from verbund.stage.validate import evaluate

_AHEAD_SECONDS, _AHEAD = 0.05, 16
"""Time and number of tickets that a worker may have leased ahead: what others wait for at a rest."""


@dataclass(frozen=True)
class Served:
    """What a worker has of the servers: the plan, where its blocks and rows lie in the model, what it pushes them as,
    the lines to servers and coordinator."""

    plan: Plan
    binding: Binding
    rows: ServedRows
    compressed: CompressedPushes
    client: Client
    coordination: Coordination


class Training:
    """The state of a training as one worker sees it."""

    def __init__(
        self,
        worker: Worker,
        outer: Job,
        island: Island,
        replica: Replica,
        served: Served,
        saver: Saver,
        journal: Journal,
        links: Links,
        begin: int,
    ) -> None:
        self.worker, self.job, self.island, self.replica = worker, outer, island, replica
        self.plan, self.binding, self.rows = served.plan, served.binding, served.rows
        self.client, self.coordination = served.client, served.coordination
        self.saver, self.journal, self.links = saver, journal, links
        self.leads = island.mesh.leads
        first = island.number * island.mesh.world
        self._paces = Paces(worker, island.mesh, True, range(first, first + island.mesh.world))
        self.settings = outer.strategy.exchange
        self.divided = self.settings.divided
        islands = outer.strategy.islands if self.divided else 1
        self.mesh = Mesh(island.number if self.divided else 0, islands=islands)
        self.tickets = Tickets(island.train_set, outer, self.mesh, replica.division.unit)
        self.total_steps: int | None = worker.settings["total_steps"]
        self.staleness = Staleness()
        self.compressed = served.compressed
        self.step = self._begin = begin
        self.loss = math.nan
        self._versions: dict[int, int] = {}
        self._fresh = False
        """Whether the model has what the servers had after this island's last push."""
        self._count = 0
        self.progress = Progress(worker, self.tickets, begin, says=island.number == 0 and self.leads)
        self._to_train: queue.Queue[Leased | Rest | Keep | End | Exception] = queue.Queue()
        self._to_read: queue.Queue[int | None] = queue.Queue()
        self._turned = threading.Condition()
        self._least_ahead = 1 + (outer.data.prefetch if island.train_set.source.slow else 0)
        self._ahead = self._least_ahead
        """Tickets that are asked for ahead: about those of `_AHEAD_SECONDS`."""
        self._resting = False
        self._asking = False
        """Whether a question for a ticket is under way, which may wait for others."""

    def run_to_end(self) -> dict[str, Any]:
        """Works on tickets until the coordinator says that training has ended."""
        threading.Thread(target=self._lease, name="leasing", daemon=True).start()
        loader = Loader(
            self.island.train_set,
            self._plan(),
            transform=augmentation(self.job, self.island.task),
            prefetch=self.job.data.prefetch,
        )
        batches = iter(loader)
        try:
            while True:
                self.worker.doing("waiting for a ticket", self.step)
                waited = time.monotonic_ns()
                item = self._to_train.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, End):
                    break
                if isinstance(item, Rest):
                    self._rest(item)
                elif isinstance(item, Keep):
                    self._keep(item)
                else:
                    self.journal.add("communicate", item.ticket, waited, time.monotonic_ns())
                    self._train(item, batches)
        finally:
            self._to_read.put(None)
            loader.close()
        self.worker.doing("ending", self.step)
        self.saver.wait()  # an island may go while a save that it leads is under way
        self.progress.say(item.step, self.loss, last=True)
        self.links.sample()  # while there are connections
        self.client.close()
        self.coordination.close()
        return {
            "stopped_by": item.reason,
            "steps": item.step,
            "samples": self.progress.samples_before(item.step),
            "threads": self.island.threads,
            "randomness": self.replica.randomness.report(),
        }

    # -- tickets -------------------------------------------------------------------------------------------------

    def _lease(self) -> None:
        """A thread's: asks for the island's tickets, so many ahead that the next is there when one is done."""
        number = 0
        try:
            while True:
                with self._turned:
                    while self._resting or number - self._count >= self._ahead:
                        self._turned.wait()
                    self._asking = True
                    ahead, done = self._ahead, self._count
                item = self.coordination.lease(number, ahead, self.island.mesh.rank, done)
                self._asking = False
                if isinstance(item, list):
                    number += len(item)
                    for leased in item:
                        self._to_read.put(leased.ticket)
                        self._to_train.put(leased)
                    continue
                self._resting = True
                self._to_train.put(item)
                if isinstance(item, End):
                    return
        except Exception as error:  # raised by whoever takes it
            self._to_train.put(error)

    def _plan(self) -> Iterator[Item]:
        while (ticket := self._to_read.get()) is not None:
            if passes := self.replica.plan(self._own(ticket), ticket):
                ids = self.island.train_set.ids(self.tickets.positions(ticket))
                for low, high, phantom in passes:
                    yield Item(ticket, np.ascontiguousarray(ids[low:high]), phantom=phantom)

    def _own(self, ticket: int) -> tuple[int, ...]:
        """How many samples of a ticket are this island's."""
        return (self.tickets.sizes(ticket)[self.mesh.island],)

    def _train(self, leased: Leased, batches: Iterator[Batch]) -> None:
        ticket, start = leased.ticket, time.monotonic_ns()
        sizes = self._own(ticket)
        least = max(ticket - self.settings.bound, 0) if self.divided else 0
        if not (taken := self._taken(ticket)):
            self.rows.begin(ticket, least)
            if self.divided or not self._fresh:
                self._pull(least, ticket)
                taken = self._taken(ticket)
        if taken:
            for _ in self.replica.plan(sizes, ticket):
                next(batches)
            self.staleness.skip()
            self._done(ticket, start)
            return
        self.binding.remember_buffers()
        self.worker.doing("computing", ticket)
        sums = self.replica.gradients(batches, len(self.replica.plan(sizes, ticket)), ticket, sizes, 0.0, self.journal)
        self._paces.record(self.replica.balance.counts(ticket, sizes), sums.told)
        self.loss = sums.loss / sums.weight if sums.weight else math.nan
        if not math.isfinite(self.loss) and sums.weight and self.replica.loss_scale is None:
            raise RunFailed(
                f"the loss became {self.loss} in step {ticket}",
                where="train",
                fix="Lower `train.optimizer.lr`, or add a warm-up",
            )
        self.rows.add_up()
        factor = self.replica.settle(sizes, sums, self.rows.square, clips=self.plan.rule.clip is None)
        self._push(leased, sums.weight, factor)
        self._done(ticket, start)
        self._record(leased, sums.weight, sum(sizes))

    def _taken(self, ticket: int) -> bool:
        """Whether what this island pulled last has the ticket's step already, so that its share would not be used; all
        workers of the island call it."""
        if not self.settings.backup:
            return False
        known = [version > ticket for version in self._versions.values()]
        told = torch.tensor([float(len(known)), float(known.count(False))])
        self.island.groups.island.all_reduce(told, "the tickets that were taken")
        return bool(told[0] > 0 and told[1] == 0)

    def _done(self, ticket: int, start: int) -> None:
        """A ticket is done that was begun at `start`."""
        self.step = max(self.step, ticket + 1)
        with self._turned:
            self._count += 1
            seconds = (time.monotonic_ns() - start) / 1e9
            self._ahead = max(self._least_ahead, min(int(_AHEAD_SECONDS / max(seconds, 1e-6)), _AHEAD))
            self._turned.notify()
            asking = self._asking
        if asking:  # that question says less
            self.coordination.done(self.island.mesh.rank, self._count)

    # -- the servers ---------------------------------------------------------------------------------------------

    def _pull(self, least: int, step: int) -> None:
        """Gives the model the servers' values, which have seen all tickets below `least`."""
        start = time.monotonic_ns()
        self.worker.doing("pulling", step)
        if self.binding.speaks:
            self._versions = self.client.pull(self.binding.targets(), least)
        self.binding.pulled()
        self._fresh = True
        self.journal.add("communicate", step, start, time.monotonic_ns())

    def _push(self, leased: Leased, weight: float, factor: float | None) -> None:
        """Gives the servers what a ticket has taught; where nobody waits for others, their values come back with it."""
        start = time.monotonic_ns()
        self.worker.doing("pushing", leased.ticket)
        ticket = leased.ticket
        total = sum(self.tickets.sizes(ticket))
        share = sum(self._own(ticket)) / total if total else 0.0
        # Sums are no gradients: nothing divides or clips them.
        scale = factor * weight if factor is not None else 1.0
        parts: list[Part] = []
        for number, values in self.binding.gradients(share):
            if self.plan.blocks[number].kind == "sum" and values is not None:
                values = values / scale
            elif factor is None:
                values = None
            parts.append(Part(number, self._versions.get(number, 0), values))
        of_rows = self.rows.parts(every=self.divided)
        if self.leads:
            parts += of_rows if factor is not None else [replace(part, values=None, rows=None) for part in of_rows]
        outcomes: list[Outcome] = []
        pulled = self._versions
        rate = schedule.factor(self.job.train.schedule, ticket, self.total_steps)
        if self.plan.rule.consistency == "bounded":
            rate *= share  # each share is a step of its own
        if self.binding.speaks:
            parts = self.compressed.encoded(ticket, parts, factor, leased.again)
            told: dict[str, Any] = {
                "weight": weight if factor is not None else 0.0,
                "share": self.mesh.island,
                "scale": scale,
                "rate": rate,
                "low": leased.low,
            }
            if self.divided:
                outcomes = self.client.push(ticket, parts, **told)
            else:
                outcomes, self._versions = self.client.push_pull(ticket, parts, self.binding.targets(), **told)
            self.compressed.settle(parts, outcomes)
        if self.plan.rule.clip is not None and self.leads:
            self.client.clip(ticket)
        if not self.divided:
            self.binding.pulled()
        behind = max((ticket - version for version in pulled.values()), default=0) if self.divided else None
        self.staleness.add(outcomes, behind)
        self.journal.add("communicate", ticket, start, time.monotonic_ns())

    # -- rests ---------------------------------------------------------------------------------------------------

    def _rest(self, rest: Rest) -> None:
        """All tickets before are done, and this island does what is due."""
        self.step = rest.step
        self.rows.begin(rest.step, rest.step if self.divided else 0)
        self._pull(rest.step if self.divided else 0, rest.step)
        judge = Judge(self.job.train, rest.judged)
        reason = rest.reason or self.tickets.lengths.reached(self.step)
        ends = reason is not None
        due = ends or self.tickets.lengths.due(self.job.validate_.every, self.step)
        if self.island.validation_set is not None and reason != "interrupt" and due:
            reason = self._validate(judge) or reason
            ends = ends or reason is not None
        state = self._state(judge, rest)
        if ends or self.tickets.lengths.due(self.job.checkpoint.every, self.step):
            start = time.monotonic_ns()
            self.worker.doing("saving", self.step)
            self.write()
            kept, others = self._gathered()
            self.saver.save(self.step, state, ends, kept, others)
            if ends:
                self.saver.wait()
            self.journal.add("checkpoint", self.step, start, time.monotonic_ns())
        if self.leads:
            self.coordination.settle(self.step, reason, judge.state())
        # Nobody of the island may ask for more before that.
        self.island.groups.island.all_reduce(torch.zeros(1), "the end of a rest")
        self._fresh = False
        self._go_on()

    def _go_on(self) -> None:
        """What was due while all rest is done; the next ticket may be asked for."""
        with self._turned:
            self._resting = False
            self._turned.notify()

    def _gathered(self) -> tuple[Iterable[Piece], Sequence[dict[str, Any]]]:
        """What this worker keeps between steps, and what those of other islands have written of theirs."""
        if not self.compressed.keeps:
            return (), ()
        own, others = self.coordination.gather(self.step)
        self.island.groups.island.all_reduce(torch.zeros(1), "the gathering of what islands keep")
        return self.compressed.pieces(self.binding.numbers, own.place, own.of), others

    def _keep(self, wanted: Keep) -> None:
        """Writes what this worker keeps between steps, while another island leads."""
        self.worker.doing("saving", wanted.step)
        pieces = self.compressed.pieces(self.binding.numbers, wanted.place, wanted.of)
        record = self.saver.keep(wanted.step, wanted.place, pieces)
        self.coordination.kept(self.island.mesh.rank, wanted.step, record)
        self._go_on()

    def _validate(self, judge: Judge) -> str | None:
        assert self.island.validation_set is not None
        start = time.monotonic_ns()
        self.worker.doing("validating", self.step)
        metrics = evaluate(self.replica, self.island.validation_set, self.island)
        self.journal.add("validate", self.step, start, time.monotonic_ns())
        if self.leads:
            self.journal.event("validation", step=self.step, metrics=metrics)
            self.worker.send("validation", step=self.step, metrics=metrics)
        return judge.ends(metrics, self.step)

    def _state(self, judge: Judge, rest: Rest) -> dict[str, Any]:
        return state_of(
            self.job,
            self.worker.settings["data"],
            self.step,
            self.progress.samples_before(self.step),
            time.monotonic() - self.worker.settings["begun"],
            judge,
            loss_scale=self.replica.loss_scale.state() if self.replica.loss_scale else None,
        )

    # -- what is recorded ----------------------------------------------------------------------------------------

    def _record(self, leased: Leased, weight: float, size: int) -> None:
        ticket = leased.ticket
        if self.leads:
            rate = self.job.train.optimizer.lr * schedule.factor(self.job.train.schedule, ticket, self.total_steps)
            self.journal.step(ticket, self.loss, weight, size, rate)
        # Of undivided tickets those of the other islands may be done in any order.
        done = ticket + 1 if self.divided else max(leased.low, self._begin + self._count + 1)
        self.progress.say(done, self.loss)
        if self.journal.due:
            self.write()

    def write(self) -> None:
        """Writes what was recorded, and the running totals, to the journal."""
        self.count()
        self.journal.flush()

    def count(self) -> None:
        """Records the running totals."""
        journal = self.journal
        count(journal, self.links)
        journal.totals("held", **self.replica.held_bytes())
        journal.totals("served", **self.staleness.totals())
        if (method := self.plan.compression.name) != "none":
            journal.totals("compression", method=method, **asdict(self.compressed.totals))
