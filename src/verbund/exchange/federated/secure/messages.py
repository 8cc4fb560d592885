"""Messages of the protocol, and how what came is checked.

    server to client                                     client to server
    invite: the round's number and cohort                advertise: two public keys, signed; a commitment to its seed;
                                                         whom it has drawn; its weight
    keys: those of its neighbours                        shares: of its seed and key, sealed for whom it has drawn
    deliver: the shares sealed for it                    masked: its vector
    survivors: whose vectors have come                   consent: a signature of that list
    consents: those of whom it has drawn                 reveal: of each survivor the share of the seed, of each other
                                                         the share of the key

Clients are numbers: their places in the cohort.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.comm.wire import bits, frames
from verbund.comm.wire.bits import Bits
from verbund.comm.wire.failure import WireError
from verbund.comm.wire.frames import Message, Payload
from verbund.exchange.federated.secure.keys import TAG_BYTES
from verbund.exchange.federated.secure.shamir import SHARE_BYTES

SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES
_LENGTH = struct.Struct("<I")


class Malformed(ValueError):
    """A message is not what the protocol says it is."""


@dataclass(frozen=True)
class Sent:
    """A message on its way: `connection.send(sent.kind, sent.fields, **sent.arrays)`."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Payload] = field(default_factory=dict)

    def message(self) -> Message:
        """What arrives, where no wire is between the two."""
        arrays = {
            name: array.values.astype(bits.dtype(array.width)) if isinstance(array, Bits) else np.array(array)
            for name, array in self.arrays.items()
        }
        return Message(self.kind, self.fields, arrays)

    @property
    def size(self) -> int:
        """Bytes on the wire, frame and all."""
        header, body = frames.encode(self.kind, self.fields, self.arrays)
        return frames.PREFIX.size + len(header) + sum(len(part) for part in body)

    def packed(self) -> bytes:
        """What travels, in one piece, as it lies in a file; `opened` makes a message of it."""
        header, body = frames.encode(self.kind, self.fields, self.arrays)
        return b"".join((_LENGTH.pack(len(header)), header, *body))


def opened(raw: bytes) -> Message:
    """The message that a client has packed.

    Raises:
        Malformed: if it is none.
    """
    try:
        (length,) = _LENGTH.unpack_from(raw)
        header, body = bytearray(raw[_LENGTH.size :][:length]), np.frombuffer(raw[_LENGTH.size + length :], np.uint8)
        kind, fields, described = frames.decode(header, body.size, 16 * len(raw) + 64)
        arrays, at = {}, 0
        for each in described:
            part = body[at : at + each.size]
            at += each.size
            laid = each.finish(part, None) if each.packed else part.copy().view(each.plain).reshape(each.shape)
            arrays[each.name] = laid
    except (WireError, struct.error, ValueError, TypeError) as error:
        raise Malformed(f"cannot be read: {error}") from None
    return Message(kind, fields, arrays)


def octets(message: Message, name: str, *shape: int) -> NDArray[np.uint8]:
    """An array of bytes of this shape.

    Raises:
        Malformed: if there is none.
    """
    return _array(message, name, "uint8", shape)


def clients(message: Message, name: str, cohort: int) -> list[int]:
    """Numbers of clients, rising.

    Raises:
        Malformed: if there are none, or they are not that.
    """
    found = message.arrays.get(name)
    if found is None or found.ndim != 1:
        raise Malformed(f"has no list `{name}`")
    listed: list[int] = _array(message, name, "uint32", found.shape).tolist()
    if any(a >= b for a, b in pairwise(listed)) or (listed and listed[-1] >= cohort):
        raise Malformed(f"has a list `{name}` that is no rising list of clients")
    return listed


def numbered(found: list[int]) -> NDArray[np.uint32]:
    """A list of clients as it travels."""
    return np.array(found, np.uint32)


def packed(words: NDArray[Any], width: int) -> dict[str, Payload]:
    """A vector of words below 2^width; the wire packs numbers of up to 32 bits, so a wider one goes in two parts."""
    low = Bits((words & words.dtype.type((1 << min(width, bits.WIDEST)) - 1)).astype(np.uint32), min(width, 32))
    if width <= bits.WIDEST:
        return {"vector": low}
    return {"vector": low, "high": Bits((words >> np.uint64(bits.WIDEST)).astype(np.uint32), width - bits.WIDEST)}


def unpacked(message: Message, length: int, width: int, word: np.dtype[Any]) -> NDArray[Any]:
    """The vector that `packed` has packed.

    Raises:
        Malformed: if it is of another length or width.
    """
    low = _words(message, "vector", length, min(width, bits.WIDEST)).astype(word)
    if width > bits.WIDEST:
        low |= _words(message, "high", length, width - bits.WIDEST).astype(word) << word.type(bits.WIDEST)
    return low


def advertisement(client: int, public: bytes) -> bytes:
    """What a client signs of its keys."""
    return client.to_bytes(4, "big") + public


def bitmap(listed: frozenset[int], cohort: int) -> NDArray[np.uint8]:
    """Who of the cohort is in the list: uint8 [cohort]."""
    found = np.zeros(cohort, np.uint8)
    found[sorted(listed)] = 1
    return found


def _words(message: Message, name: str, length: int, width: int) -> NDArray[Any]:
    words = _array(message, name, bits.dtype(width).name, (length,))
    if length and int(words.max()) >> width:
        raise Malformed(f"has words of more than {width} bits in `{name}`")
    return words


def _array(message: Message, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    found = message.arrays.get(name)
    if found is None:
        raise Malformed(f"has no array `{name}`")
    if found.dtype.name != dtype or found.shape != shape:
        raise Malformed(f"has an array `{name}` of {found.dtype.name} {list(found.shape)} for {dtype} {list(shape)}")
    return found
