"""Server processes for tests: one process without threads, forked early, forks them all."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from verbund.comm.wire import Secret, listen
from verbund.exchange.parameter_server.custody import Custody
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.server import Server

Told = Callable[[list[int]], None]


class Nursery:
    """Forks servers that prove to know a secret."""

    def __init__(self, secret: Secret) -> None:
        asked, ask = os.pipe()
        heard, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ask)
            os.close(heard)
            try:
                _nurse(os.fdopen(asked), tell, secret)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(tell)
        self._ask: BinaryIO = os.fdopen(ask, "wb", buffering=0)
        self._changed = threading.Condition()
        self._born: dict[str, int] = {}
        self._listeners: dict[str, Told] = {}
        threading.Thread(target=self._hear, args=(os.fdopen(heard),), daemon=True).start()

    def server(self, address: str, given: dict[str, Any], joined: Told) -> int:
        """The pid of a new server that listens."""
        self._listeners[address] = joined
        self._ask.write(json.dumps({"address": address, **given}).encode() + b"\n")
        with self._changed:
            assert self._changed.wait_for(lambda: address in self._born, 20.0), "a server did not start"
            return self._born[address]

    def _hear(self, words: TextIO) -> None:
        for line in words:
            address, *numbers = line.split()
            if len(numbers) == 1:
                with self._changed:
                    self._born[address] = int(numbers[0])
                    self._changed.notify_all()
            else:
                told = (list(map(int, numbers)),)
                threading.Thread(target=self._listeners[address], args=told, daemon=True).start()  # it may wait for us


def _nurse(asked: TextIO, tell: int, secret: Secret) -> None:
    torch.set_num_threads(1)  # threads of the parent's pool are not here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pids = []
    for line in asked:
        pid = os.fork()
        if pid == 0:
            try:
                _serve(json.loads(line), tell, secret)
            finally:
                os._exit(1)
        pids.append(pid)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _serve(given: dict[str, Any], tell: int, secret: Secret) -> None:
    address = given.pop("address")
    plan, folder = Plan.of(given.pop("plan")), given.pop("folder")

    def joined(rank: int, generation: int, blocks: list[int]) -> None:
        os.write(tell, f"{address} {rank} {generation} {' '.join(map(str, blocks))}\n".encode())

    try:
        custody = Custody(plan, folder=folder and Path(folder), credentials=secret, joined=joined, **given)
        server = Server(custody)
        listener = listen(address, secret)
        os.write(tell, f"{address} {os.getpid()}\n".encode())
        server.serve(listener)
    except Exception as error:
        sys.stderr.write(f"{address}: {error!r}\n")
