"""Servers as threads or processes for tests, and a coordinator that says who holds what."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chaos.proxy import Proxy
from exchange.parameter_server.nursery import Nursery
from verbund.comm.wire import Calls, Secret, WireError, dial, listen
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.custody import Custody
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.server import Server
from verbund.exchange.parameter_server.view import Seat, View
from verbund.exchange.parameter_server.watch import Views

SECRET = Secret.create()


class Thread:
    """A server in threads of this process."""

    def __init__(self, address: str, *given: Any, joined: Callable[..., None], **more: Any) -> None:
        self.server = Server(Custody(*given, credentials=SECRET, joined=joined, **more))
        self.listener = listen(address, SECRET)
        self.thread = threading.Thread(target=self.server.serve, args=(self.listener,), daemon=True)
        self.thread.start()

    def see(self, view: View) -> None:
        self.server.see(view)

    def kill(self) -> None:
        self.server.close()
        self.thread.join(10.0)


class Process:
    """A server in a process of its own."""

    nursery: Nursery | None = None

    def __init__(
        self,
        address: str,
        plan: Plan,
        rank: int,
        generation: int,
        folder: Path | None,
        joined: Callable[..., None],
        **more: Any,
    ) -> None:
        self._model = plan.model
        Process.nursery = Process.nursery or Nursery(SECRET)
        given = {
            "plan": plan.record(),
            "rank": rank,
            "generation": generation,
            "folder": folder and str(folder),
            **more,
        }
        self.pid = Process.nursery.server(address, given, lambda told: joined(told[0], told[1], told[2:]))
        self._calls = Calls(lambda seconds: dial(address, SECRET, seconds), address)

    def see(self, view: View) -> None:
        with suppress(WireError):  # it may be stopped, or gone
            self._calls.start("view", {"model": self._model, "view": 0, "record": view.record()}, 5.0)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._calls.close(wait=False)
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.005)
        raise AssertionError("a server could not be killed")


class Cluster:
    """Servers, and who holds what.

    Args:
        plan: of the run.
        folder: for sockets and logs.
        holders: of each block, the primary first.
        clients: islands.
        kind: threads or processes.
        log: whether servers have one.
        faults: the seed of what happens to all frames; None: nothing.
        more: for each server.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        holders: Sequence[tuple[int, ...]],
        clients: int = 2,
        kind: type[Thread] | type[Process] = Thread,
        log: bool = False,
        faults: int | None = None,
        **more: Any,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self._kind = kind
        self._log = log
        self._faults = faults
        self.proxies: list[Proxy] = []
        self._more: dict[str, Any] = {"deadline": 20.0, **more}
        self._lock = threading.RLock()
        self.servers: dict[int, Any] = {}
        self.clients: list[Client] = []
        count = max(max(servers) for servers in holders) + 1
        seats = tuple(Seat(self._place(rank, 0), 0) for rank in range(count))
        self.view = View(1, seats, tuple(holders), tuple(() for _ in holders), (0,) * clients)
        self.watch = Views(self.view)
        for rank in range(count):
            self._start(rank)
        self._tell()

    def client(self, island: int = 0, generation: int = 0, **more: Any) -> Client:
        """A client, with the first of all deadlines."""
        client = Client(self.plan, island, generation, self.watch, SECRET, **{"deadline": 20.0, **more})
        self.clients.append(client)
        return client

    def change(self, **changes: Any) -> None:
        """A newer view."""
        with self._lock:
            self.view = replace(self.view, number=self.view.number + 1, **changes)
            self._tell()

    def kill(self, rank: int) -> None:
        """Kills a server; nobody is told."""
        self.servers.pop(rank).kill()

    def fail_over(self, *ranks: int) -> None:
        """Servers were lost: others take their blocks over, and new ones in their places join those."""
        with self._lock:
            seats, holders, joining = list(self.view.seats), list(self.view.holders), list(self.view.joining)
            for rank in ranks:
                generation = seats[rank].generation + 1
                seats[rank] = Seat(self._place(rank, generation), generation)
            if not self._log:
                for block, has in enumerate(holders):
                    lost = [rank for rank in ranks if rank in has + joining[block]]
                    holders[block] = tuple(rank for rank in has if rank not in ranks)
                    joining[block] = (*(rank for rank in joining[block] if rank not in ranks), *lost)
                    assert holders[block], "a block is lost"
            for rank in ranks:
                self._start(rank, seats[rank].generation)
            self.change(seats=tuple(seats), holders=tuple(holders), joining=tuple(joining))

    def joined(self, rank: int, generation: int, blocks: list[int]) -> None:
        """A joining server has blocks whole."""
        with self._lock:
            if self.view.seats[rank].generation != generation:
                return
            holders, joining = list(self.view.holders), list(self.view.joining)
            for block in blocks:
                if rank in joining[block]:
                    joining[block] = tuple(server for server in joining[block] if server != rank)
                    holders[block] = (*holders[block], rank)
            self.change(holders=tuple(holders), joining=tuple(joining))

    def settled(self, seconds: float = 20.0) -> None:
        """Waits until nobody is joining any more."""
        deadline = time.monotonic() + seconds
        while any(self.view.joining):
            assert time.monotonic() < deadline, "somebody did not join"
            time.sleep(0.01)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for rank in list(self.servers):
            self.servers.pop(rank).kill()
        for proxy in self.proxies:
            proxy.close()

    def _address(self, rank: int, generation: int) -> str:
        return f"unix:{self.folder}/s{rank}-{generation}"

    def _place(self, rank: int, generation: int) -> str:
        """Where others reach a server."""
        if self._faults is None:
            return self._address(rank, generation)
        path = f"{self.folder}/p{rank}-{generation}"
        seed = hash((self._faults, rank, generation))
        self.proxies.append(Proxy(path, self._address(rank, generation).removeprefix("unix:"), seed))
        return f"unix:{path}"

    def _start(self, rank: int, generation: int = 0) -> None:
        folder = self.folder / f"log-{rank}" if self._log else None
        self.servers[rank] = self._kind(
            self._address(rank, generation), self.plan, rank, generation, folder, joined=self.joined, **self._more
        )

    def _tell(self) -> None:
        for server in list(self.servers.values()):
            server.see(self.view)
        self.watch.tell(self.view)


@contextmanager
def cluster(plan: Plan, holders: Sequence[tuple[int, ...]] = (), **more: Any) -> Iterator[Cluster]:
    """Servers in a folder of their own; one that has all blocks, if nothing is said."""
    with TemporaryDirectory(prefix="v-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Cluster(plan, Path(folder), holders or [(0,)] * len(plan.blocks), **more)
        try:
            yield made
        finally:
            made.close()
