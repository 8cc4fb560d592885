"""Who a client is: an Ed25519 key (RFC 8032) whose public half all others have pinned when it was enrolled."""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_der_x509_certificate

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
    def of(pem: str) -> Identity:
        """The key with which a client also proves to be itself when it connects, from its PEM file.

        Raises:
            InputError: if there is no Ed25519 key in it.
        """
        try:
            key = load_pem_private_key(pem.encode(), None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InputError(f"there is no private key: {error}", where="identity") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise InputError("the private key is not of Ed25519", where="identity")
        return Identity(key.private_bytes_raw())

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


def pinned(certificate: bytes) -> bytes:
    """The public key of a client's certificate (DER), as it was pinned at its enrolment.

    Raises:
        InputError: if it has none of Ed25519.
    """
    try:
        key = load_der_x509_certificate(certificate).public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"this is no certificate: {error}", where="identity") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError("the certificate's key is not of Ed25519", where="identity")
    return key.public_bytes_raw()


def signed(public: bytes, signature: bytes, kind: str, context: bytes, said: bytes) -> bool:
    """Whether the owner of `public` has signed this; the arguments are those of `Identity.sign`."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _statement(kind, context, said))
    except (InvalidSignature, ValueError):
        return False
    return True


def _statement(kind: str, context: bytes, said: bytes) -> bytes:
    return _DOMAIN + kind.encode() + b"\0" + context + said
