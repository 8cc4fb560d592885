"""Bytes on this process's TCP connections, as the kernel counts them. No torch.

gloo and NCCL own their sockets and count nothing, but every socket of a process is a file descriptor, and
Linux keeps `bytes_acked` and `bytes_received` for each TCP connection (RFC 4898's
tcpEStatsAppHCThruOctetsAcked and …Received). So what is reported is payload that the peer has acknowledged or
sent, without headers and repeats.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_TCP_INFO = 11
_LENGTH = 136
_COUNTERS = struct.Struct("=QQ")  # bytes_acked, bytes_received: offsets 120 and 128 of struct tcp_info since Linux 4.1
_OFFSET = 120
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_KEPT = 4096
_DESCRIPTORS = "/proc/self/fd"


class Links:
    """Counts the bytes per peer over this process's life; connections closed since keep their last count."""

    def __init__(self) -> None:
        # Per connection (the inode of its socket, which is unique while it lives, and its peer): sent,
        # received.
        self._open: dict[tuple[str, str], tuple[int, int]] = {}
        self._closed: dict[str, tuple[int, int]] = {}
        # What the open sockets are known to be. A closed one is forgotten: its inode may come back as another
        # kind.
        self._tcp: dict[str, int] = {}
        self._others: set[str] = set()

    def sample(self) -> dict[str, tuple[int, int]] | None:
        """Bytes per peer so far: "ip:port" to (sent, received). None: not measured, the kernel does not say.

        Costs one readlink per open descriptor and one getsockopt per TCP connection; never raises.
        """
        if not sys.platform.startswith("linux"):
            return None
        try:
            sockets = self._sockets()
        except OSError:
            return None
        found: dict[tuple[str, str], tuple[int, int]] = {}
        others: set[str] = set()
        tcp: dict[str, int] = {}
        for name, descriptor in sockets:
            if name in self._others:
                others.add(name)
                continue
            family = self._tcp.get(name) or _tcp_family(descriptor)
            if family is None:
                others.add(name)
                continue
            tcp[name] = family
            if (counted := _count(descriptor, family)) is not None:
                peer, sent, received = counted
                found[name, peer] = (sent, received)
        self._others, self._tcp = others, tcp
        for key, counts in self._open.items():
            now = found.get(key)
            # Counters that fell belong to a new connection on a recycled inode.
            if now is None or now[0] < counts[0] or now[1] < counts[1]:
                self._close(key[1], counts)
        self._open = found
        totals = dict(self._closed)
        for (_, peer), (sent, received) in found.items():
            before = totals.get(peer, (0, 0))
            totals[peer] = (before[0] + sent, before[1] + received)
        return totals

    @staticmethod
    def _sockets() -> list[tuple[str, int]]:
        found = []
        for entry in os.listdir(_DESCRIPTORS):
            try:
                target = os.readlink(f"{_DESCRIPTORS}/{entry}")
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:"):
                found.append((target, int(entry)))
        return found

    def _close(self, peer: str, counts: tuple[int, int]) -> None:
        if peer not in self._closed and len(self._closed) >= _KEPT:
            peer = "others"
        before = self._closed.get(peer, (0, 0))
        self._closed[peer] = (before[0] + counts[0], before[1] + counts[1])


def _tcp_family(descriptor: int) -> int | None:
    """The address family of a TCP socket; None if it is something else, or gone."""
    try:
        with _borrowed(descriptor) as connection:
            is_tcp = connection.family in _FAMILIES and connection.type == socket.SOCK_STREAM
            return int(connection.family) if is_tcp else None
    except OSError:
        return None


def _count(descriptor: int, family: int) -> tuple[str, int, int] | None:
    """Peer, bytes sent and received of a TCP socket; None while it is not connected."""
    try:
        with _borrowed(descriptor, family) as connection:
            raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LENGTH)
            if len(raw) < _LENGTH:
                return None
            host, port = connection.getpeername()[:2]
    except OSError:
        return None
    sent, received = _COUNTERS.unpack_from(raw, _OFFSET)
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), int(sent), int(received)


def _borrowed(descriptor: int, family: int | None = None) -> socket.socket:
    """A duplicate, so that closing the Python object leaves the owner's descriptor alone. Where the family is known
    the kernel need not be asked three times."""
    copy = os.dup(descriptor)
    try:
        if family is None:
            return socket.socket(fileno=copy)
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=copy)
    except OSError:
        os.close(copy)
        raise
