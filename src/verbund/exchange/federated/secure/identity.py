"""Who a client is: an Ed25519 key (RFC 8032) whose public half all others have pinned when it was enrolled."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from verbund.errors import InputError

SIGNATURE_BYTES = 64
_DOMAIN = b"verbund secure aggregation 1\0"


class Identity:
    """A private key that lasts over all rounds.

    Args:
        seed: its 32 bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    @staticmethod
    def create() -> Identity:
        """A new one."""
        return Identity(os.urandom(32))

    @staticmethod
    def read(path: Path) -> Identity:
        """The one that `save` wrote.

        Raises:
            InputError: if there is none, or others may read it.
        """
        try:
            mode = path.stat().st_mode
            seed = path.read_bytes()
        except OSError as error:
            raise InputError(f"the identity cannot be read: {error.strerror}", where=str(path)) from None
        if mode & 0o077:
            raise InputError("others may read this private key", where=str(path), fix=f"chmod 600 {path}")
        if len(seed) != 32:
            raise InputError(f"an identity has 32 bytes, this file {len(seed)}", where=str(path))
        return Identity(seed)

    def save(self, path: Path) -> None:
        """Writes the key to a new file that its owner alone can read.

        Raises:
            InputError: if it cannot be written, or is there already.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InputError(f"the identity cannot be written: {error.strerror}", where=str(path)) from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(self._key.private_bytes_raw())

    @property
    def public(self) -> bytes:
        """The 32 bytes that others pin."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, kind: str, context: bytes, said: bytes) -> bytes:
        """A signature, 64 bytes.

        Args:
            kind: what is said, so that no statement passes for another.
            context: the round in which it is said, 32 bytes.
            said: the statement.
        """
        return self._key.sign(_statement(kind, context, said))


def signed(public: bytes, signature: bytes, kind: str, context: bytes, said: bytes) -> bool:
    """Whether the owner of `public` has signed this; the arguments are those of `Identity.sign`."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _statement(kind, context, said))
    except (InvalidSignature, ValueError):
        return False
    return True


def _statement(kind: str, context: bytes, said: bytes) -> bytes:
    return _DOMAIN + kind.encode() + b"\0" + context + said
