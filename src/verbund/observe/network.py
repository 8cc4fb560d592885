"""Bytes on this process's TCP connections, as the kernel counts them. No torch.

gloo and NCCL own their sockets and count nothing, but every socket of a process is a file descriptor, and
Linux keeps `bytes_acked` and `bytes_received` for each TCP connection (RFC 4898's
tcpEStatsAppHCThruOctetsAcked and …Received). So what is reported is payload that the peer has acknowledged or
sent, without headers and repeats. What went over the wire for it is estimated from the kernel's numbers of segments:
each has the headers of Ethernet, IP and TCP.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading

_TCP_INFO = 11
_LENGTH = 208
# struct tcp_info: options at 5; bytes_acked, bytes_received, segs_out, segs_in at 120 (Linux 4.1, 4.2); bytes_sent,
# repeats included, at 200 (4.19).
_COUNTERS = struct.Struct("=5xB114xQQII56xQ")
_LEAST = 136
_TIMESTAMPS = 1
_HEADERS = {socket.AF_INET: 14 + 20 + 20, socket.AF_INET6: 14 + 40 + 20}
_TIMESTAMP_BYTES = 12
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_KEPT = 4096
_DESCRIPTORS = "/proc/self/fd"


_Counts = tuple[int, int, int, int]


class Links:
    """Counts the bytes per peer over this process's life; connections closed since keep their last count."""

    def __init__(self) -> None:
        # Per connection (the inode of its socket, which is unique while it lives, and its peer): sent,
        # received, and the same with headers and repeats.
        self._open: dict[tuple[str, str], _Counts] = {}
        self._closed: dict[str, _Counts] = {}
        # What the open sockets are known to be. A closed one is forgotten: its inode may come back as another
        # kind.
        self._tcp: dict[str, int] = {}
        self._others: set[str] = set()
        self._lock = threading.Lock()

    def sample(self) -> dict[str, tuple[int, int]] | None:
        """Bytes per peer so far: "ip:port" to (sent, received). None: not measured, the kernel does not say.

        Costs one readlink per open descriptor and one getsockopt per TCP connection; never raises. Threads may call it
        at once.
        """
        if not sys.platform.startswith("linux"):
            return None
        with self._lock:
            return self._sampled()

    def _sampled(self) -> dict[str, tuple[int, int]] | None:
        try:
            sockets = self._sockets()
        except OSError:
            return None
        found: dict[tuple[str, str], _Counts] = {}
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
                peer, counts = counted
                found[name, peer] = counts
        self._others, self._tcp = others, tcp
        for key, counts in self._open.items():
            now = found.get(key)
            # Counters that fell belong to a new connection on a recycled inode.
            if now is None or now[0] < counts[0] or now[1] < counts[1]:
                self._close(key[1], counts)
        self._open = found
        return {peer: counts[:2] for peer, counts in self._totals().items()}

    def wire(self) -> dict[str, tuple[int, int]]:
        """The same as of the last sample with the headers of all segments, also of acknowledgements: an estimate."""
        with self._lock:
            return {peer: counts[2:] for peer, counts in self._totals().items()}

    def _totals(self) -> dict[str, _Counts]:
        totals = dict(self._closed)
        for (_, peer), counts in self._open.items():
            totals[peer] = _added(totals.get(peer), counts)
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

    def _close(self, peer: str, counts: _Counts) -> None:
        if peer not in self._closed and len(self._closed) >= _KEPT:
            peer = "others"
        self._closed[peer] = _added(self._closed.get(peer), counts)


def _added(before: _Counts | None, counts: _Counts) -> _Counts:
    one = before or (0, 0, 0, 0)
    return one[0] + counts[0], one[1] + counts[1], one[2] + counts[2], one[3] + counts[3]


def _tcp_family(descriptor: int) -> int | None:
    """The address family of a TCP socket; None if it is something else, or gone."""
    try:
        with _borrowed(descriptor) as connection:
            is_tcp = connection.family in _FAMILIES and connection.type == socket.SOCK_STREAM
            return int(connection.family) if is_tcp else None
    except OSError:
        return None


def _count(descriptor: int, family: int) -> tuple[str, _Counts] | None:
    """Peer, and what a TCP socket has sent and received; None while it is not connected."""
    try:
        with _borrowed(descriptor, family) as connection:
            raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LENGTH)
            if len(raw) < _LEAST:
                return None
            host, port = connection.getpeername()[:2]
    except OSError:
        return None
    options, sent, received, segments_out, segments_in, repeated = _COUNTERS.unpack(raw.ljust(_LENGTH, b"\0"))
    header = _HEADERS[socket.AddressFamily(family)] + (_TIMESTAMP_BYTES if options & _TIMESTAMPS else 0)
    counts = sent, received, max(sent, repeated) + header * segments_out, received + header * segments_in
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), counts


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
