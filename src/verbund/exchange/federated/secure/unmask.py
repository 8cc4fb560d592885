"""How a server takes the masks off a sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from verbund.exchange.federated.keystream import Keystream
from verbund.exchange.federated.secure.keys import SECRET_BYTES, Agreement
from verbund.exchange.federated.secure.shamir import reconstruct
from verbund.exchange.federated.secure.terms import Round


class Revealed:
    """Shares that have been revealed, by owner and point: of a survivor those of its seed, else those of its key."""

    def __init__(self, round: Round) -> None:
        self._needed = round.near.shares
        self._shares: defaultdict[int, dict[int, bytes]] = defaultdict(dict)

    def add(self, owner: int, point: int, share: bytes) -> None:
        """Takes one."""
        self._shares[owner][point] = share

    def count(self, owner: int) -> int:
        """How many there are."""
        return len(self._shares[owner])

    def secret(self, owner: int) -> bytes | None:
        """The secret, 32 bytes; None if there are too few shares."""
        found = self._shares[owner]
        if len(found) < self._needed:
            return None
        some = {point: found[point] for point in sorted(found)[: self._needed]}
        return reconstruct(some).to_bytes(SECRET_BYTES, "little")


def mask_keys(private: bytes, owner: int, peers: Mapping[int, bytes], context: bytes) -> list[tuple[bytes, int]]:
    """What takes from a sum the masks that survivors have in common with a client that has dropped out.

    Args:
        private: the lost client's key of masks.
        owner: its number.
        peers: the survivors' public keys of masks, by number.
        context: of the round.
    """
    agreement = Agreement(private, context)
    return [(agreement.mask(public, owner, peer), -1 if peer < owner else 1) for peer, public in peers.items()]


def subtract(total: NDArray[Any], streams: Iterable[tuple[bytes, int]]) -> None:
    """Adds keystreams to the total, or takes them away."""
    for key, sign in streams:
        Keystream(key).add(total, 0, sign)
