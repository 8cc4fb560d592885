"""Rows of an embedding table on a parameter server: pushed and pulled per second, by the size of the table.

    python bench/parameter_server_rows.py [--rows 10000,100000,1000000,10000000] [--seconds 2]

One server and one client, each a process of its own with one thread, over a Unix socket; rows of 16 float32 that are
made when they are first needed, Adagrad, 4096 random rows at a time, and nothing else meanwhile. `first_touches`: of
rows that no push has changed yet; `later`: of a tenth of the table, at most 100,000 rows, that have been stepped.
Prints one JSON line: thousands of rows per second (medians over batches), and as `processor` the microseconds of a
processor that a row costs the server's holdings alone, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verbund.comm.wire import listen
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.custody import Custody
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part, Push
from verbund.exchange.parameter_server.server import Server
from verbund.exchange.parameter_server.view import Seat, View
from verbund.exchange.parameter_server.watch import Views
from verbund.job import Optimizer

WIDTH, BATCH, MOST = 16, 4096, 100_000


def plan_of(rows: int) -> Plan:
    table = Block("table", (rows, WIDTH), "float32", (0, 0), (rows, WIDTH), "rows", (1, 0.1))
    return Plan((table,), Optimizer(name="adagrad", lr=0.01), Rule("asynchronous"))


def view_of(address: str) -> View:
    return View(1, (Seat(address, 0),), ((0,),), ((),), (0, 0))


def serve(folder: Path, rows: int) -> None:
    """The server's part, until its input ends."""
    server = Server(Custody(plan_of(rows), 0, 0))
    listener = listen(f"unix:{folder}/server")
    server.see(view_of(listener.address))
    threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    server.close()


def measured(rows: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="v-") as folder:
        command = [sys.executable, __file__, "--server", folder, "--rows", str(rows)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            client = Client(plan_of(rows), 0, 0, Views(view_of(f"unix:{folder}/server")))
            try:
                client.begin(0, None)
                return speeds(client, rows, seconds)
            finally:
                client.close()
                server.stdin.close()


def speeds(client: Client, rows: int, seconds: float) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(rows)
    order = torch.randperm(rows, generator=generator)
    known = order[: min(rows // 10, MOST)]
    batch = min(BATCH, len(known))
    fresh = torch.split(order[len(known) :], batch)
    gradient = torch.full((batch * WIDTH,), 1e-2)
    ticket = 0

    def push(some: torch.Tensor) -> None:
        nonlocal ticket
        client.push(ticket, [Part(0, ticket, gradient[: some.numel() * WIDTH], some)], weight=1.0, low=ticket)
        ticket += 1

    def pull(some: torch.Tensor) -> None:
        client.pull_rows({"table": some})

    def timed(do: Callable[[torch.Tensor], None], batches: Any) -> float:
        taken: list[float] = []
        until = time.monotonic() + seconds
        for some in batches:
            some = some.sort().values
            begun = time.perf_counter()
            do(some)
            taken.append((time.perf_counter() - begun) / len(some))
            if time.monotonic() > until:
                break
        return round(1e-3 / statistics.median(taken))

    def again() -> Any:
        while True:
            yield known[torch.randperm(len(known), generator=generator)[:batch]]

    for some in torch.split(known, batch):
        push(some.sort().values)
    return {
        "first_touches": {"pull": timed(pull, fresh), "push": timed(push, fresh)},
        "later": {"pull": timed(pull, again()), "push": timed(push, again())},
    }


def processor(rows: int) -> dict[str, dict[str, float]]:
    """Without messages, in this process."""
    holdings = Holdings(plan_of(rows))
    holdings.create(0, None)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    batches = [some.sort().values for some in torch.split(order, min(BATCH, rows // 2))[:20]]
    gradient = torch.full((BATCH * WIDTH,), 1e-2)
    ticket = 0

    def push(some: torch.Tensor) -> None:
        nonlocal ticket
        part = Part(0, ticket, gradient[: some.numel() * WIDTH], some)
        one = Push(
            client=0, generation=0, ticket=ticket, share=0, parts=[part], weight=1.0, scale=1.0, rate=1.0, low=ticket
        )
        holdings.check(one)
        holdings.apply(one)
        ticket += 1

    def timed(do: Callable[[torch.Tensor], object]) -> float:
        begun = time.process_time()
        for some in batches:
            do(some)
        return round(1e6 * (time.process_time() - begun) / sum(map(len, batches)), 3)

    def pull(some: torch.Tensor) -> object:
        return holdings.read_rows(0, some)

    return {
        "first_touches": {"pull": timed(pull), "push": timed(push)},
        "later": {"pull": timed(pull), "push": timed(push)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,100000,1000000,10000000")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure, at most")
    parser.add_argument("--server", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.server is not None:
        serve(given.server, int(given.rows))
        return
    found = {}
    for rows in map(int, given.rows.split(",")):
        found[rows] = {**measured(rows, given.seconds), "processor": processor(rows)}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    print(json.dumps({"bench": "parameter_server_rows", "machine": machine, "rows": found}))


if __name__ == "__main__":
    main()
