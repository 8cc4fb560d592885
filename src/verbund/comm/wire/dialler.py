"""Dialling: a connection to a listener, once both ends have proved what they know."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

from verbund.comm.wire.address import Tcp, Unix, parse
from verbund.comm.wire.connection import STALL_SECONDS, Connection, Peer
from verbund.comm.wire.credentials import Credentials
from verbund.comm.wire.failure import Closed, Deadline, Refused, WireError
from verbund.comm.wire.frames import BODY_LIMIT, HEADER_LIMIT
from verbund.comm.wire.handshake import Trust, ask, reason
from verbund.comm.wire.stream import Plain, Stream, polled, prepare

_PAUSE = 0.02


def dial(
    address: str,
    credentials: Credentials = None,
    timeout: float = 10.0,
    *,
    body_limit: int = BODY_LIMIT,
    header_limit: int = HEADER_LIMIT,
    stall: float = STALL_SECONDS,
) -> Connection:
    """A connection to who listens at an address, within `timeout` seconds; the rest as for `listen`.

    Raises:
        Closed: if nobody listens there, or whoever did is gone.
        Refused: if one of the two does not trust the other.
        Deadline: if it took too long.
        InputError: if the address is none or not to be dialled without credentials, or the credentials cannot be used.
    """
    deadline = time.monotonic() + timeout
    where = parse(address)
    where.check_trusted(credentials)
    trust = None if credentials is None else Trust.of_dialler(credentials, isinstance(where, Tcp))
    sock = _connected(where, deadline)
    stream: Stream = Plain(sock)
    names: tuple[str, ...] = ()
    if trust is not None:
        stream, names = _agreed(sock, where, trust, deadline)
    peer = Peer(where.host if isinstance(where, Tcp) else "", names)
    return Connection(stream, body_limit, header_limit, stall, peer)


def _connected(where: Unix | Tcp, deadline: float) -> socket.socket:
    targets: list[tuple[int, Any]] = [(socket.AF_UNIX, str(where.path))] if isinstance(where, Unix) else where.resolve()
    failure: WireError = Closed(f"nobody listens at {where}")
    for family, target in targets:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            _connect(sock, target, deadline)
            prepare(sock)
        except TimeoutError:
            failure = Deadline(f"{where} did not answer in time")
        except OSError as error:
            failure = Closed(f"nobody listens at {where}: {error.strerror or error}")
        else:
            return sock
        sock.close()
    raise failure


def _connect(sock: socket.socket, target: Any, deadline: float) -> None:
    while True:
        try:
            return sock.connect(target)
        except BlockingIOError:  # a Unix socket at which too many wait
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_PAUSE)


def _agreed(sock: socket.socket, where: Unix | Tcp, trust: Trust, deadline: float) -> tuple[Stream, tuple[str, ...]]:
    steps = ask(sock, trust, where.host if isinstance(where, Tcp) else "")
    descriptor = sock.fileno()
    try:
        while True:
            event = next(steps)
            left = deadline - time.monotonic()
            if left <= 0 or not polled(descriptor, event, left):
                raise Deadline(f"{where} did not prove in time who it is")
    except StopIteration as end:
        stream, names = end.value
        return stream, names
    except (OSError, ValueError, Closed, Refused) as error:  # ssl's errors are among them
        # An end says nothing of trust: who was there may have been killed. Who does not trust says so, by an alert.
        gone = isinstance(error, Closed | ConnectionError | ssl.SSLEOFError)
        raise (Closed if gone else Refused)(f"{where}: {reason(error)}") from None
    finally:
        steps.close()
