"""A proxy between two ends of the wire that does to their frames what a bad link would: by a seed, so again the same.

Frames are repeated, reordered, cut short (after which the connection ends), bit-flipped, or late. The handshake passes
as it is: over a Unix socket, 72 bytes each way.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = struct.Struct("<IIQQ")
HANDSHAKE = 72
_HELD_SECONDS = 0.02  # after which a frame goes on that waits for one to overtake it
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Rates:
    """How often what happens to a frame."""

    repeat: float = 0.05
    reorder: float = 0.05
    cut: float = 0.02
    flip: float = 0.02
    late: float = 0.05
    seconds: float = 0.01
    """How late."""


class Proxy:
    """Listens at one Unix socket, and passes on to another.

    Args:
        path: where it listens.
        target: where the server listens.
        seed: of all that happens.
        rates: see there.
        handshake: bytes each way that are no frames.
    """

    def __init__(
        self, path: str, target: str, seed: int, rates: Rates | None = None, handshake: int = HANDSHAKE
    ) -> None:
        self.happened: Counter[str] = Counter()
        self._target = target
        self._seed = seed
        self._rates = rates or Rates()
        self._handshake = handshake
        self._count = 0
        self._closed = False
        self._sockets: list[socket.socket] = []
        Path(path).unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(128)
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        """Passes nothing on any more."""
        self._closed = True
        for each in (self._server, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                here, _ = self._server.accept()
            except OSError:
                return
            there = socket.socket(socket.AF_UNIX)
            try:
                there.connect(self._target)
            except OSError:  # nobody is there
                here.close()
                there.close()
                continue
            self._count += 1
            self._sockets += [here, there]
            for way, source, target in (("to", here, there), ("from", there, here)):
                chance = random.Random(f"{self._seed} {self._count} {way}")
                threading.Thread(target=self._pass, args=(source, target, chance), name="proxy", daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, chance: random.Random) -> None:
        try:
            left = self._handshake
            while left:
                content = source.recv(left)
                if not content:
                    return
                target.sendall(content)
                left -= len(content)
            held = b""
            while True:
                if held and not select.select([source], [], [], _HELD_SECONDS)[0]:
                    target.sendall(held)
                    held = b""
                frame = _frame(source)
                what = self._what(chance)
                if what:
                    self.happened[what] += 1
                if what == "reorder" and not held:
                    held = frame
                    continue
                if what == "cut":
                    target.sendall(frame[: chance.randrange(len(frame))])
                    break
                if what == "flip":
                    flipped = bytearray(frame)
                    flipped[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
                    frame = bytes(flipped)
                if what == "late":
                    time.sleep(self._rates.seconds)
                target.sendall(frame * 2 if what == "repeat" else frame)
                if held:
                    target.sendall(held)
                    held = b""
        except (OSError, ValueError):
            pass
        finally:
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _what(self, chance: random.Random) -> str:
        number = chance.random()
        for name in ("repeat", "reorder", "cut", "flip", "late"):
            number -= getattr(self._rates, name)
            if number < 0:
                return name
        return ""


def _frame(source: socket.socket) -> bytes:
    prefix = _read(source, PREFIX.size)
    _, header, body, _ = PREFIX.unpack(prefix)
    return prefix + _read(source, header + body)


def _read(source: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        more = source.recv(min(_CHUNK, size - len(content)))
        if not more:
            raise OSError("it has ended")
        content += more
    return bytes(content)
