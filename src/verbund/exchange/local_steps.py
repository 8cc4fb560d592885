"""Local SGD and DiLoCo: islands train alone and combine their parameters every so many steps.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019) takes the mean of the islands'
parameters; DiLoCo (Douillard et al., 2023) lets an outer optimiser with Nesterov momentum step along the mean
difference, while every island keeps the state of its own optimiser. Fragments that are exchanged one after the other,
and training that goes on while an exchange is under way, are those of Streaming DiLoCo (Douillard et al., 2025).

Contributions are weighted by the samples that an island has seen since the last exchange, and divided by the sum of the
weights that arrived.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import torch

from verbund.checkpoint.read import Checkpoint
from verbund.cluster.quorum import EXCHANGE
from verbund.comm.compression.sums import Totals
from verbund.comm.peer_lost import PeerLost
from verbund.exchange.adaptive import AdaptiveSteps
from verbund.exchange.crossing import Crossing
from verbund.exchange.fragment import Compress, Fragment, cut
from verbund.exchange.local_state import LocalState
from verbund.exchange.outer import OuterOptimizer
from verbund.job import Exchange
from verbund.mesh.compression import sums, takes
from verbund.mesh.replica import Replica
from verbund.observe.events import EXCHANGES, Journal, index_among


class LocalSteps:
    """What a worker does between its island and the others.

    Args:
        settings: the exchange.
        replica: this worker's, with its first values.
        journal: gets the collectives.
        seed: of what compression draws.
        crossing: asked before islands do something together; None: all are always there.
    """

    def __init__(
        self,
        settings: Exchange,
        replica: Replica,
        journal: Journal,
        seed: int = 0,
        crossing: Crossing | None = None,
    ) -> None:
        self._settings, self._replica, self._journal = settings, replica, journal
        self._crossing = crossing
        self._group = replica.groups.islands
        outer = OuterOptimizer()
        if settings.name == "diloco":
            outer = OuterOptimizer(settings.outer_lr, settings.outer_momentum)
        compression = settings.compression
        runs = cut([parameter.numel() for parameter in replica.parameters], settings.fragments)
        fragments = []
        for low, high in runs:
            pairs = list(zip(replica.names[low:high], replica.parameters[low:high], strict=True))
            pairs.sort(key=lambda pair: not takes(compression, pair[1]))  # those that are compressed come first
            names, values = [name for name, _ in pairs], [value for _, value in pairs]
            count = sum(takes(compression, value) for value in values)
            kept, compress = settings.kept, self._compress(seed)
            fragments.append(
                Fragment(names, values, self._group, outer, kept, compress, count, revocable=crossing is not None)
            )
        buffers = [buffer for buffer in replica.buffers.averaged() if buffer.get().is_floating_point()]
        if buffers:  # running statistics are averaged whenever the last fragment is
            mean = OuterOptimizer()
            fragments.append(Fragment([], [buffer.get() for buffer in buffers], self._group, mean))
        self._every = settings.steps_between
        adaptive = AdaptiveSteps(self._every) if settings.adaptive else None
        self._fragments = fragments
        self.state = LocalState(settings, replica, fragments, buffers, adaptive)
        self._step = 0
        self._finishing = self._departing = False
        self._again: list[tuple[int, int]] = []
        """Exchanges that were broken off, and begin again when all have met: fragments, and when they are due."""
        self._exchanges = 0
        self._plain = Totals(self._group.world)
        replica.evaluation.common = self

    def begin(self, step: int) -> None:
        """Training begins after `step` steps with what the replica has now, which is the same in all islands."""
        self._step = step
        self.state.last = [step] * len(self._fragments)
        for fragment in self._fragments:
            fragment.begin()

    def load(self, checkpoint: Checkpoint) -> list[str]:
        """Goes on from a checkpoint, with whose universal part the replica has been filled.

        Returns:
            what had to be dropped, in sentences.
        """
        self.begin(checkpoint.step)
        return self.state.load(checkpoint)

    def after(self, step: int, sizes: Sequence[int], loss: float, weight: float) -> None:
        """Takes part in the exchanges that are due.

        Args:
            step: how many steps are done.
            sizes: the samples that each island had in the last one.
            loss: the sum of the losses of this island's samples of the last one.
            weight: what it is to be divided by.
        """
        self._step = step
        if math.isfinite(loss):  # fp16 leaves out steps that overflow
            self.state.lost += torch.tensor([loss, weight], dtype=torch.float64)
        for counts in self.state.seen:
            for island, size in enumerate(sizes):
                counts[island] += size
        self._arrive(step)
        self._depart(step)

    def _depart(self, step: int, gathered: bool = False) -> None:
        """Sends what is due after a step, and without a delay waits for it.

        Args:
            step: how many are done.
            gathered: whether all have met for it.
        """
        if not (due := [f for f in range(len(self._fragments)) if self._due(f, step)]):
            return
        if self._crossing is not None and not gathered:
            self._departing = True
            self._crossing.gather(step, joins=True)
        self._departing = False
        self._send(due, step + self._settings.delay)
        if not self._settings.delay:
            self._arrive(step)

    def finish(self, step: int) -> None:
        """All that islands have learnt since the last exchange goes into the common model: training ends."""
        self._step, self._finishing = step, True
        self._arrive(None)
        if left := [f for f, last in enumerate(self.state.last) if last < step]:
            if self._crossing is not None:
                self._crossing.gather(step, joins=False)
            self._send(left, step)
            self._arrive(None)

    def drain(self) -> None:
        """Waits for what is under way, without applying it: then it can be saved.

        Raises:
            PeerLost: if an island is gone.
        """
        for fragment, _, _ in self.state.waiting:
            self._fragments[fragment].receive()

    def held_bytes(self) -> int:
        """Bytes of what is kept from step to step besides the model itself."""
        return sum(fragment.held_bytes() for fragment in self._fragments)

    def totals(self) -> dict[str, Any]:
        """What the journal has to know."""
        every = [self._plain, *(f.sums.totals for f in self._fragments if f.sums is not None)]
        added = {key: sum(getattr(each, key) for each in every) for key in asdict(self._plain)}
        return {
            "method": self._settings.name,
            **added,
            "workers": self._group.world,
            "steps": self._exchanges,
            "compression": self._settings.compression.name,
        }

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the block the model has the common weights."""
        for fragment in self._fragments:
            fragment.swap()
        try:
            yield
        finally:
            for fragment in self._fragments:
                fragment.swap()

    # -- exchanges -----------------------------------------------------------------------------------------------

    def _due(self, fragment: int, step: int) -> bool:
        if self.state.adaptive is not None:
            return step - self.state.last[fragment] >= self.state.adaptive.steps
        count = len(self._fragments) - bool(self.state.buffers)
        number = min(fragment, count - 1)
        return (step - self._every * (number + 1) // count) % self._every == 0

    def _send(self, fragments: Sequence[int], due: int) -> None:
        for fragment in fragments:
            self._start(fragment, due)
            self.state.last[fragment] = self._step
            self._exchanges += fragment == 0

    def _start(self, fragment: int, due: int) -> None:
        state = self.state
        seen = state.sent[fragment] = state.seen[fragment]
        state.seen[fragment] = [0] * len(seen)
        # In units of an island's average share, so that sums stay near one.
        total = sum(seen)
        weight = seen[self._replica.mesh.island] * self._group.world / total if total else 0.0
        state.waiting.append((fragment, due, time.monotonic_ns()))
        self._follow_buffers(fragment)
        exact = self._step <= self._settings.compression.exact_steps
        try:
            self._fragments[fragment].start(weight, self._step, exact)
        except PeerLost:
            if self._crossing is None:
                raise  # else it is found out when it is to arrive
        if self._fragments[fragment].sums is None:
            self._plain.plain(self._fragments[fragment].bytes)

    def _arrive(self, until: int | None) -> None:
        """Applies the oldest exchanges, as long as they are due by this step; None: all of them."""
        while ready := self._ready(until):
            blocked = time.monotonic_ns()
            self._replica.doing("exchanging between islands", self._step)
            done = self._received(ready)
            if done is None:  # all begin again, among those who are left
                assert self._crossing is not None
                self._crossing.gather(self._step, joins=not self._finishing)
                continue
            del self.state.waiting[: len(ready)]
            arrived = time.monotonic_ns()
            for fragment, _, begun in ready:
                self._fragments[fragment].apply()
                self.state.sent[fragment] = [0] * self._replica.mesh.islands
                self._record(fragment, begun, blocked, done[fragment])
                blocked = done[fragment]
            self._journal.add("compute", self._step, arrived, time.monotonic_ns())

    def _ready(self, until: int | None) -> list[tuple[int, int, int]]:
        """The oldest exchanges that are due."""
        return [*takewhile(lambda one: until is None or one[1] <= until, self.state.waiting)]

    def _received(self, ready: Sequence[tuple[int, int, int]]) -> dict[int, int] | None:
        """Waits for exchanges, and for all islands to have them: when each was there. None: they were broken off."""
        found: dict[int, int] = {}
        adaptive = self.state.adaptive if not self._finishing else None
        lost = self.state.lost.clone()
        try:
            if self._crossing is not None:
                self._crossing.waits(self._step)
            for fragment, _, _ in ready:
                self._fragments[fragment].receive()
                found[fragment] = time.monotonic_ns()
            if adaptive is not None:
                self._group.all_reduce(lost, "the exchange of losses between islands")
        except PeerLost:
            if self._crossing is None:
                raise
            found = {}
        if self._crossing is not None and not self._crossing.agree(EXCHANGE, self._step, bool(found)):
            return None
        if adaptive is not None:
            adaptive.observe(*lost.tolist())
            self.state.lost.zero_()
        return found

    def _record(self, fragment: int, begun: int, blocked: int, done: int) -> None:
        peers, world = self._replica.mesh.peers("islands"), self._replica.mesh.world
        if len(peers) > 1:
            number = index_among(peers, world, EXCHANGES + fragment)
            self._journal.collective(self._step, number, begun, blocked, done)

    # -- as islands come and go ------------------------------------------------------------------------------------

    def regroup(self, former: Sequence[int | None]) -> int:
        """Exchanges with others from now on, after `Replica.regroup`; see `LocalState.regroup`."""
        self._group = self._replica.groups.islands
        self._plain.workers = self._group.world
        self._again += [(fragment, due) for fragment, due, _ in self.state.waiting]
        self.state.waiting.clear()
        for number, fragment in enumerate(self._fragments):
            self._follow_buffers(number)
            fragment.regroup(self._group)
        return self.state.regroup(former)

    def record(self) -> dict[str, Any]:
        """What `take` needs besides tensors, JSON values, after `regroup`."""
        return {**self.state.record(), "waiting": self._again, "departing": self._departing}

    def take(self, record: dict[str, Any], step: int) -> None:
        """Takes part again: see `LocalState.take`. After `begin_again`, `come_in` follows."""
        self._step, self._finishing = step, False
        self._departing = bool(record["departing"])
        self._again = self.state.take(record)

    def begin_again(self) -> None:
        """Exchanges that were broken off begin again, with what islands have learnt until now."""
        again, self._again = self._again, []
        for fragment, due in again:
            self._start(fragment, due)

    def come_in(self, step: int) -> None:
        """Does the rest of what the others do after this step, where they have taken this island in."""
        if self._departing:
            self._depart(step, gathered=True)
        elif self._settings.delay:
            self._arrive(step)
            self._depart(step)
        else:
            self._arrive(step)

    def _follow_buffers(self, fragment: int) -> None:
        """A module may have put another tensor in a buffer's place."""
        if self.state.buffers and fragment == len(self._fragments) - 1:
            self._fragments[fragment].values = [buffer.get() for buffer in self.state.buffers]

    def _compress(self, seed: int) -> Compress | None:
        settings = self._settings.compression
        return (lambda stretches: sums(settings, self._group, stretches, seed)) if settings.name != "none" else None
