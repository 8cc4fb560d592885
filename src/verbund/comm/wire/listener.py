"""Listening: connections from whoever proves that it may.

A thread accepts and has all handshakes under way at once, each with a deadline. Where there are too many, the oldest of
the address that has most of them makes room: who only opens connections shuts nobody else out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import select
import selectors
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from verbund.comm.wire.address import Tcp, Unix, parse
from verbund.comm.wire.connection import STALL_SECONDS, Connection, Peer
from verbund.comm.wire.credentials import Credentials
from verbund.comm.wire.failure import Closed, Deadline
from verbund.comm.wire.frames import BODY_LIMIT, HEADER_LIMIT
from verbund.comm.wire.handshake import Steps, Trust, answer, reason
from verbund.comm.wire.stream import Plain, Stream, polled, prepare
from verbund.errors import InputError

HANDSHAKE_SECONDS = 10.0
_HANDSHAKES = 128
_WAITING = 1024  # connections that are made and that nobody has asked for
_BACKLOG = 1024
_PAUSE = 0.05
_TURN = 0.5  # after which one who accepts looks whether the listener was closed
_LOG = logging.getLogger(__name__)


class Listener:
    """Accepts connections; made by `listen`. It has a descriptor that is readable while one waits."""

    def __init__(self, sock: socket.socket, address: Unix | Tcp, trust: Trust | None, limits: dict[str, Any]) -> None:
        self.address = str(address)
        """Where it listens, with the port that it got."""
        self.refused: Counter[str] = Counter()
        """How many were turned away, by reason."""
        self._trust = trust
        self._limits = limits
        self._sock = sock
        self._address = address
        self._made: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        with contextlib.ExitStack() as opened:  # what is missing is told here, and not in the thread
            opened.callback(sock.close)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._told, self._tell = os.pipe()
            self._wake, self._waker = os.pipe()
            opened.pop_all()
        self._accepting = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="listening", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """A descriptor that is readable while a connection waits to be accepted."""
        return self._told

    def accept(self, timeout: float | None = None) -> Connection:
        """The next connection whose handshake is done.

        Raises:
            Deadline: if none came within `timeout` seconds.
            Closed: if this listener is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closing:
            left = _TURN if deadline is None else max(0.0, deadline - time.monotonic())
            if polled(self._told, select.POLLIN, min(left, _TURN)):
                with self._accepting:  # of several threads that see it, one gets it
                    if not self._made.empty():
                        os.read(self._told, 1)
                        return self._made.get()
            elif left == 0:
                raise Deadline(f"nobody dialled {self.address} in time")
        raise Closed(f"nobody listens at {self.address} any more")

    def close(self) -> None:
        """Listens no more; connections that nobody has accepted are closed."""
        if self._closing:
            return
        self._closing = True
        os.write(self._waker, b"x")
        self._thread.join()
        self._sock.close()
        if isinstance(self._address, Unix):
            with contextlib.suppress(OSError):
                self._address.path.unlink()
        with self._accepting:
            while not self._made.empty():
                self._made.get().close()
        for descriptor in (self._told, self._tell, self._wake, self._waker):
            os.close(descriptor)

    def _serve(self) -> None:
        with self._selector as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            under_way: dict[int, _UnderWay] = {}
            while not self._closing:
                first = min((one.deadline for one in under_way.values()), default=None)
                for key, _ in selector.select(None if first is None else max(0.0, first - time.monotonic())):
                    if key.data is not None and key.fd in under_way:
                        self._go_on(key.data, under_way, selector)
                    elif key.fileobj is self._sock:
                        self._welcome(under_way, selector)
                now = time.monotonic()
                for late in [one for one in under_way.values() if one.deadline <= now]:
                    self._give_up(late, "it did not prove in time that it may", under_way, selector)
            for one in under_way.values():
                one.steps.close()

    def _welcome(self, under_way: dict[int, _UnderWay], selector: selectors.BaseSelector) -> None:
        try:
            sock, raw = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                _LOG.warning("%s: %s", self.address, error.strerror)
                time.sleep(_PAUSE)  # it stays readable: without a pause this would spin
            return
        host = str(raw[0]) if isinstance(self._address, Tcp) else ""
        try:
            prepare(sock)
        except OSError:  # it has gone again
            sock.close()
            return
        if self._trust is None:
            self._hand_over(Plain(sock), Peer(host))
            return
        if len(under_way) >= _HANDSHAKES:
            busiest = Counter(one.host for one in under_way.values()).most_common(1)[0][0]
            oldest = next(one for one in under_way.values() if one.host == busiest)
            self._give_up(oldest, "too many dialled at once", under_way, selector)
        descriptor = sock.fileno()
        one = _UnderWay(answer(sock, self._trust), descriptor, host, time.monotonic() + HANDSHAKE_SECONDS)
        under_way[descriptor] = one
        selector.register(descriptor, selectors.EVENT_READ, one)

    def _go_on(self, one: _UnderWay, under_way: dict[int, _UnderWay], selector: selectors.BaseSelector) -> None:
        try:
            event = next(one.steps)
        except StopIteration as end:
            del under_way[one.descriptor]
            selector.unregister(one.descriptor)
            stream, names = end.value
            self._hand_over(stream, Peer(one.host, names))
        except Exception as error:  # whatever a stranger has caused
            self._give_up(one, reason(error), under_way, selector)
        else:
            reads = event == select.POLLIN
            selector.modify(one.descriptor, selectors.EVENT_READ if reads else selectors.EVENT_WRITE, one)

    def _hand_over(self, stream: Stream, peer: Peer) -> None:
        if self._made.qsize() >= _WAITING:
            stream.sock.close()
            self._refuse(peer.address, "nobody accepts what has been dialled")
            return
        self._made.put(Connection(stream, peer=peer, **self._limits))
        os.write(self._tell, b"x")

    def _give_up(
        self, one: _UnderWay, why: str, under_way: dict[int, _UnderWay], selector: selectors.BaseSelector
    ) -> None:
        del under_way[one.descriptor]
        with contextlib.suppress(KeyError, OSError, ValueError):
            selector.unregister(one.descriptor)
        one.steps.close()
        self._refuse(one.host, why)

    def _refuse(self, host: str, why: str) -> None:
        self.refused[why] += 1
        total = self.refused.total()
        if total & (total - 1) == 0:  # the 1st, 2nd, 4th, 8th …: a flood does not fill the log
            _LOG.warning(
                "%s: refused a connection%s: %s (%d so far)", self.address, host and f" from {host}", why, total
            )


@dataclass(frozen=True)
class _UnderWay:
    """A handshake that waits for its peer."""

    steps: Steps[tuple[Stream, tuple[str, ...]]]
    descriptor: int
    host: str
    deadline: float


def listen(
    address: str,
    credentials: Credentials = None,
    *,
    body_limit: int = BODY_LIMIT,
    header_limit: int = HEADER_LIMIT,
    stall: float = STALL_SECONDS,
) -> Listener:
    """Listens at `unix:PATH` or `tcp:HOST:PORT`; port 0 takes a free one, which `Listener.address` has.

    A secret over TCP is told inside TLS. Without credentials it listens on loopback, or in a folder that only this user
    can enter. The other arguments are those of each `Connection`.

    Raises:
        InputError: if the address cannot be listened at, or not without credentials, or the credentials cannot be used.
    """
    where = parse(address)
    where.check_trusted(credentials)
    trust = None if credentials is None else Trust.of_listener(credentials, isinstance(where, Tcp))
    limits = {"body_limit": body_limit, "header_limit": header_limit, "stall": stall}
    try:
        sock = _bound(where)
    except OSError as error:
        fix = "Another process listens there" if error.errno == errno.EADDRINUSE else None
        raise InputError(f"cannot listen: {error.strerror or error}", where=address, fix=fix) from None
    if isinstance(where, Tcp):
        where = Tcp(where.host, sock.getsockname()[1])
    return Listener(sock, where, trust, limits)


def _bound(where: Unix | Tcp) -> socket.socket:
    if isinstance(where, Unix):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: Any = str(where.path)
    else:
        family, target = where.resolve()[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(where, Tcp):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        if isinstance(where, Unix):
            os.chmod(where.path, 0o600)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
