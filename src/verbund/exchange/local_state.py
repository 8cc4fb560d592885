"""What islands that train alone keep between two steps, as pieces of global tensors: for checkpoints.

The common weights are the model's parameters, and the first island's optimiser is the model's: any strategy goes on
from these. All else lies under `exchange`, and is for the same exchange alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.exchange.adaptive import AdaptiveSteps
from verbund.exchange.fragment import Fragment
from verbund.job import Exchange
from verbund.mesh.changing_buffers import Buffer
from verbund.mesh.replica import Replica


class LocalState:
    """The state of an exchange of islands that train alone, as one worker has it.

    Args:
        settings: the exchange.
        replica: this worker's.
        fragments: the parts of the model; the last one is the buffers, if there are any.
        buffers: those that are averaged.
        adaptive: what chooses the steps between two exchanges, if they change.
    """

    def __init__(
        self,
        settings: Exchange,
        replica: Replica,
        fragments: Sequence[Fragment],
        buffers: Sequence[Buffer],
        adaptive: AdaptiveSteps | None,
    ) -> None:
        self.fragments, self.buffers, self.adaptive = fragments, buffers, adaptive
        self.last = [0] * len(fragments)
        """The step after which each fragment was last sent."""
        self.waiting: list[tuple[int, int, int]] = []
        """Exchanges under way, the oldest first: fragment, step in which it is applied, when it was begun."""
        self.seen = [[0] * replica.mesh.islands for _ in fragments]
        """Of each fragment the samples that each island has seen since it was last sent; the same in all islands."""
        self.sent = [[0] * replica.mesh.islands for _ in fragments]
        """Of each fragment that is under way the samples that were seen before it was sent."""
        self.lost = torch.zeros(2, dtype=torch.float64)
        """The losses of this island since the last exchange, and their weight."""
        self._settings, self._replica = settings, replica
        self._held = {held.name: held for held in replica.divided.trained}

    @property
    def _island(self) -> int:
        return self._replica.mesh.island  # which changes as islands come and go

    @property
    def _islands(self) -> int:
        return self._replica.mesh.islands

    def record(self) -> dict[str, Any]:
        """What `load` needs besides tensors, as JSON values of their own: training goes on while they are written."""
        return {
            "name": self._settings.name,
            "islands": self._islands,
            "cut": self._cut,
            "last": list(self.last),
            "waiting": [[fragment, due] for fragment, due, _ in self.waiting],
            "seen": [list(counts) for counts in self.seen],
            "sent": [list(counts) for counts in self.sent],
            "adaptive": self.adaptive.state() if self.adaptive is not None else None,
        }

    @property
    def _cut(self) -> list[Any]:
        """On what it depends which tensors a fragment has."""
        return [self._settings.fragments, self._replica.strategy.axes]

    # -- as islands come and go -----------------------------------------------------------------------------------

    def regroup(self, former: Sequence[int | None]) -> int:
        """Other islands take part from now on. What is under way counts as not sent.

        Args:
            former: the place that each of them had before, in their order; None: it comes back, and has nothing.

        Returns:
            the samples of those that are gone which not all of the model has learnt from.
        """
        every = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(self.seen, self.sent, strict=True)]
        gone = set(range(len(every[0]))) - set(former)
        self.seen = [[0 if place is None else counts[place] for place in former] for counts in every]
        self.sent = [[0] * len(former) for _ in every]
        return sum(max(counts[place] for counts in every) for place in gone)

    def shared(self) -> dict[str, Tensor]:
        """What all islands have alike besides the common weights, by name: the replica's own memory."""
        found = {f"outer/{number}/{i}": m for number, f in enumerate(self.fragments) for i, m in enumerate(f.moments)}
        for number, fragment in enumerate(self.fragments):
            for name, q in fragment.sums.warm().items() if fragment.sums is not None else ():
                found[f"warm/{number}/{name}"] = q
        return found

    def take(self, record: dict[str, Any]) -> list[tuple[int, int]]:
        """Takes the place of an island among others, whose `record` this is, when the model has what they have in
        common and `shared` has been filled. Exchanges that were under way are to begin again: fragments, and the steps
        in which they are applied."""
        for fragment in self.fragments:
            fragment.begin()
        if self.adaptive is not None:
            self.adaptive.load(record["adaptive"])
        self.lost.zero_()
        self.last = [int(step) for step in record["last"]]
        self.seen = [[int(n) for n in counts] for counts in record["seen"]]
        self.sent = [[0] * len(counts) for counts in self.seen]
        return [(int(fragment), int(due)) for fragment, due in record["waiting"]]

    # -- for checkpoints ------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        """This worker's part of what only the exchange knows; to be asked for while the model has the common weights,
        and when what is under way has arrived."""
        own, first = f"island/{self._island}", self._island == 0
        speaks = self._replica.mesh.place("shard", "tensor", "pipeline") == 0
        yield Piece.whole("exchange", f"{own}/lost", self.lost, speaks)
        if (scale := self._replica.loss_scale) is not None:
            numbers = torch.tensor(list(scale.state().values()), dtype=torch.float64)
            yield Piece.whole("exchange", f"{own}/loss_scale", numbers, speaks)
        for number, fragment in enumerate(self.fragments):
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

    def load(self, checkpoint: Checkpoint) -> list[str]:
        """Takes up what a checkpoint has of an exchange's state.

        Returns:
            what had to be dropped, in sentences.
        """
        record = checkpoint.state.get("exchange") or {}
        if record.get("name") != self._settings.name:
            return [f"The state of the exchange `{record['name']}` was dropped"] if record else []
        saved = set(checkpoint.names("exchange"))
        notes = []
        had, has = any(name.startswith("outer/") for name in saved), any(f.moments for f in self.fragments)
        if had and has:
            with torch.no_grad():
                for fragment in self.fragments:
                    self._fill(checkpoint, "outer", fragment, fragment.moments)
        elif had or has:
            notes.append(f"The momentum of the outer optimiser {'was dropped' if had else 'begins anew'}")
        if self.adaptive is not None and record["adaptive"] is not None:
            self.adaptive.load(record["adaptive"])
        count, last = record["islands"], [int(step) for step in record["last"]]
        if count != self._islands or "seen" not in record:
            return [*notes, f"There were {count} islands: what each had learnt since the last exchange was dropped"]
        seen, sent = record["seen"], record["sent"]
        if record.get("cut") != self._cut:
            if record["waiting"] or len(set(last)) > 1:
                what = "The mesh or the fragments have changed"
                return [*notes, f"{what}: what each island had learnt since the last exchange was dropped"]
            last, seen = last[:1] * len(self.fragments), seen[:1] * len(self.fragments)
            sent = self.sent
        self.last = last
        self.seen, self.sent = ([[int(n) for n in counts] for counts in rows] for rows in (seen, sent))
        self._load_own(checkpoint, saved)
        self._load_waiting(checkpoint, record["waiting"])
        return notes

    def _load_own(self, checkpoint: Checkpoint, saved: set[str]) -> None:
        """What this island has learnt since the last exchange, and what only it has besides."""
        own = f"island/{self._island}"
        with torch.no_grad():
            self.lost.copy_(checkpoint.read("exchange", f"{own}/lost"))
            if (scale := self._replica.loss_scale) is not None and f"{own}/loss_scale" in saved:
                numbers = checkpoint.read("exchange", f"{own}/loss_scale").tolist()
                scale.load(dict(zip(scale.state(), numbers, strict=True)))
            for fragment in self.fragments:
                self._fill(checkpoint, f"{own}/values", fragment, fragment.values)
                if all(f"{own}/error/{name}" in saved for name in fragment.names[: len(fragment.errors())]):
                    self._fill(checkpoint, f"{own}/error", fragment, fragment.errors())
                for name, q in fragment.sums.warm().items() if fragment.sums is not None else ():
                    if f"warm/{name}" in saved and checkpoint.shape("exchange", f"warm/{name}") == tuple(q.shape):
                        checkpoint.fill("exchange", f"warm/{name}", q)
        if self._island:
            self._replica.state.load_optimizer(checkpoint, "exchange", f"{own}/optimizer/")

    def _load_waiting(self, checkpoint: Checkpoint, waiting: list[list[int]]) -> None:
        """Exchanges that were under way."""
        for number, due in waiting:
            fragment = self.fragments[number]
            *arrived, weight = fragment.arrived()
            with torch.no_grad():
                self._fill(checkpoint, "waiting", fragment, arrived)
                weight.copy_(checkpoint.read("exchange", f"waiting/{number}"))
            fragment.resume()
            self.waiting.append((number, due, time.monotonic_ns()))

    def _pieces(self, prefix: str, fragment: Fragment, tensors: Sequence[Tensor], owner: bool) -> Iterator[Piece]:
        """Tensors that lie beside those of a fragment, as pieces."""
        if not fragment.names:
            for buffer, tensor in zip(self.buffers, tensors, strict=True):
                speaks = buffer.name in self._replica.divided.buffers
                yield Piece.whole("exchange", f"{prefix}/{buffer.name}", tensor, owner and speaks)
            return
        for name, tensor in zip(fragment.names, tensors, strict=False):  # errors are of the first ones alone
            held = self._held[name]
            yield from held.pieces("exchange", f"{prefix}/{name}", tensor, owner and held.primary)

    def _fill(self, checkpoint: Checkpoint, prefix: str, fragment: Fragment, tensors: Sequence[Tensor]) -> None:
        names = fragment.names or [buffer.name for buffer in self.buffers]
        for name, tensor in zip(names, tensors, strict=False):
            full = f"{prefix}/{name}"
            if fragment.names:
                self._held[name].fill(tensor, checkpoint, "exchange", full)
            else:
                checkpoint.fill("exchange", full, tensor)
