"""TLS 1.3 from the standard library: contexts for both ways of trust, and the stream of bytes."""

from __future__ import annotations

import hashlib
import os
import ssl
import threading
from pathlib import Path
from typing import Any

from verbund.comm.wire import certificate
from verbund.comm.wire.credentials import Certificates, Enrolled, Pinned
from verbund.errors import InputError


class Tls:
    """A socket under TLS whose handshake is done. OpenSSL's object bears one thread at a time: threads take turns."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self.sock: ssl.SSLSocket = sock
        self._turn = threading.Lock()

    def send(self, view: memoryview) -> int:
        with self._turn:
            try:
                return self.sock.send(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def receive(self, view: memoryview) -> int:
        with self._turn:
            try:
                return self.sock.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def pending(self) -> bool:
        with self._turn:
            return self.sock.pending() > 0


def own_server() -> tuple[ssl.SSLContext, bytes]:
    """A listener's context with a certificate of its own, and its fingerprint; trust in it comes by the secret."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    pem, der = certificate.create()
    descriptor = os.memfd_create("certificate")  # OpenSSL reads files alone, and the key shall lie on no disk
    try:
        os.write(descriptor, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context, hashlib.sha256(der).digest()


def fingerprint(sock: ssl.SSLSocket) -> bytes:
    """SHA-256 of the certificate that the peer has shown."""
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def names(sock: ssl.SSLSocket) -> tuple[str, ...]:
    """The names in the peer's certificate, if it was checked: its subject's common names, then the alternative ones."""
    found = sock.getpeercert() or {}
    subject: Any = found.get("subject", ())
    alternative: Any = found.get("subjectAltName", ())
    common = [value for part in subject for key, value in part if key == "commonName"]
    return (*common, *(value for _, value in alternative))


def any_client() -> ssl.SSLContext:
    """A dialler's context that takes any certificate; what is in it is bound to the secret afterwards."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def mutual(credentials: Certificates, server: bool) -> ssl.SSLContext:
    """A context in which both ends show certificates that the authority has signed.

    Raises:
        InputError: if a file cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(credentials.authority)
    except (OSError, ValueError) as error:
        raise _unusable("the authority's certificate", credentials.authority, error) from None
    for what, path in (("the certificate", credentials.certificate), ("the private key", credentials.key)):
        if not os.access(path, os.R_OK):
            raise InputError(f"{what} cannot be read", where=str(path))
    try:
        # No question for a passphrase at a terminal where there may be none.
        context.load_cert_chain(credentials.certificate, credentials.key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise _unusable("the certificate with its private key", credentials.certificate, error) from None
    return context


def enrolled(credentials: Enrolled) -> ssl.SSLContext:
    """A listener's context that takes clients without a certificate, and of certificates those that are known now.

    Raises:
        InputError: if its own identity cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    if known := credentials.known():
        context.load_verify_locations(cadata=b"".join(known))
    _show(context, credentials.identity.path)
    return context


def pinned(credentials: Pinned) -> ssl.SSLContext:
    """A dialler's context that shows its identity, if it has one; the listener's fingerprint is compared afterwards.

    Raises:
        InputError: if the identity cannot be used.
    """
    context = any_client()
    if credentials.identity is not None:
        _show(context, credentials.identity.path)
    return context


def _show(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_cert_chain(path, password=lambda: "")
    except (OSError, ValueError) as error:
        raise _unusable("the identity", path, error) from None


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are not resumed, and a ticket would look like a message that has come
    return context


def _unusable(what: str, path: Path, error: Exception) -> InputError:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return InputError(f"{what} cannot be used: {str(reason).lower().replace('_', ' ')}", where=str(path))
