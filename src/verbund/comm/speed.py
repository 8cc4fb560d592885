"""How fast a connection is: seconds that a small message takes, bytes per second of large ones. No torch."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import numpy as np

from verbund.comm.wire import Connection, WireError

_PINGS = 8
_TRIES = 2
_SMALLEST, _LARGEST = 1 << 14, 1 << 20
_GROWING = 2e-3
"""A frame that left sooner is followed by one of twice the size."""
_AHEAD = 1 << 17
"""Bytes that wait in this host: the end of sending shall be near the end of receiving."""
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


@dataclass(frozen=True)
class Speed:
    """What was measured of a pair.

    Args:
        latency: seconds that a small message takes one way: half of the fastest answer.
        forth: bytes per second to the peer.
        back: bytes per second from the peer.
    """

    latency: float
    forth: float
    back: float


def measure(connection: Connection, seconds: float, timeout: float) -> Speed:
    """Measures a connection whose other end calls `serve` with the same arguments.

    Args:
        seconds: for each direction.
        timeout: how long the peer may be silent.

    Raises:
        WireError: if the peer is gone or silent.
    """
    _keep_little(connection)
    times = []
    for _ in range(_PINGS):
        start = time.monotonic()
        connection.send("ping")
        connection.receive(timeout)
        times.append(time.monotonic() - start)
    # The better of two: a process that did not get its core in time makes a link look slow, and nothing makes it fast.
    forth = back = 0.0
    for _ in range(_TRIES):
        forth = max(forth, _send(connection, seconds / _TRIES, timeout))
        connection.send("go")
        rate = _receive(connection, timeout)
        connection.send("rate", {"rate": rate})
        back = max(back, rate)
    return Speed(min(times) / 2, forth, back)


def serve(connection: Connection, seconds: float, timeout: float) -> None:
    """The other end of `measure`."""
    _keep_little(connection)
    for _ in range(_PINGS):
        connection.receive(timeout)
        connection.send("ping")
    for _ in range(_TRIES):
        connection.send("rate", {"rate": _receive(connection, timeout)})
        if connection.receive(timeout).kind != "go":
            raise WireError("the peer measures otherwise")
        _send(connection, seconds / _TRIES, timeout)


def _send(connection: Connection, seconds: float, timeout: float) -> float:
    """Sends for so long; the rate at which the peer received."""
    size = _SMALLEST
    noise = np.frombuffer(os.urandom(_LARGEST), np.uint8)  # what cannot be compressed on the way
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        connection.send("data", None, timeout, noise=noise[:size])
        if time.monotonic() - now < _GROWING and size < _LARGEST:
            size *= 2
    connection.send("end", None, timeout)
    return float(connection.receive(timeout).fields["rate"])


def _receive(connection: Connection, timeout: float) -> float:
    """The rate at which data come: over all, or once a first burst is over, whichever is less. This process may come
    late to what has come already, and then reads it faster than the link brings it."""
    seen: list[tuple[float, int]] = []
    total = 0
    while (message := connection.receive(timeout)).kind == "data":
        total += message.arrays["noise"].nbytes
        seen.append((time.monotonic(), total))
    if not seen:
        raise WireError("the peer sent nothing to measure by")
    first, last = seen[0], seen[-1]
    steady = next((one for one in seen if one[0] - first[0] >= (last[0] - first[0]) / 3), first)
    rates = [(last[1] - since[1]) / (last[0] - since[0]) for since in (first, steady) if last[0] > since[0]]
    return min(rates, default=total / _GROWING)


def _keep_little(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if same.family != socket.AF_UNIX:
            same.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _AHEAD)
