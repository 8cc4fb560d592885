"""What a parameter server moves: a push of gradients and a pull of the new values in one request.

    python bench/parameter_server.py wire|memory [--seconds 2]

`wire`: 1, 7 and 30 MB of parameters in blocks of 1 MiB (plain SGD), one server and one or two clients, each a process
of its own, over a Unix socket. `memory`: the same through memory that they share. Prints one JSON line: by size and
clients, push_pulls per second of all clients together, and per push_pull the milliseconds of a processor that the
server and a client use, and how many pages the server has to be given (`faults`); `apply` is the time that pushes spend
in the optimiser. For comparison `copy` is the time of one copy of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEGABYTES = (1, 7, 30)
BLOCK = 1 << 20


def plan_of(megabytes: int) -> Any:
    from verbund.checkpoint.box import Box
    from verbund.exchange.parameter_server.plan import Plan, Rule, cut
    from verbund.job import Optimizer

    shape = (megabytes * 1_000_000 // 4,)
    blocks = cut("weight", shape, "float32", Box((0,), shape), BLOCK, 4)
    return Plan(tuple(blocks), Optimizer(name="sgd", lr=1e-3), Rule("asynchronous"))


def used() -> float:
    """Seconds of a processor that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(folder: Path, megabytes: int) -> None:
    """A server's part: until its input ends, then prints what it used."""
    import threading

    import torch

    from verbund.comm.wire import listen
    from verbund.exchange.parameter_server.custody import Custody
    from verbund.exchange.parameter_server.server import Server
    from verbund.exchange.parameter_server.view import Seat, View

    torch.set_num_threads(1)
    plan = plan_of(megabytes)
    server = Server(Custody(plan, 0, 0))
    listener = listen(f"unix:{folder}/server")
    blocks = len(plan.blocks)
    server.see(View(1, (Seat(listener.address, 0),), ((0,),) * blocks, ((),) * blocks, (0, 0)))
    threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    before, totals, faults = used(), server.totals(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    print("go", flush=True)
    sys.stdin.readline()
    after = server.totals()
    print(
        json.dumps(
            {
                "cpu": used() - before,
                "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
                "apply": after["applying_seconds"] - totals["applying_seconds"],
                "pushes": after["pushes"] - totals["pushes"],
            }
        ),
        flush=True,
    )
    server.close()


def work(folder: Path, megabytes: int, island: int, part: str) -> None:
    """A client's part."""
    import torch

    from verbund.exchange.parameter_server.client import Client
    from verbund.exchange.parameter_server.push import Part
    from verbund.exchange.parameter_server.view import Seat, View
    from verbund.exchange.parameter_server.watch import Views

    torch.set_num_threads(1)
    plan = plan_of(megabytes)
    blocks = len(plan.blocks)
    view = View(1, (Seat(f"unix:{folder}/server", 0),), ((0,),) * blocks, ((),) * blocks, (0, 0))
    client = Client(plan, island, 0, Views(view))
    if part == "wire":
        client._lines._outbox = None  # as if the server were on another host
    sizes = [block.count for block in plan.blocks]
    gradients, values = (torch.split(torch.full((sum(sizes),), first), sizes) for first in (1e-3, 0.0))
    into = dict(enumerate(values))
    for block, value in into.items():
        client.begin(block, value)
    versions = client.pull(into)
    ticket = island

    def one() -> None:
        nonlocal versions, ticket
        parts = [Part(block, versions[block], gradient) for block, gradient in enumerate(gradients)]
        _, versions = client.push_pull(ticket, parts, into, weight=1.0)
        ticket += 2

    for _ in range(10):
        one()
    print("ready", flush=True)
    seconds = float(sys.stdin.readline())
    begun, before, count = time.monotonic(), used(), 0
    while time.monotonic() - begun < seconds:
        one()
        count += 1
    print(json.dumps({"seconds": time.monotonic() - begun, "cpu": used() - before, "count": count}), flush=True)
    client.close()


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], word: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def measured(part: str, megabytes: int, clients: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="v-") as folder:
        server = start("server", folder, megabytes)
        assert heard(server) == "ready"
        workers = [start("client", folder, megabytes, island, part) for island in range(clients)]
        assert [heard(worker) for worker in workers] == ["ready"] * clients
        say(server, "go")
        assert heard(server) == "go"
        for worker in workers:
            say(worker, seconds)
        told = [json.loads(heard(worker)) for worker in workers]
        say(server, "end")
        found = json.loads(heard(server))
        for process in (server, *workers):
            process.communicate(timeout=20)
    count = sum(each["count"] for each in told)
    return {
        "per_second": round(sum(each["count"] / each["seconds"] for each in told), 1),
        "server_ms": round(1e3 * found["cpu"] / found["pushes"], 2),
        "client_ms": round(1e3 * sum(each["cpu"] for each in told) / count, 2),
        "faults": round(found["faults"] / found["pushes"]),
        "apply_ms": round(1e3 * found["apply"] / found["pushes"], 2),
    }


def copied(megabytes: int) -> float:
    """Milliseconds of a copy."""
    import torch

    torch.set_num_threads(1)
    source, target = torch.ones(megabytes * 250_000), torch.ones(megabytes * 250_000)
    target.copy_(source)
    begun = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    return round(1e3 * (time.perf_counter() - begun) / 20, 2)


def sizes(part: str, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for megabytes in MEGABYTES:
        of = {f"{clients}_clients": measured(part, megabytes, clients, seconds) for clients in (1, 2)}
        found[f"{megabytes}_MB"] = {**of, "copy_ms": copied(megabytes)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["wire", "memory", "server", "client"])
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    if given.part == "server":
        serve(Path(given.more[0]), int(given.more[1]))
    elif given.part == "client":
        work(Path(given.more[0]), int(given.more[1]), int(given.more[2]), given.more[3])
    else:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        print(json.dumps({given.part: sizes(given.part, given.seconds), "machine": machine}))


if __name__ == "__main__":
    main()
