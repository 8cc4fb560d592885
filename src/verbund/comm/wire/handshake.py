"""The handshake: both ends prove what they know before any frame is read.

A handshake is a generator that yields what it waits for (POLLIN or POLLOUT) and returns the stream. So a listener has
many under way in one thread, and none can keep it waiting.

With a secret, 32 random bytes go each way, and then HMAC-SHA256 of role, TLS certificate and both of them, the
listener's first. The certificate is the listener's own and no authority has signed it; but who stands in between has to
show another one, and then the proofs do not match. Under mutual TLS the certificates are the proof, signed by an
authority or known one by one. Either way the listener's last word says that it has accepted, so that the dialler need
not find out at its first message.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from verbund.comm.wire import tls
from verbund.comm.wire.credentials import Certificates, Enrolled, Pinned, Secret
from verbund.comm.wire.failure import Closed, Refused, WireError
from verbund.comm.wire.stream import Plain, Stream

_GREETING = b"verbund1"
_ACCEPTED = b"accepted"
_ROLES = b"listener", b"dialler."
_NONCE = 32
_PROOF = 32
_NO_CERTIFICATE = bytes(32)

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Yields select.POLLIN or POLLOUT: what must come before the next step."""


@dataclass(frozen=True)
class Trust:
    """What one end goes by: its credentials, and how it speaks TLS, if it does."""

    credentials: Secret | Certificates | Pinned | Enrolled
    context: ssl.SSLContext | None = None
    fingerprint: bytes = _NO_CERTIFICATE
    """SHA-256 of the certificate that a listener has made for itself."""

    @staticmethod
    def of_listener(credentials: Secret | Certificates | Pinned | Enrolled, encrypted: bool) -> Trust:
        if isinstance(credentials, Certificates):
            return Trust(credentials, tls.mutual(credentials, server=True))
        if isinstance(credentials, Enrolled):
            return Trust(credentials, tls.enrolled(credentials))
        if isinstance(credentials, Pinned):
            raise TypeError("who listens dials nobody whose certificate it could compare")
        return Trust(credentials, *tls.own_server()) if encrypted else Trust(credentials)

    @staticmethod
    def of_dialler(credentials: Secret | Certificates | Pinned | Enrolled, encrypted: bool) -> Trust:
        if isinstance(credentials, Certificates):
            return Trust(credentials, tls.mutual(credentials, server=False))
        if isinstance(credentials, Pinned):
            return Trust(credentials, tls.pinned(credentials))
        if isinstance(credentials, Enrolled):
            raise TypeError("who dials lets nobody in")
        return Trust(credentials, tls.any_client() if encrypted else None)


def answer(sock: socket.socket, trust: Trust) -> Steps[tuple[Stream, tuple[str, ...]]]:
    """The listener's side; returns the stream and the names in the peer's certificate.

    If it fails, or is closed before its end, the socket is closed.

    Raises:
        Refused: if the peer does not prove what it must.
        OSError, WireError: if it is gone.
    """
    stream: Stream = Plain(sock)
    try:
        if trust.context is not None:
            # Who has been enrolled since is known to a new context alone.
            context = tls.enrolled(trust.credentials) if isinstance(trust.credentials, Enrolled) else trust.context
            stream = yield from _encrypt(context.wrap_socket(sock, True, do_handshake_on_connect=False))
        if isinstance(trust.credentials, Secret):
            greeting = yield from _take(stream, len(_GREETING) + _NONCE)
            if not greeting.startswith(_GREETING):
                raise Refused("the peer does not speak this protocol")
            nonces = greeting[len(_GREETING) :] + secrets.token_bytes(_NONCE)
            own, expected = (_proof(trust.credentials, role, trust.fingerprint, nonces) for role in _ROLES)
            yield from _give(stream, nonces[_NONCE:] + own)
            if not hmac.compare_digest((yield from _take(stream, _PROOF)), expected):
                raise Refused("the peer does not know the secret")
        names = _names(stream, trust)
        yield from _give(stream, _ACCEPTED)
        return stream, names
    except BaseException:
        stream.sock.close()
        raise


def ask(sock: socket.socket, trust: Trust, host: str) -> Steps[tuple[Stream, tuple[str, ...]]]:
    """The dialler's side of `answer`."""
    stream: Stream = Plain(sock)
    try:
        if trust.context is not None:
            name = trust.credentials.name or host if isinstance(trust.credentials, Certificates) else None
            wrapped = trust.context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            stream = yield from _encrypt(wrapped)
            if (
                isinstance(trust.credentials, Pinned)
                and tls.fingerprint(wrapped).hex() != trust.credentials.fingerprint
            ):
                raise Refused("the peer's certificate is not the one that was pinned")
        if isinstance(trust.credentials, Secret):
            nonce = secrets.token_bytes(_NONCE)
            yield from _give(stream, _GREETING + nonce)
            reply = yield from _take(stream, _NONCE + _PROOF)
            nonces = nonce + reply[:_NONCE]
            fingerprint = tls.fingerprint(stream.sock) if isinstance(stream.sock, ssl.SSLSocket) else _NO_CERTIFICATE
            expected, own = (_proof(trust.credentials, role, fingerprint, nonces) for role in _ROLES)
            if not hmac.compare_digest(reply[_NONCE:], expected):
                raise Refused("the peer does not know the secret, or somebody stands in between")
            yield from _give(stream, own)
        if (yield from _take(stream, len(_ACCEPTED))) != _ACCEPTED:
            raise Refused("the peer does not speak this protocol")
        return stream, _names(stream, trust)
    except BaseException:
        stream.sock.close()
        raise


def _proof(secret: Secret, role: bytes, fingerprint: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.value, _GREETING + role + fingerprint + nonces, hashlib.sha256)


def _encrypt(sock: ssl.SSLSocket) -> Steps[Stream]:
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.do_handshake()
                return tls.Tls(sock)
            except ssl.SSLWantReadError:
                yield select.POLLIN
            except ssl.SSLWantWriteError:
                yield select.POLLOUT
    except BaseException:
        sock.close()
        raise


def _names(stream: Stream, trust: Trust) -> tuple[str, ...]:
    if not isinstance(stream.sock, ssl.SSLSocket):
        return ()
    if not isinstance(trust.credentials, Enrolled):
        return tls.names(stream.sock)
    shown = stream.sock.getpeercert(binary_form=True)
    if shown is None:
        return ()
    if (name := trust.credentials.known().get(shown)) is None:
        raise Refused("the peer's certificate is not enrolled")
    return (name,)


def _take(stream: Stream, size: int) -> Steps[bytes]:
    taken = bytearray(size)
    view = memoryview(taken)
    while view.nbytes:
        try:
            count = stream.receive(view)
        except BlockingIOError:
            yield select.POLLIN
            continue
        if count == 0:
            raise Closed("the peer closed the connection before the two had agreed")
        view = view[count:]
    return bytes(taken)


def _give(stream: Stream, content: bytes) -> Steps[None]:
    view = memoryview(content)
    while view.nbytes:
        try:
            view = view[stream.send(view) :]
        except BlockingIOError:
            yield select.POLLOUT


def reason(error: BaseException) -> str:
    """Why a handshake failed: one of few texts, none of them the peer's."""
    if message := getattr(error, "verify_message", None):
        return f"the peer's certificate does not count: {message}"
    if isinstance(error, OSError):
        text = getattr(error, "reason", None) or error.strerror or type(error).__name__
        return str(text).lower().replace("_", " ")
    return str(error) if isinstance(error, WireError) else type(error).__name__
