"""Compression of the gradients along the axis `data`: which parameters take part, and what is kept between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.comm.compression.coded_sums import CodedSums
from verbund.comm.compression.methods import codec
from verbund.comm.compression.power_sgd import PowerSums, shrinks
from verbund.comm.compression.sums import CompressedSums, Tensors, Totals
from verbund.comm.members import Members
from verbund.job import Compression
from verbund.mesh.axes import Mesh
from verbund.mesh.held import Held
from verbund.mesh.shard import Shards

KIND = "exchange"
ERROR = "compression/error/"
"""Of a parameter, with a first dimension for the replicas of all islands: what each has not sent yet."""
WARM = "compression/power_sgd/"
"""Of a parameter, or the boxes of one that a worker holds, with a first dimension for the islands: the Q to begin
with."""


class GradientCompression:
    """What the axis `data` needs of a job's compression.

    Args:
        settings: of the job.
        held: the trained parameters of this worker, in the order in which their gradients are added up.
        mesh: this worker's place.
        seed: of what is drawn.
        shards: the axis `shard`, which compresses for itself.
    """

    def __init__(
        self, settings: Compression, held: Sequence[Held], mesh: Mesh, seed: int, shards: Shards | None = None
    ) -> None:
        self.settings, self.shards = settings, shards
        self._mesh, self._seed = mesh, seed
        self._place, self._replicas = mesh.place("islands", "data"), mesh.islands * mesh.data
        self._held = {h.name: h for h in held}
        self._names = {id(h.values): h.name for h in held}
        self.sums: CompressedSums | None = None

    def takes(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient is compressed.

        Those that several workers hold of one replica are not: their neighbours in memory differ from worker to
        worker, and with them what comes of them.
        """
        held = self._held[self._names[id(parameter)]]
        places = {stage % self._mesh.pipeline for stage in held.stages}
        if not parameter.numel() or len(places) > 1 or (self._mesh.tensor > 1 and held.tensor_cut is None):
            return False
        return takes(self.settings, parameter)

    def build(self, group: Members, stretches: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> CompressedSums:
        """The sums of some flat stretches of gradients, each with the parameters whose they are."""
        tensors = [
            Tensors(flat, [self._names[id(p)] for p in parameters], [in_memory(p) for p in parameters])
            for flat, parameters in stretches
        ]
        self.sums = sums(self.settings, group, tensors, self._seed)
        return self.sums

    def unused(self, parameters: Sequence[Tensor], users: Sequence[float]) -> set[str]:
        """The names of those that no worker used."""
        return {self._names[id(p)] for p, count in zip(parameters, users, strict=True) if not count}

    def held_bytes(self) -> int:
        """Bytes of what is kept from step to step."""
        if self.sums is None:
            return 0
        return sum(t.nbytes for kept in (self.sums.errors(), self.sums.warm()) for t in kept.values())

    def totals(self) -> dict[str, Any]:
        """What the journal has to know."""
        shards = self.shards.casts.totals if self.shards is not None else None
        data = self.sums.totals if self.sums is not None else None
        found = asdict(data or shards or Totals())
        if data is not None and shards is not None:
            for key in ("bytes_without", "bytes_with", "seconds"):
                found[key] += getattr(shards, key)
        return {"method": self.settings.name, **found}

    # -- between runs --------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        """What every worker keeps for the next step."""
        mesh = self._mesh
        for name, held, error in self._errors():
            for box, part in held.spans():
                values = (error[part] if held.shape else error).unsqueeze(0)
                shape, offset, length = (self._replicas, *held.shape), (self._place, *box.offset), (1, *box.length)
                yield Piece(KIND, ERROR + name, shape, values.dtype, offset, length, values, held.primary)
        for name, q in self.sums.warm().items() if self.sums is not None else ():
            speaks = mesh.place("data") == 0 and self._held[name].primary
            shape, offset, length = (mesh.islands, *q.shape), (mesh.island, 0, 0), (1, *q.shape)
            yield Piece(KIND, self._warm_name(name), shape, q.dtype, offset, length, q.unsqueeze(0), speaks)

    def load(self, checkpoint: Checkpoint) -> str | None:
        """Takes up what was kept when a checkpoint was saved, by the same or another method; see `load`."""
        saved = set(checkpoint.names(KIND))
        former, taken = 0, set()
        with torch.no_grad():
            for name, held, error in self._errors():
                if ERROR + name not in saved:
                    continue
                taken.add(ERROR + name)
                former = checkpoint.shape(KIND, ERROR + name)[0]
                for box, part in held.spans():
                    values = error[part] if held.shape else error
                    values.copy_(self._share(checkpoint, ERROR + name, former, box.offset, box.length))
            for name, q in self.sums.warm().items() if self.sums is not None else ():
                full = self._warm_name(name)
                if full in saved and checkpoint.shape(KIND, full)[1:] == tuple(q.shape):
                    island = min(self._mesh.island, checkpoint.shape(KIND, full)[0] - 1)
                    q.copy_(checkpoint.read(KIND, full, (island, 0, 0), (1, *q.shape))[0])
        mine = {ERROR + name for name in self._held} & saved
        if lost := len(mine - taken):
            return f"{_DROPPED} of {lost} of {len(mine)} parameters, which are not compressed now"
        if former and former != self._replicas:
            return shared_out(former, self._replicas)
        return None

    def _share(
        self, checkpoint: Checkpoint, name: str, former: int, offset: tuple[int, ...], length: tuple[int, ...]
    ) -> Tensor:
        place, workers = self._place, self._replicas
        sources = [place] if former == workers else range(former)
        total = sum(checkpoint.read(KIND, name, (w, *offset), (1, *length))[0].double() for w in sources)
        assert isinstance(total, Tensor)
        return total if former == workers else total / workers

    def _errors(self) -> Iterator[tuple[str, Held, Tensor]]:
        for name, error in self.sums.errors().items() if self.sums is not None else ():
            held = self._held[name]
            values = held.values
            yield name, held, error.as_strided(values.shape, values.stride(), error.storage_offset())

    def _warm_name(self, name: str) -> str:
        held = self._held[name]
        if held.tensor_cut is None and held.rows is None:
            return WARM + name
        return WARM + name + "".join(str(box) for box, _ in held.spans())


def shared_out(former: int, now: int) -> str:
    """What the user is told where what was kept is divided anew."""
    return (
        f"What {former} workers had not sent of their gradients yet is shared out among {now}: the sum is the same, "
        "the steps are not quite"
    )


def takes(settings: Compression, tensor: Tensor) -> bool:
    """Whether a method compresses a tensor of this shape."""
    if settings.name == "power_sgd":
        return shrinks(in_memory(tensor), settings.rank, settings.minimum_ratio)
    return settings.name != "none"


def sums(settings: Compression, group: Members, stretches: Sequence[Tensors], seed: int) -> CompressedSums:
    """Sums of stretches over the workers of a group, compressed by a method."""
    made = codec(settings)
    return PowerSums(group, stretches, seed, settings.rank) if made is None else CodedSums(group, stretches, seed, made)


def load(checkpoint: Checkpoint, compression: GradientCompression | None) -> str | None:
    """Takes up what compression had kept when a checkpoint was saved.

    If there are more or fewer workers now, each takes an even share of what all had kept: their sum is what counts.

    Returns:
        What the user should know, if it is not what an uninterrupted run has.
    """
    if compression is not None:
        return compression.load(checkpoint)
    if any(name.startswith(ERROR) for name in checkpoint.names(KIND)):
        return f"{_DROPPED}, as they are not compressed now"
    return None


_DROPPED = "The run's gradients were compressed so far. What was not sent of them yet is dropped"


def in_memory(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of a dense tensor's dimensions in the order in which they lie in memory."""
    pairs = sorted(zip(tensor.stride(), range(tensor.dim()), strict=True), key=lambda pair: (-pair[0], pair[1]))
    return tuple(tensor.shape[dim] for _, dim in pairs)
