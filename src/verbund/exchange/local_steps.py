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
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.comm.compression.sums import Totals
from verbund.exchange.adaptive import AdaptiveSteps
from verbund.exchange.fragment import Compress, Fragment, cut
from verbund.exchange.outer import OuterOptimizer
from verbund.job import Exchange
from verbund.mesh.compression import sums, takes
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal, index_among

_COLLECTIVES = 1 << 21
"""The first number of the exchanges' collectives, beyond all others of a step."""

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
        self._held = {held.name: held for held in replica.divided.trained}
        compression = settings.compression
        runs = cut([parameter.numel() for parameter in replica.parameters], settings.fragments)
        self._fragments = []
        for low, high in runs:
            pairs = list(zip(replica.names[low:high], replica.parameters[low:high], strict=True))
            pairs.sort(key=lambda pair: not takes(compression, pair[1]))  # those that are compressed come first
            names, values = [name for name, _ in pairs], [value for _, value in pairs]
            count = sum(takes(compression, value) for value in values)
            fragment = Fragment(names, values, self._group, outer, settings.kept, self._compress(seed), count)
            self._fragments.append(fragment)
        buffers = [buffer for buffer in replica.buffers.averaged() if buffer.get().is_floating_point()]
        self._buffers = buffers
        if buffers:  # running statistics are averaged whenever the last fragment is
            mean = OuterOptimizer()
            self._fragments.append(Fragment([], [buffer.get() for buffer in buffers], self._group, mean))
        self._every = settings.steps_between
        self._adaptive = AdaptiveSteps(self._every) if settings.adaptive else None
        self._last = [0] * len(self._fragments)
        self._waiting: list[tuple[int, int, int]] = []
        """Exchanges under way, the oldest first: fragment, step in which it is applied, when it was begun."""
        self._step = 0
        self._lost = torch.zeros(2, dtype=torch.float64)
        """The losses of this island since the last exchange, and their weight."""
        self._exchanges = 0
        self._plain = Totals(self._group.world)
        replica.common = self

    def begin(self, step: int) -> None:
        """Training begins after `step` steps with what the replica has now, which is the same in all islands."""
        self._step = step
        self._last = [step] * len(self._fragments)
        for fragment in self._fragments:
            fragment.begin()

    def after(self, step: int, loss: float, weight: float) -> None:
        """Takes part in the exchanges that are due.

        Args:
            step: how many steps are done.
            loss: the sum of the losses of this island's samples of the last one.
            weight: what it is to be divided by.
        """
        self._step = step
        if math.isfinite(loss):  # fp16 leaves out steps that overflow
            self._lost += torch.tensor([loss, weight], dtype=torch.float64)
        due = [f for f in range(len(self._fragments)) if self._due(f, step)]
        self._arrive(lambda until: until <= step)
        self._send(due, step + self._settings.delay)
        if not self._settings.delay:
            self._arrive(lambda _: True)
        if due and self._adaptive is not None:
            self._observe(self._adaptive)

    def finish(self, step: int) -> None:
        """All that islands have learnt since the last exchange goes into the common model: training ends."""
        self._step = step
        self._arrive(lambda _: True)
        self._send([f for f, last in enumerate(self._last) if last < step], step)
        self._arrive(lambda _: True)

    def drain(self) -> None:
        """Waits for what is under way, without applying it: then it can be saved."""
        for fragment, _, _ in self._waiting:
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
        if self._adaptive is not None:
            return step - self._last[fragment] >= self._adaptive.steps
        count = len(self._fragments) - bool(self._buffers)
        number = min(fragment, count - 1)
        return (step - self._every * (number + 1) // count) % self._every == 0

    def _send(self, fragments: Sequence[int], due: int) -> None:
        for fragment in fragments:
            since = range(self._last[fragment], self._step)
            # In units of an island's average share, so that sums stay near one.
            sizes = [self._sizes(step) for step in since]
            total = sum(map(sum, sizes))
            weight = sum(size[self._island] for size in sizes) * self._group.world / total if total else 0.0
            self._waiting.append((fragment, due, time.monotonic_ns()))
            self._follow_buffers(fragment)
            exact = self._step <= self._settings.compression.exact_steps
            self._fragments[fragment].start(weight, self._step, exact)
            self._last[fragment] = self._step
            self._exchanges += fragment == 0
            if self._fragments[fragment].sums is None:
                size = 2.0 * self._fragments[fragment].bytes * (self._group.world - 1) / self._group.world
                self._plain.bytes_without += size
                self._plain.bytes_with += size

    def _arrive(self, when: Callable[[int], bool]) -> None:
        """Applies the oldest exchanges, as long as they are due."""
        while self._waiting and when(self._waiting[0][1]):
            fragment, _, begun = self._waiting.pop(0)
            blocked = time.monotonic_ns()
            self._replica.doing("the exchange between islands", self._step)
            self._fragments[fragment].receive()
            done = time.monotonic_ns()
            self._fragments[fragment].apply()
            peers, world = self._replica.mesh.peers("islands"), self._replica.mesh.world
            if len(peers) > 1:
                number = index_among(peers, world, _COLLECTIVES + fragment)
                self._journal.collective(self._step, number, begun, blocked, done)
            self._journal.add("compute", self._step, done, time.monotonic_ns())

    def _follow_buffers(self, fragment: int) -> None:
        """A module may have put another tensor in a buffer's place."""
        if self._buffers and fragment == len(self._fragments) - 1:
            self._fragments[fragment].values = [buffer.get() for buffer in self._buffers]

    def _compress(self, seed: int) -> Compress | None:
        settings, group = self._settings.compression, self._group
        return (lambda stretches: sums(settings, group, stretches, seed)) if settings.name != "none" else None

    def _observe(self, adaptive: AdaptiveSteps) -> None:
        self._group.all_reduce(self._lost, "the exchange of losses between islands")
        adaptive.observe(*self._lost.tolist())
        self._lost.zero_()

    # -- checkpoints ---------------------------------------------------------------------------------------------
    #
    # The common weights are the model's parameters, and the first island's optimiser is the model's: any strategy goes
    # on from these. All else lies under `exchange`, and is for the same exchange alone.

    def record(self) -> dict[str, Any]:
        """What `load` needs besides tensors, as JSON values of their own: training goes on while they are written."""
        return {
            "name": self._settings.name,
            "islands": self._group.world,
            "cut": self._cut,
            "last": list(self._last),
            "waiting": [[fragment, due] for fragment, due, _ in self._waiting],
            "adaptive": self._adaptive.state() if self._adaptive is not None else None,
        }

    @property
    def _cut(self) -> list[Any]:
        """On what it depends which tensors a fragment has."""
        return [self._settings.fragments, self._replica.strategy.mesh]

    def pieces(self) -> Iterator[Piece]:
        """This worker's part of what only the exchange knows; to be asked for inside of `swapped`, after `drain`."""
        own, first = f"island/{self._island}", self._island == 0
        speaks = self._replica.mesh.place("shard", "tensor", "pipeline") == 0
        yield Piece.whole("exchange", f"{own}/lost", self._lost, speaks)
        if (scale := self._replica.loss_scale) is not None:
            numbers = torch.tensor(list(scale.state().values()), dtype=torch.float64)
            yield Piece.whole("exchange", f"{own}/loss_scale", numbers, speaks)
        for number, fragment in enumerate(self._fragments):
            yield from self._pieces(f"{own}/values", fragment, fragment.common, True)
            if fragment.moments:
                yield from self._pieces("outer", fragment, fragment.moments, first)
            if errors := fragment.errors():
                yield from self._pieces(f"{own}/error", fragment, errors, True)
            for name, q in fragment.sums.warm().items() if fragment.sums is not None else ():
                if self._held[name].tensor_cut is None and self._held[name].rows is None:
                    yield Piece.whole("exchange", f"warm/{name}", q, first and self._held[name].primary)
            if fragment.under_way:
                *arrived, weight = fragment.arrived()
                yield from self._pieces("waiting", fragment, arrived, first)
                yield Piece.whole("exchange", f"waiting/{number}", weight, speaks and first)
        if not first:
            for piece in self._replica.pieces("optimizer"):
                yield replace(piece, kind="exchange", name=f"{own}/optimizer/{piece.name}")

    def load(self, checkpoint: Checkpoint, step: int) -> list[str]:
        """Goes on from a checkpoint, with whose universal part the replica has been filled.

        Returns:
            what had to be dropped, in sentences.
        """
        self.begin(step)
        record = checkpoint.state.get("exchange") or {}
        if record.get("name") != self._settings.name:
            return [f"The state of the exchange `{record['name']}` was dropped"] if record else []
        saved = set(checkpoint.names("exchange"))
        notes = []
        had, has = any(name.startswith("outer/") for name in saved), any(f.moments for f in self._fragments)
        if had and has:
            with torch.no_grad():
                for fragment in self._fragments:
                    self._fill(checkpoint, "outer", fragment, fragment.moments)
        elif had or has:
            notes.append(f"The momentum of the outer optimiser {'was dropped' if had else 'begins anew'}")
        if self._adaptive is not None and record["adaptive"] is not None:
            self._adaptive.load(record["adaptive"])
        count, last = record["islands"], [int(step) for step in record["last"]]
        if count != self._group.world:
            return [*notes, f"There were {count} islands: what each had learnt since the last exchange was dropped"]
        if record.get("cut") != self._cut:
            if record["waiting"] or len(set(last)) > 1:
                what = "The mesh or the fragments have changed"
                return [*notes, f"{what}: what each island had learnt since the last exchange was dropped"]
            last = last[:1] * len(self._fragments)
        own = f"island/{self._island}"
        self._last = last
        with torch.no_grad():
            self._lost.copy_(checkpoint.read("exchange", f"{own}/lost"))
            if (scale := self._replica.loss_scale) is not None and f"{own}/loss_scale" in saved:
                numbers = checkpoint.read("exchange", f"{own}/loss_scale").tolist()
                scale.load(dict(zip(scale.state(), numbers, strict=True)))
            for fragment in self._fragments:
                self._fill(checkpoint, f"{own}/values", fragment, fragment.values)
                if all(f"{own}/error/{name}" in saved for name in fragment.names[: len(fragment.errors())]):
                    self._fill(checkpoint, f"{own}/error", fragment, fragment.errors())
                for name, q in fragment.sums.warm().items() if fragment.sums is not None else ():
                    if f"warm/{name}" in saved and checkpoint.shape("exchange", f"warm/{name}") == tuple(q.shape):
                        checkpoint.fill("exchange", f"warm/{name}", q)
            for number, due in record["waiting"]:
                fragment = self._fragments[number]
                *arrived, weight = fragment.arrived()
                self._fill(checkpoint, "waiting", fragment, arrived)
                weight.copy_(checkpoint.read("exchange", f"waiting/{number}"))
                fragment.resume()
                self._waiting.append((number, due, time.monotonic_ns()))
        if self._island:
            self._replica.state.load_optimizer(checkpoint, "exchange", f"{own}/optimizer/")
        return notes

    def _pieces(self, prefix: str, fragment: Fragment, tensors: Sequence[Tensor], owner: bool) -> Iterator[Piece]:
        """Tensors that lie beside those of a fragment, as pieces."""
        if not fragment.names:
            for buffer, tensor in zip(self._buffers, tensors, strict=True):
                speaks = buffer.name in self._replica.divided.buffers
                yield Piece.whole("exchange", f"{prefix}/{buffer.name}", tensor, owner and speaks)
            return
        for name, tensor in zip(fragment.names, tensors, strict=False):  # errors are of the first ones alone
            held = self._held[name]
            yield from held.pieces("exchange", f"{prefix}/{name}", tensor, owner and held.primary)

    def _fill(self, checkpoint: Checkpoint, prefix: str, fragment: Fragment, tensors: Sequence[Tensor]) -> None:
        names = fragment.names or [buffer.name for buffer in self._buffers]
        for name, tensor in zip(names, tensors, strict=False):
            full = f"{prefix}/{name}"
            if fragment.names:
                self._held[name].fill(tensor, checkpoint, "exchange", full)
            else:
                checkpoint.fill("exchange", full, tensor)
