"""Credentials: why the two ends of a connection trust each other."""

from __future__ import annotations

import hashlib
import os
import secrets
import select
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verbund.comm.wire import certificate
from verbund.errors import InputError

SECRET_BYTES = 32


@dataclass(frozen=True)
class Secret:
    """A run's secret: 32 random bytes that all its processes know. It is in no argument, environment or log."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != SECRET_BYTES:
            raise InputError(f"a run's secret has {SECRET_BYTES} bytes, not {len(self.value)}")

    @staticmethod
    def create() -> Secret:
        """A new one."""
        return Secret(secrets.token_bytes(SECRET_BYTES))

    def write(self, path: Path) -> None:
        """Writes a new file that only this user can read.

        Raises:
            InputError: if there is a file already, or none can be written.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(self.value)
        except OSError as error:
            raise InputError(f"the secret cannot be written: {error.strerror}", where=str(path)) from None

    @staticmethod
    def read(path: Path) -> Secret:
        """The one in a file.

        Raises:
            InputError: if it cannot be read, is no secret, or others than this user may read it.
        """
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                value = file.read(SECRET_BYTES + 1)
        except OSError as error:
            raise InputError(f"the secret cannot be read: {error.strerror}", where=str(path)) from None
        # Root may give it to a group of this process too, which is how Kubernetes hands a secret to another user.
        given = status.st_uid == 0 and status.st_gid in (os.getegid(), *os.getgroups())
        closed = not status.st_mode & (0o037 if given and os.getuid() != 0 else 0o077)
        if not closed or status.st_uid not in (os.getuid(), 0):
            fix = "It must be this user's own: `chmod 600` closes it; make a new one if others were there before"
            raise InputError("others than this user may read the secret", where=str(path), fix=fix)
        if len(value) != SECRET_BYTES:
            raise InputError(f"this is no secret, which is a file of {SECRET_BYTES} bytes", where=str(path))
        return Secret(value)

    @staticmethod
    def receive(descriptor: int, timeout: float = 30.0) -> Secret:
        """The one that comes as the next 32 bytes of a pipe, such as standard input; what follows stays there.

        Raises:
            InputError: if they do not come in time.
        """
        deadline = time.monotonic() + timeout
        value = b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(value) < SECRET_BYTES:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise InputError(f"no secret came through descriptor {descriptor} within {timeout:g} s")
            if not (more := os.read(descriptor, SECRET_BYTES - len(value))):
                raise InputError(f"descriptor {descriptor} ended after {len(value)} of a secret's {SECRET_BYTES} bytes")
            value += more
        return Secret(value)


@dataclass(frozen=True)
class Certificates:
    """Mutual TLS: each end shows a certificate that the authority has signed; files in PEM.

    Args:
        authority: the certificate (or certificates) of who signs.
        certificate: this end's own, with what is between it and the authority.
        key: its private key, without a passphrase.
        name: which name the listener's certificate must have, if not the host's that was dialled.
    """

    authority: Path
    certificate: Path
    key: Path
    name: str | None = None


@dataclass(frozen=True)
class Identity:
    """An Ed25519 key with a certificate of its own, in one PEM file that only this user can read."""

    path: Path

    @staticmethod
    def kept(path: Path) -> Identity:
        """The one in a file; a new one is made if there is none.

        Raises:
            InputError: if it cannot be read or written, or others than this user may read it.
        """
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                pem, _ = certificate.create(f"verbund-{secrets.token_hex(16)}")
                beside = path.with_name(f".{path.name}.{os.getpid()}")
                descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with open(descriptor, "w", encoding="ascii") as file:
                    file.write(pem)
                    file.flush()
                    os.fsync(descriptor)
                os.replace(beside, path)
            status = path.stat()
        except OSError as error:
            raise InputError(f"the identity cannot be used: {error.strerror}", where=str(path)) from None
        if status.st_mode & 0o077 or status.st_uid not in (os.getuid(), 0):
            fix = "`chmod 600` closes it; make a new one if others were there before"
            raise InputError("others than this user may read the private key", where=str(path), fix=fix)
        return Identity(path)

    @property
    def certificate(self) -> bytes:
        """The certificate alone, as DER.

        Raises:
            InputError: if the file has none.
        """
        begin = "-----BEGIN CERTIFICATE-----"
        try:
            return ssl.PEM_cert_to_DER_cert(begin + self.path.read_text(encoding="ascii").partition(begin)[2])
        except (OSError, ValueError) as error:
            raise InputError(f"there is no certificate: {error}", where=str(self.path)) from None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hexadecimal digits."""
        return hashlib.sha256(self.certificate).hexdigest()


@dataclass(frozen=True)
class Pinned:
    """A dialler's: whose certificate the listener must show, and which one this end shows.

    Args:
        fingerprint: SHA-256 of the listener's certificate, in hexadecimal digits.
        identity: None before the listener knows it.
    """

    fingerprint: str
    identity: Identity | None = None


@dataclass(frozen=True)
class Enrolled:
    """A listener's: its own identity, and whom it knows.

    Args:
        identity: what it shows.
        known: the certificates that it takes, as DER, each with its owner's name; asked at every handshake. Who shows
            none is let in without a name; whoever listens decides what that is good for.
    """

    identity: Identity
    known: Callable[[], Mapping[bytes, str]]


Credentials = Secret | Certificates | Pinned | Enrolled | None
"""None: whoever can reach the socket is trusted, which only a Unix socket in a private folder and loopback allow."""
