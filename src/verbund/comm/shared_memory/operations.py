"""The collectives: what a member hands over, what its share is, and what is left for it to fetch.

Sums of few values are taken by every member for itself: one flag each. For many, each member adds up a share, and
then either writes it into all others' memory, where the values live in the arena, or everybody fetches the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verbund.comm.shared_memory.channel import SLOT, Channel
from verbund.comm.shared_memory.reduction import Reducer, chunks, share

ALONE = 1 << 18
"""Up to so many bytes, of all members together, every member adds up all by itself."""

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_SUM_ALONE, _SUM_SHARED, _SUM_RESIDENT, _GATHER, _REDUCE_SCATTER, _BROADCAST, _BARRIER = range(7)


def _signature(kind: int, tensor: Tensor, extra: int = 0) -> int:
    """What all members must agree on, in one word: `extra` is below 4096."""
    return (tensor.numel() << 20) + (extra << 8) + (kind << 4) + _NUMBERS[tensor.dtype]


class Barrier:
    """Nothing is exchanged."""

    signature = _BARRIER << 4
    settles = False

    def publish(self, channel: Channel) -> int | None:
        return 0

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        pass

    def complete(self, channel: Channel, places: tuple[int, ...]) -> None:
        pass


class _Handed:
    """What hands its values over in a slot; one that settles nothing has nothing left to do once it has worked."""

    settles = False
    handed: Tensor

    def publish(self, channel: Channel) -> int | None:
        place = channel.slot()
        if place is not None:
            _slot(channel, place, self.handed).copy_(self.handed)
        return place

    def complete(self, channel: Channel, places: tuple[int, ...]) -> None:
        pass


class SumAlone(_Handed):
    """An all-reduce in which every member takes the whole sum for itself."""

    def __init__(self, tensor: Tensor, maximum: bool, reducer: Reducer) -> None:
        self.handed, self._maximum, self._reducer = tensor, maximum, reducer
        self.signature = _signature(_SUM_ALONE, tensor, maximum)

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        self._reducer.into(self.handed, _everyones(channel, places, self.handed), self._maximum)


class SumShared(_Handed):
    """An all-reduce in which every member adds up a share, in the first member's slot, and then fetches the whole."""

    settles = True

    def __init__(self, tensor: Tensor, maximum: bool, reducer: Reducer) -> None:
        self.handed, self._maximum, self._reducer = tensor, maximum, reducer
        self.signature = _signature(_SUM_SHARED, tensor, maximum)

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        for parts in _shares(channel, places, self.handed):
            self._reducer.into(parts[0], parts, self._maximum)

    def complete(self, channel: Channel, places: tuple[int, ...]) -> None:
        self.handed.copy_(_everyones(channel, places, self.handed)[0])


class SumResident:
    """An all-reduce of values that live in the arenas: every member adds up a share and writes it into all."""

    settles = True

    def __init__(self, tensor: Tensor, place: int, maximum: bool, reducer: Reducer) -> None:
        self._tensor, self._place, self._maximum, self._reducer = tensor, place, maximum, reducer
        self.signature = _signature(_SUM_RESIDENT, tensor, maximum)

    def publish(self, channel: Channel) -> int | None:
        return self._place

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        for parts in _shares(channel, places, self._tensor):
            first = parts[0]
            self._reducer.into(first, parts, self._maximum)
            for part in parts[1:]:
                part.copy_(first)

    def complete(self, channel: Channel, places: tuple[int, ...]) -> None:
        pass


class Gather(_Handed):
    """An all-gather: `targets` get the members' values, by rank."""

    def __init__(self, targets: Sequence[Tensor], tensor: Tensor) -> None:
        self._targets, self.handed = targets, tensor
        self.signature = _signature(_GATHER, tensor)

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        for target, values in zip(self._targets, _everyones(channel, places, self.handed), strict=True):
            target.copy_(values)


class ReduceScatter(_Handed):
    """`target` gets the sum of this member's row of all members' `rows`, shape [members, elements]."""

    def __init__(self, target: Tensor, rows: Tensor, reducer: Reducer) -> None:
        self._target, self.handed, self._reducer = target, rows, reducer
        self.signature = _signature(_REDUCE_SCATTER, target)

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        parts = [rows[channel.rank] for rows in _everyones(channel, places, self.handed)]
        self._reducer.into(self._target, parts, False)


class Broadcast(_Handed):
    """All get the values of member `root`."""

    def __init__(self, tensor: Tensor, root: int) -> None:
        self.handed, self._root = tensor, root
        self.signature = _signature(_BROADCAST, tensor, root)

    def publish(self, channel: Channel) -> int | None:
        if channel.rank != self._root:
            return 0
        return super().publish(channel)

    def work(self, channel: Channel, places: tuple[int, ...]) -> None:
        if channel.rank != self._root:
            self.handed.copy_(_view(channel, self._root, places[self._root], self.handed))


def piece(itemsize: int, members: int = 1) -> int:
    """How many elements of each of `members` fit into a slot."""
    return SLOT // (itemsize * members)


def _view(channel: Channel, member: int, place: int, like: Tensor) -> Tensor:
    return channel.view(member, place, like.numel(), like.dtype).view(like.shape)


def _slot(channel: Channel, place: int, like: Tensor) -> Tensor:
    """This member's slot, with the type and shape of `like`."""
    key = (place, like.shape, like.dtype)
    return channel.plan(key, lambda: _view(channel, channel.rank, place, like))  # type: ignore[no-any-return]


def _everyones(channel: Channel, places: tuple[int, ...], like: Tensor) -> list[Tensor]:
    """The members' values, by rank."""
    return channel.plan(  # type: ignore[no-any-return]
        (places, like.shape, like.dtype),
        lambda: [_view(channel, member, place, like) for member, place in enumerate(places)],
    )


def _shares(channel: Channel, places: tuple[int, ...], like: Tensor) -> list[list[Tensor]]:
    """This member's share of the values, chunk by chunk, each of all members."""

    def make() -> list[list[Tensor]]:
        whole = [_view(channel, member, place, like) for member, place in enumerate(places)]
        low, high = share(like.numel(), channel.rank, channel.world, like.dtype.itemsize)
        return [[values[a:b] for values in whole] for a, b in chunks(low, high, like.dtype.itemsize)]

    return channel.plan((places, like.shape, like.dtype, "shares"), make)  # type: ignore[no-any-return]
