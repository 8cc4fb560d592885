"""What compressing a push to a parameter server saves and costs.

    python bench/parameter_server_compression.py [--megabytes 16] [--seconds 2]

A client pushes normal gradients to one server, each a process of its own, over a Unix socket and never through shared
memory, as if they were on two hosts. Prints one JSON line: by method the megabytes of a push, the milliseconds that one
takes until it is acknowledged, those that the client uses a processor, and the rate of a link (Mbit/s) below which the
method is faster than none: what it saves of the bytes, by what it takes longer. `none` is the peer, in the same run.
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
from pathlib import Path
from typing import Any

import torch

from verbund.checkpoint.box import Box
from verbund.comm.wire import listen
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.custody import Custody
from verbund.exchange.parameter_server.left_out import CompressedPushes
from verbund.exchange.parameter_server.plan import Plan, Rule, cut
from verbund.exchange.parameter_server.push import Part
from verbund.exchange.parameter_server.server import Server
from verbund.exchange.parameter_server.view import Seat, View
from verbund.exchange.parameter_server.watch import Views
from verbund.job import Compression, Optimizer

METHODS = ("none", "fp16", "bf16", "int8", "int4", "sign", "top_k")
BLOCK = 1 << 20


def plan_of(method: str, megabytes: int) -> Plan:
    shape = (megabytes * 250_000,)
    blocks = tuple(cut("weight", shape, "float32", Box((0,), shape), BLOCK, 4))
    compression = Compression.model_validate({"name": method, "warmup": 0})
    return Plan(blocks, Optimizer(name="sgd", lr=1e-3), Rule("asynchronous"), compression)


def view_of(folder: Path, plan: Plan) -> View:
    blocks = len(plan.blocks)
    return View(1, (Seat(f"unix:{folder}/server", 0),), ((0,),) * blocks, ((),) * blocks, (0,))


def serve(folder: Path, method: str, megabytes: int) -> None:
    """The server's part, until its input ends."""
    plan = plan_of(method, megabytes)
    server = Server(Custody(plan, 0, 0))
    listener = listen(f"unix:{folder}/server")
    server.see(view_of(folder, plan))
    threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    server.close()


def measured(method: str, megabytes: int, seconds: float) -> tuple[float, float, float]:
    """Bytes of a push, and the medians of the seconds that one takes, and uses the client's processor."""
    plan = plan_of(method, megabytes)
    with tempfile.TemporaryDirectory(prefix="v-") as folder:
        command = [sys.executable, __file__, "--serve", folder, method, "--megabytes", str(megabytes)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline().strip() == "ready"
        client = Client(plan, 0, 0, Views(view_of(Path(folder), plan)))
        client._lines._outbox = None
        sizes = [block.count for block in plan.blocks]
        for number, size in enumerate(sizes):
            client.begin(number, torch.zeros(size))
        generator = torch.Generator().manual_seed(1)
        gradients = torch.split(torch.randn(sum(sizes), generator=generator), sizes)
        compressed = CompressedPushes(plan, 0, 0)
        taken: list[tuple[float, float]] = []
        end, sent = time.monotonic() + seconds, 0
        while time.monotonic() < end or len(taken) < 5:
            begun, used = time.perf_counter(), time.process_time()
            parts = compressed.encoded(len(taken), [Part(n, 0, values) for n, values in enumerate(gradients)], 1.0)
            compressed.settle(parts, client.push(len(taken), parts, weight=1.0))
            taken.append((time.perf_counter() - begun, time.process_time() - used))
            travelling = [part.values if part.message is None else part.message for part in parts]
            sent = sum(tensor.nbytes for tensor in travelling if tensor is not None)
        client.close()
        server.communicate("end\n", timeout=20)
    return sent, statistics.median(wall for wall, _ in taken), statistics.median(cpu for _, cpu in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve:
        serve(Path(given.serve[0]), given.serve[1], given.megabytes)
        return
    found: dict[str, Any] = {}
    plain = measured("none", given.megabytes, given.seconds)
    for method in METHODS:
        size, taken, used = plain if method == "none" else measured(method, given.megabytes, given.seconds)
        longer = taken - plain[1]
        pays = 8e-6 * (plain[0] - size) / longer if method != "none" and longer > 0 else None
        found[method] = {
            "megabytes": round(size / 1e6, 2),
            "milliseconds": round(1e3 * taken, 1),
            "client_ms": round(1e3 * used, 1),
            "pays_below_mbit": None if pays is None else round(pays),
        }
    print(json.dumps({"push": found, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
