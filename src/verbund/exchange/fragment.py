"""A fragment: the part of the model that islands exchange at one time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verbund.comm.compression.sums import CompressedSums
from verbund.comm.compression.sums import Tensors as Stretch
from verbund.comm.members import Members, Work
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
    ) -> None:
        self.names = list(names)
        self.values = list(values)
        self.common = [value.detach().clone() for value in values]
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        sizes = [value.numel() for value in values]
        device = values[0].device
        self._sent = torch.zeros(sum(sizes) + _NUMBERS, dtype=dtype, device=device)
        self._differences = _views(self._sent, self.values)
        self._moments = torch.zeros(sum(sizes), dtype=dtype, device=device) if outer.momentum else None
        self.moments = _views(self._moments, self.values) if self._moments is not None else []
        self._group, self._outer, self._kept = group, outer, kept
        self.sums: CompressedSums | None = None
        count = sum(sizes[:compressed])
        if compress is not None and count:
            self.sums = compress(
                [Stretch(self._sent[:count], names[:compressed], [in_memory(v) for v in values[:compressed]])]
            )
        self._plain = self._sent[count:]
        self._compressing = False
        self._work: Work | None = None
        self._arriving = False
        self.under_way = False

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
        torch._foreach_copy_(self._differences, self.common)
        torch._foreach_sub_(self._differences, self.values)
        self._sent.mul_(weight)
        self._sent[-2], self._sent[-1] = weight, 0.0
        self._compressing = self.sums is not None and not exact
        sent = self._sent
        if self._compressing and self.sums is not None:
            self.sums.begin(step, 1.0)
            self.sums.start(0)
            self._sent[-1] = float(not self.sums.sent())
            sent = self._plain
        if self.sums is not None:
            self.sums.totals.plain(sent.nbytes)
        self._work = self._group.start_all_reduce(sent)
        self.under_way = self._arriving = True

    def receive(self) -> None:
        """Waits until the sum over the islands is there."""
        if not self._arriving:
            return
        self._arriving = False
        self._group.finish(self._work, "the exchange between islands")
        self._work = None
        if self._compressing and self.sums is not None:
            weight, unfit = self._sent[-2:].tolist()
            self.sums.finish(take=weight != 0.0, finite=unfit == 0.0, unused=set())

    @torch.no_grad()
    def apply(self) -> None:
        """Takes the outer optimiser's step with the mean difference, and takes its result over into the model."""
        self.receive()
        self.under_way = False
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
