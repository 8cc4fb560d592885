"""Keys of one round: X25519 (RFC 7748), HKDF-SHA256 (RFC 5869) and ChaCha20-Poly1305 (RFC 8439)."""

from __future__ import annotations

import hashlib
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from verbund.exchange.federated.secure.shamir import PRIME

SECRET_BYTES = 32
TAG_BYTES = 16
CHECK_BYTES = 16
_NONCE = bytes(12)  # each key seals one message


def secret() -> bytes:
    """A random element of Shamir's field, which is also a private key of X25519."""
    return secrets.randbelow(PRIME).to_bytes(SECRET_BYTES, "little")


def public(private: bytes) -> bytes:
    """The public half of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def derive(material: bytes, context: bytes, use: bytes) -> bytes:
    """A key of 32 bytes for one use in one round."""
    return HKDF(SHA256(), 32, context, use).derive(material)


def own_mask(seed: bytes, context: bytes) -> bytes:
    """The key of the mask that a client has for itself."""
    return derive(seed, context, b"own")


class Agreement:
    """What two clients agree on by their keys.

    Args:
        private: one's own key.
        context: of the round.
    """

    def __init__(self, private: bytes, context: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(private)
        self._context = context

    def mask(self, peer: bytes, one: int, other: int) -> bytes:
        """The key of the mask that the clients number `one` and `other` share.

        Raises:
            ValueError: if the peer's public key is none (a point of small order).
        """
        return self._derived(peer, "mask", min(one, other), max(one, other))

    def sealing(self, peer: bytes, sender: int, receiver: int) -> ChaCha20Poly1305:
        """What seals the one message from `sender` to `receiver`; raises as `mask`."""
        return ChaCha20Poly1305(self._derived(peer, "share", sender, receiver))

    def _derived(self, peer: bytes, use: str, first: int, second: int) -> bytes:
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        return derive(shared, self._context, f"{use} {first} {second}".encode())


def seal(sealing: ChaCha20Poly1305, shares: bytes) -> bytes:
    """The shares, encrypted and authenticated."""
    return sealing.encrypt(_NONCE, shares, None)


def unseal(sealing: ChaCha20Poly1305, sealed: bytes) -> bytes | None:
    """What was sealed; None if it was altered, or sealed by someone else."""
    try:
        return sealing.decrypt(_NONCE, sealed, None)
    except InvalidTag:
        return None


def commitment(seed: bytes, context: bytes) -> bytes:
    """What tells a seed that is put together later from a wrong one, and nothing about it before: 32 bytes."""
    return hashlib.sha256(b"seed\0" + context + seed).digest()


def check(share: bytes, context: bytes, use: str, owner: int, holder: int) -> bytes:
    """What tells a revealed share from another one, 16 bytes."""
    return hashlib.sha256(f"{use} share {owner} {holder}\0".encode() + context + share).digest()[:CHECK_BYTES]
