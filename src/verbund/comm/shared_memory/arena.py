"""Memory that the processes of a host share: each has an arena of its own, and maps those of its neighbours.

An arena is a memfd. It has no name anywhere, and so is gone with the last process that maps it, however that ends. As
much address space as the machine has memory is reserved, so that an arena never moves; what is handed out is allocated
first, so that touching it cannot fail.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verbund.comm.shared_memory.identity import Unavailable
from verbund.observe.memory import available_bytes

_PAGE = mmap.PAGESIZE
_TOKEN = 32  # bytes at the beginning, by which a neighbour knows the arena
_LEFT = 64  # where its process says that it takes part in nothing any more
_SPARE = 8  # this part of the free memory is left free


class NoRoom(Exception):
    """There is not enough free memory."""


class Memory:
    """A mapped arena, one's own or a neighbour's."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._map = mmap.mmap(descriptor, size)
        self._flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size = size
        self.address: int = self._flat.data_ptr()

    def words(self, place: int, count: int) -> memoryview:
        """`count` whole numbers of 64 bits; reading or writing one is a single load or store."""
        return memoryview(self._map)[place : place + 8 * count].cast("q")

    def view(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements from byte `place` on."""
        return self._flat[place : place + count * dtype.itemsize].view(dtype)

    def token(self) -> str:
        return self._map[:_TOKEN].hex()

    @property
    def left(self) -> bool:
        """Whether its process has said that it goes on with nothing that neighbours wait for."""
        return bool(self.words(_LEFT, 1)[0])


class Arena(Memory):
    """This process's own."""

    def __init__(self) -> None:
        self._free = _PAGE
        try:
            size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            self._descriptor = os.memfd_create("verbund", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, size)
            os.posix_fallocate(self._descriptor, 0, _PAGE)
            super().__init__(self._descriptor, size)
        except (OSError, ValueError, AttributeError) as error:
            raise Unavailable(f"no memory can be shared: {_reason(error)}") from None
        weakref.finalize(self, os.close, self._descriptor)  # else its memory would stay when nobody uses it any more
        self._map[:_TOKEN] = secrets.token_bytes(_TOKEN)

    def take(self, size: int) -> int:
        """The place of `size` more bytes, all zero, at the beginning of a page; they are never given back.

        Raises:
            NoRoom: if so much is not free.
        """
        size = -(-size // _PAGE) * _PAGE
        free = available_bytes()
        if (free is not None and size > free - free // _SPARE) or size > self.size - self._free:
            raise NoRoom(f"{size >> 20} MiB are not free")
        try:
            os.posix_fallocate(self._descriptor, self._free, size)
        except OSError as error:
            raise NoRoom(f"{size >> 20} MiB cannot be had: {error.strerror}") from None
        place = self._free
        self._free += size
        return place

    def leave(self) -> None:
        """Says so: neighbours that wait for this process are told that it is gone."""
        self.words(_LEFT, 1)[0] = 1

    def place_of(self, tensor: Tensor) -> int | None:
        """Where in this arena a tensor's memory begins; None if it is elsewhere."""
        place = tensor.data_ptr() - self.address
        return place if 0 <= place < self.size else None

    def record(self) -> dict[str, Any]:
        """What a neighbour needs to map it, as plain values."""
        return {"pid": os.getpid(), "descriptor": self._descriptor, "size": self.size, "token": self.token()}


@dataclass(frozen=True)
class Neighbour:
    """Another process of this host: its arena, and a descriptor that is readable as soon as it has ended."""

    memory: Memory
    life: int
    close: Callable[[], object]
    """Closes the descriptor; so does the end of the last reference."""

    @staticmethod
    def of(record: dict[str, Any]) -> Neighbour:
        """Maps what `Arena.record` describes.

        Raises:
            Unavailable: if it cannot be had, or is not what it should be.
        """
        try:
            life = os.pidfd_open(record["pid"])
            descriptor = os.open(f"/proc/{record['pid']}/fd/{record['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = Memory(descriptor, record["size"])
            finally:
                os.close(descriptor)
        except (OSError, ValueError, AttributeError) as error:
            raise Unavailable(f"the memory of another worker cannot be mapped: {_reason(error)}") from None
        if memory.token() != record["token"]:
            raise Unavailable("the memory of another worker is not what it should be")
        return Neighbour(memory, life, weakref.finalize(memory, os.close, life))


class Lives:
    """Watches over neighbours, by numbers that the caller gives them."""

    def __init__(self, neighbours: dict[int, Neighbour]) -> None:
        self._neighbours = neighbours  # their descriptors are open as long as they are
        self._poll = select.poll()
        self._memories = {number: neighbour.memory for number, neighbour in neighbours.items()}
        self._numbers = {neighbour.life: number for number, neighbour in neighbours.items()}
        for life in self._numbers:
            self._poll.register(life, select.POLLIN)

    def ended(self) -> list[int]:
        """Who has ended, zombies among them, or has left."""
        left = {number for number, memory in self._memories.items() if memory.left}
        return sorted(left | {self._numbers[life] for life, _ in self._poll.poll(0)})


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
