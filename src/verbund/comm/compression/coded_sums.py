"""Compressed sums of what a codec makes bytes of.

Every worker adds up one chunk: all send it theirs, it encodes the sum and sends that to all. What the second encoding
leaves out it keeps with its own (two-way compression as in Tang and others, "1-bit Adam", 2021). Two workers, and
codecs whose sums are not encoded again, send each other everything instead. Sums are formed in float32, in the
order of the ranks: they cannot overflow, and are the same bits everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from verbund.comm.compression.codec import Codec
from verbund.comm.compression.sums import CompressedSums, Tensors
from verbund.comm.members import Members, Work
from verbund.randomness.hash import combine


class CodedSums(CompressedSums):
    """Compressed sums by a codec.

    Args:
        group: the workers.
        stretches: the same on all workers.
        seed: of stochastic rounding.
        codec: what values travel as.
    """

    def __init__(self, group: Members, stretches: Sequence[Tensors], seed: int, codec: Codec) -> None:
        super().__init__(group, stretches, seed)
        direct = group.world <= 2 or not codec.again
        kind = _Direct if direct else _ByChunks
        self._messages: list[_Direct | _ByChunks] = [kind(s, group, codec) for s in stretches]
        self._works: list[tuple[Work | None, int]] = [(None, 0)] * len(self._messages)

    def _start(self, number: int) -> bool:
        messages = self._messages[number]
        finite = messages.encode(self.scale, combine(self.seed, self.step, self.group.rank, number))
        self.totals.bytes_with += messages.bytes_sent
        self._works[number] = (messages.send(), time.monotonic_ns())
        return finite

    def _finish(self, take: bool) -> None:
        for number, messages in enumerate(self._messages):
            self._wait(*self._works[number])
            if take:
                messages.decode(self.scale, combine(self.seed, self.step, self.group.rank, number, 1))
                self._works[number] = (messages.send_sums(), time.monotonic_ns())
        if not take:
            return
        for number, messages in enumerate(self._messages):
            if isinstance(messages, _ByChunks):
                self._wait(*self._works[number])
                messages.decode_sums()
            if self.measuring:
                stretch = self.stretches[number]
                self.totals.left_out += (float(torch.linalg.vector_norm(stretch.error)) * self.scale) ** 2
                self.totals.summed += float(torch.linalg.vector_norm(stretch.values)) ** 2


class _Direct:
    """All workers get all messages."""

    def __init__(self, stretch: Tensors, group: Members, codec: Codec) -> None:
        self._stretch, self._group, self._codec = stretch, group, codec
        self._slices = codec.slices(len(stretch.values))
        size = codec.size(len(stretch.values))
        self._mine = torch.zeros(size, dtype=torch.uint8, device=stretch.flat.device)
        self._all = self._mine.new_zeros(group.world, size)
        self.bytes_sent = size * (group.world - 1)

    def encode(self, scale: float, key: int) -> bool:
        finite = True
        for number, (part, place) in enumerate(self._slices):
            finite &= _encoded(self._codec, self._stretch, part, self._mine[place], scale, combine(key, number))
        return finite

    def send(self) -> Work | None:
        return self._group.start_all_gather(self._all, self._mine)

    def decode(self, scale: float, key: int) -> None:
        stretch, codec = self._stretch, self._codec
        for part, place in self._slices:
            values, error = stretch.values[part], stretch.error[part]
            if len(self._all) == 2 and codec.sliced:  # a sum of two is the same in either order
                mine = _keep(codec, self._mine[place], values, error, scale)
                codec.decode(self._all[1 - self._group.rank, place], values)
                values.add_(mine)
                continue
            error.copy_(values)
            codec.add(self._mine[place], error, -1.0)
            if scale != 1.0:
                error.div_(scale)
            codec.decode(self._all[0, place], values)
            for message in self._all[1:, place]:
                codec.add(message, values)

    def send_sums(self) -> Work | None:
        return None


class _ByChunks:
    """Each worker adds up one chunk."""

    def __init__(self, stretch: Tensors, group: Members, codec: Codec) -> None:
        self._stretch, self._group, self._codec = stretch, group, codec
        count = len(stretch.values)
        step = -(-count // (group.world * codec.unit)) * codec.unit
        size = codec.size(step)
        # What is sent first serves to receive the sums, and what was received gives way to the sum that is sent.
        self._sent = torch.zeros(group.world, size, dtype=torch.uint8, device=stretch.flat.device)
        self._received = torch.zeros_like(self._sent)
        self._sum = self._sent.new_zeros(size)
        bounds = [(min(step * w, count), min(step * (w + 1), count)) for w in range(group.world)]
        self._chunks = [slice(low, high) for low, high in bounds]
        self.bytes_sent = 2 * size * (group.world - 1)

    def _slices(self, worker: int) -> list[tuple[slice, slice]]:
        """Slices of a worker's chunk, as parts of the stretch, and their messages."""
        low, high = self._chunks[worker].start, self._chunks[worker].stop
        return [(slice(p.start + low, p.stop + low), place) for p, place in self._codec.slices(high - low)]

    def encode(self, scale: float, key: int) -> bool:
        finite = True
        for worker in range(self._group.world):
            for number, (part, place) in enumerate(self._slices(worker)):
                message = self._sent[worker, place]
                finite &= _encoded(self._codec, self._stretch, part, message, scale, combine(key, worker, number))
        return finite

    def send(self) -> Work | None:
        return self._group.start_all_to_all(self._received, self._sent)

    def decode(self, scale: float, key: int) -> None:
        stretch, codec, rank = self._stretch, self._codec, self._group.rank
        for worker in range(self._group.world):
            for part, place in self._slices(worker):
                _keep(codec, self._sent[worker, place], stretch.values[part], stretch.error[part], scale)
        for number, (part, place) in enumerate(self._slices(rank)):
            values, message = stretch.values[part], self._sum[place]
            codec.decode(self._received[0, place], values)
            for other in self._received[1:, place]:
                codec.add(other, values)
            codec.encode(values, message, combine(key, number))
            codec.add(message, values, -1.0)
            stretch.error[part].add_(values, alpha=1.0 / scale)

    def send_sums(self) -> Work | None:
        return self._group.start_all_gather(self._sent, self._sum)

    def decode_sums(self) -> None:
        for worker in range(self._group.world):
            for part, place in self._slices(worker):
                self._codec.decode(self._sent[worker, place], self._stretch.values[part])


def _encoded(codec: Codec, stretch: Tensors, part: slice, message: Tensor, scale: float, key: int) -> bool:
    """Loads and encodes a slice; whether it is finite."""
    values = stretch.load(part, scale)
    codec.encode(values, message, key)
    return codec.finite(message, len(values))


def _keep(codec: Codec, message: Tensor, values: Tensor, error: Tensor, scale: float) -> Tensor:
    """Keeps what of `values` is not in the message; what is in it."""
    decoded = torch.empty_like(values)
    codec.decode(message, decoded)
    torch.sub(values, decoded, out=error)
    if scale != 1.0:
        error.div_(scale)
    return decoded
