"""A fragment: the part of the model that islands exchange at one time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verbund.comm.compression.sums import CompressedSums
from verbund.comm.compression.sums import Tensors as Stretch
from verbund.comm.members import Members, Work
from verbund.comm.peer_lost import PeerLost
from verbund.exchange.outer import OuterOptimizer
from verbund.mesh.compression import in_memory
from verbund.mesh.data import like

Compress = Callable[[Sequence[Stretch]], CompressedSums]
"""Makes compressed sums of stretches of memory."""
_NUMBERS = 2  # the weight, and how many islands have something that is not finite


class Fragment:
    """Some tensors of the model, what the islands last had in common of them, and the exchange under way.

    Args:
        names: of the tensors.
        values: the model's own, as this worker holds them; they may be of different dtypes.
        group: this worker's peers in the other islands, who hold the same of theirs.
        outer: what makes new common values of the mean difference.
        kept: the share of an island's own values that stays when new common ones arrive.
        compress: how differences are compressed, if they are.
        compressed: how many of the tensors, the first ones, that is for.
        revocable: whether an exchange may be broken off and begun again.
    """

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[Tensor],
        group: Members,
        outer: OuterOptimizer,
        kept: float = 0.0,
        compress: Compress | None = None,
        compressed: int = 0,
        revocable: bool = False,
    ) -> None:
        self.names = list(names)
        self.values = list(values)
        self.common = [value.detach().clone() for value in values]
        self._dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        count, device = sum(value.numel() for value in values), values[0].device
        self._moments = torch.zeros(count, dtype=self._dtype, device=device) if outer.momentum else None
        self.moments = _views(self._moments, self.values) if self._moments is not None else []
        self._outer, self._kept = outer, kept
        self._compress, self._compressed, self._revocable = compress, compressed, revocable
        self._before: list[Tensor] = []
        """What compression kept before the exchange under way, where that may begin again."""
        self._prepare(group)

    def _prepare(self, group: Members) -> None:
        """Room to exchange with these members; nothing is under way."""
        self._group = group
        sizes = [value.numel() for value in self.values]
        self._sent = torch.zeros(sum(sizes) + _NUMBERS, dtype=self._dtype, device=self.values[0].device)
        self._differences = _views(self._sent, self.values)
        self.sums: CompressedSums | None = None
        count = sum(sizes[: self._compressed])
        if self._compress is not None and count:
            names, values = self.names[: self._compressed], self.values[: self._compressed]
            self.sums = self._compress([Stretch(self._sent[:count], names, [in_memory(v) for v in values])])
        self._plain = self._sent[count:]
        self._compressing = False
        self._work: Work | None = None
        self._arriving = self._broken = False
        self.under_way = False

    @torch.no_grad()
    def regroup(self, group: Members) -> None:
        """Exchanges with these members from now on. What is under way counts as never begun: others may write still
        where it lies, so that there is new room."""
        former, kept = self.sums, self._before if self.under_way else []
        self._before = []
        self._prepare(group)
        if former is not None and self.sums is not None:
            for target, source in zip(self._kept_by(self.sums), kept or self._kept_by(former), strict=True):
                target.copy_(source)
            self.sums.totals = replace(former.totals, workers=group.world)

    @staticmethod
    def _kept_by(sums: CompressedSums) -> list[Tensor]:
        return [*sums.errors().values(), *sums.warm().values()]

    def held_bytes(self) -> int:
        """Bytes of the common values, the room for differences, the moments, and what compression keeps."""
        kept = [*self.common, self._sent, *([] if self._moments is None else [self._moments])]
        if self.sums is not None:
            kept += [*self.sums.errors().values(), *self.sums.warm().values()]
        return sum(tensor.nbytes for tensor in kept)

    @torch.no_grad()
    def start(self, weight: float, step: int, exact: bool = False) -> None:
        """Sends the difference between the common and this island's own values.

        Args:
            weight: of this island: samples since the last exchange, in any unit that all islands share.
            step: how many steps are done.
            exact: without compression.
        """
        self.under_way = self._arriving = self._broken = True
        torch._foreach_copy_(self._differences, self.common)
        torch._foreach_sub_(self._differences, self.values)
        self._sent.mul_(weight)
        self._sent[-2], self._sent[-1] = weight, 0.0
        self._compressing = self.sums is not None and not exact
        sent = self._sent
        if self._compressing and self.sums is not None:
            if self._revocable:
                self._before = [tensor.clone() for tensor in self._kept_by(self.sums)]
            self.sums.begin(step, 1.0)
            self.sums.start(0)
            self._sent[-1] = float(not self.sums.sent())
            sent = self._plain
        if self.sums is not None:
            self.sums.totals.plain(sent.nbytes)
        self._work = self._group.start_all_reduce(sent)
        self._broken = False

    def receive(self) -> None:
        """Waits until the sum over the islands is there.

        Raises:
            PeerLost: if an island is gone.
        """
        if self._broken:
            raise PeerLost("the exchange between islands could not start")
        if not self._arriving:
            return
        self._arriving, self._broken = False, True
        self._group.finish(self._work, "the exchange between islands")
        self._work = None
        if self._compressing and self.sums is not None:
            weight, unfit = self._sent[-2:].tolist()
            self.sums.finish(take=weight != 0.0, finite=unfit == 0.0, unused=set())
        self._broken = False

    @torch.no_grad()
    def apply(self) -> None:
        """Takes the outer optimiser's step with the mean difference, and takes its result over into the model."""
        self.receive()
        self.under_way, self._before = False, []
        weight = float(self._sent[-2])
        if weight == 0.0:
            return
        difference = self._sent[:-_NUMBERS].div_(weight)
        self._outer.step(difference, self._moments)
        torch._foreach_sub_(self.common, self._differences)
        if self._kept:
            torch._foreach_lerp_(self.values, self.common, 1.0 - self._kept)
        else:
            torch._foreach_copy_(self.values, self.common)

    @property
    def bytes(self) -> int:
        """Bytes of what an island contributes, uncompressed."""
        return self._sent.nbytes

    def swap(self) -> None:
        """Lets the model have the common values, and keeps its own in their place; a second call undoes it."""
        for value, common in zip(self.values, self.common, strict=True):
            own = value.data
            value.data = common
            common.data = own

    @torch.no_grad()
    def begin(self) -> None:
        """What the model has now is what all islands have in common."""
        torch._foreach_copy_(self.common, self.values)

    # -- what is under way, for checkpoints ---------------------------------------------------------------------------

    def arrived(self) -> list[Tensor]:
        """The sums over the islands that have arrived but are not applied, by tensor, and last their weight."""
        return [*self._differences, self._sent[-2]]

    def errors(self) -> list[Tensor]:
        """What of each tensor was not sent yet; empty where nothing is compressed."""
        if self.sums is None:
            return []
        found = self.sums.errors().values()
        return [e.as_strided(v.shape, v.stride(), e.storage_offset()) for e, v in zip(found, self.values, strict=False)]

    def resume(self) -> None:
        """The sums have been filled from a checkpoint: they are applied when they are due."""
        self.under_way = True


def _views(flat: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Runs of a flat tensor in the shapes and strides of `values`."""
    views, place = [], 0
    for value in values:
        views.append(like(flat[place : place + value.numel()], value))
        place += value.numel()
    return views


def cut(sizes: Sequence[int], fragments: int) -> list[tuple[int, int]]:
    """Runs of tensors with about equally many elements: half-open ranges, none of them empty.

    Args:
        sizes: elements of each tensor.
        fragments: how many runs are wanted; there are fewer where there are fewer tensors.
    """
    fragments = min(fragments, len(sizes))
    total, done, starts = sum(sizes), 0, [0]
    for index, size in enumerate(sizes):
        wanted = len(starts)
        left = len(sizes) - index
        if (
            index > starts[-1]
            and wanted < fragments
            and (done + size / 2 > total * wanted / fragments or left == fragments - wanted)
        ):
            starts.append(index)
        done += size
    return list(zip(starts, [*starts[1:], len(sizes)], strict=True))
