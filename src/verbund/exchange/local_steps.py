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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from verbund.checkpoint.read import Checkpoint
from verbund.comm.compression.sums import Totals
from verbund.exchange.adaptive import AdaptiveSteps
from verbund.exchange.fragment import Compress, Fragment, cut
from verbund.exchange.local_state import LocalState
from verbund.exchange.outer import OuterOptimizer
from verbund.job import Exchange
from verbund.mesh.compression import sums, takes
from verbund.mesh.replica import Replica
from verbund.observe.events import EXCHANGES, Journal, index_among

Sizes = Callable[[int], Sequence[int]]
"""The samples of each island's share of a ticket."""


class LocalSteps:
    """What a worker does between its island and the others.

    Args:
        settings: the exchange.
        replica: this worker's, with its first values.
        sizes: how many samples of a ticket each island has.
        journal: gets the collectives.
        seed: of what compression draws.
    """

    def __init__(self, settings: Exchange, replica: Replica, sizes: Sizes, journal: Journal, seed: int = 0) -> None:
        self._settings, self._replica, self._journal = settings, replica, journal
        self._sizes, self._island = sizes, replica.mesh.island
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
            fragments.append(Fragment(names, values, self._group, outer, settings.kept, self._compress(seed), count))
        buffers = [buffer for buffer in replica.buffers.averaged() if buffer.get().is_floating_point()]
        if buffers:  # running statistics are averaged whenever the last fragment is
            mean = OuterOptimizer()
            fragments.append(Fragment([], [buffer.get() for buffer in buffers], self._group, mean))
        self._every = settings.steps_between
        adaptive = AdaptiveSteps(self._every) if settings.adaptive else None
        self._fragments = fragments
        self.state = LocalState(settings, replica, fragments, buffers, adaptive)
        self._step = 0
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

    def after(self, step: int, loss: float, weight: float) -> None:
        """Takes part in the exchanges that are due.

        Args:
            step: how many steps are done.
            loss: the sum of the losses of this island's samples of the last one.
            weight: what it is to be divided by.
        """
        self._step = step
        if math.isfinite(loss):  # fp16 leaves out steps that overflow
            self.state.lost += torch.tensor([loss, weight], dtype=torch.float64)
        due = [f for f in range(len(self._fragments)) if self._due(f, step)]
        self._arrive(lambda until: until <= step)
        self._send(due, step + self._settings.delay)
        if not self._settings.delay:
            self._arrive(lambda _: True)
        if due and self.state.adaptive is not None:
            self._observe(self.state.adaptive)

    def finish(self, step: int) -> None:
        """All that islands have learnt since the last exchange goes into the common model: training ends."""
        self._step = step
        self._arrive(lambda _: True)
        self._send([f for f, last in enumerate(self.state.last) if last < step], step)
        self._arrive(lambda _: True)

    def drain(self) -> None:
        """Waits for what is under way, without applying it: then it can be saved."""
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
            since = range(self.state.last[fragment], self._step)
            # In units of an island's average share, so that sums stay near one.
            sizes = [self._sizes(step) for step in since]
            total = sum(map(sum, sizes))
            weight = sum(size[self._island] for size in sizes) * self._group.world / total if total else 0.0
            self.state.waiting.append((fragment, due, time.monotonic_ns()))
            self._follow_buffers(fragment)
            exact = self._step <= self._settings.compression.exact_steps
            self._fragments[fragment].start(weight, self._step, exact)
            self.state.last[fragment] = self._step
            self._exchanges += fragment == 0
            if self._fragments[fragment].sums is None:
                self._plain.plain(self._fragments[fragment].bytes)

    def _arrive(self, when: Callable[[int], bool]) -> None:
        """Applies the oldest exchanges, as long as they are due."""
        while self.state.waiting and when(self.state.waiting[0][1]):
            fragment, _, begun = self.state.waiting.pop(0)
            blocked = time.monotonic_ns()
            self._replica.doing("exchanging between islands", self._step)
            self._fragments[fragment].receive()
            done = time.monotonic_ns()
            self._fragments[fragment].apply()
            peers, world = self._replica.mesh.peers("islands"), self._replica.mesh.world
            if len(peers) > 1:
                number = index_among(peers, world, EXCHANGES + fragment)
                self._journal.collective(self._step, number, begun, blocked, done)
            self._journal.add("compute", self._step, done, time.monotonic_ns())

    def _follow_buffers(self, fragment: int) -> None:
        """A module may have put another tensor in a buffer's place."""
        if self.state.buffers and fragment == len(self._fragments) - 1:
            self._fragments[fragment].values = [buffer.get() for buffer in self.state.buffers]

    def _compress(self, seed: int) -> Compress | None:
        settings, group = self._settings.compression, self._group
        return (lambda stretches: sums(settings, group, stretches, seed)) if settings.name != "none" else None

    def _observe(self, adaptive: AdaptiveSteps) -> None:
        self._group.all_reduce(self.state.lost, "the exchange of losses between islands")
        adaptive.observe(*self.state.lost.tolist())
        self.state.lost.zero_()
