"""What a push costs a parameter server's holdings, against torch's optimisers alone.

    python bench/holdings.py [--rounds 40] [--threads 1]

Prints one JSON line. `dense`: a model of 1.9 million parameters in blocks of 1 MiB: milliseconds of check, apply and
read, of torch's step over the same blocks with gradients that are there, and of one pass over a gradient; `over` is
apply less both, as a share of both. `tables`: rows of 32 numbers, 4096 of a table's at a time: million rows a second
that are stepped for the first time, that are stepped again, that are read; and the peer's, a sparse gradient of a whole
table in memory (up to a million rows). Medians; the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from verbund.checkpoint.box import Box
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule, cut
from verbund.exchange.parameter_server.push import Part, Push
from verbund.job import Optimizer
from verbund.mesh.optimizer import build

SHAPE = (3800, 500)
WIDTH, TOUCHED = 32, 4096
PEERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, work: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        work()
        self.times[name].append(time.perf_counter() - begin)

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])


def push(ticket: int, parts: list[Part]) -> Push:
    return Push(0, 0, ticket, 0, 1.0, 64.0, 1.0, ticket, parts)


def dense(name: str, rounds: int) -> dict[str, float]:
    """A model in blocks."""
    blocks = cut("weight", SHAPE, "float32", Box.whole(SHAPE), 1 << 20, 4)
    spec = Optimizer(name=name, lr=0.01)
    holdings = Holdings(Plan(tuple(blocks), spec, Rule("asynchronous")))
    for number, block in enumerate(blocks):
        holdings.create(number, torch.randn(block.length))
    values = [torch.randn(block.count) for block in blocks]
    parameters = [nn.Parameter(torch.randn(block.length)) for block in blocks]
    gradients = [torch.empty(block.count) for block in blocks]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.view(parameter.shape)
    optimizer = build([("weight", parameter) for parameter in parameters], spec)

    def one_pass() -> None:
        for value, gradient in zip(values, gradients, strict=True):
            torch.mul(value, 1 / 64, out=gradient)

    clock = Clock()
    for ticket in range(rounds + 3):
        one = push(ticket, [Part(number, ticket, value) for number, value in enumerate(values)])
        clock.time("check", lambda one=one: holdings.check(one))  # type: ignore[misc]
        clock.time("apply", lambda one=one: holdings.apply(one))  # type: ignore[misc]
        clock.time("read", lambda: holdings.read(range(len(blocks))))
        clock.time("pass", one_pass)
        clock.time("step", optimizer.step)
    found = {key: round(clock.median(key) * 1e3, 3) for key in ("check", "apply", "read", "pass", "step")}
    return found | {"over": round(found["apply"] / (found["pass"] + found["step"]) - 1.0, 3)}


def table(name: str, rows: int, rounds: int) -> dict[str, float | None]:
    """One table of so many rows."""
    block = Block("table", (rows, WIDTH), "float32", (0, 0), (rows, WIDTH), "rows", (1, 0.05))
    holdings = Holdings(Plan((block,), Optimizer(name=name, lr=0.01), Rule("asynchronous")))
    holdings.create(0, None)
    peer = nn.Parameter(torch.zeros(rows, WIDTH)) if rows <= 1_000_000 else None
    optimizer = PEERS[name]([peer], lr=0.01) if peer is not None else None
    clock, count, ticket = Clock(), 0, 0
    for _ in range(max(3, rounds // 4)):
        chosen = torch.unique(torch.randint(rows, (TOUCHED,)))
        gradient = torch.randn(len(chosen), WIDTH)
        count += len(chosen)
        for name_of in ("first", "again"):
            one = push(ticket, [Part(0, ticket, gradient.view(-1), chosen)])
            clock.time(name_of, lambda one=one: holdings.apply(one))  # type: ignore[misc]
            ticket += 1
        clock.time("read", lambda chosen=chosen: holdings.read_rows(0, chosen))  # type: ignore[misc]
        if peer is not None and optimizer is not None:
            size = (rows, WIDTH)
            peer.grad = torch.sparse_coo_tensor(chosen[None], gradient, size, is_coalesced=True, check_invariants=False)
            clock.time("peer", optimizer.step)
    each = count / len(clock.times["first"]) / 1e6
    return {
        key: round(each / clock.median(key), 3) if clock.times[key] else None
        for key in ("first", "again", "read", "peer")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    result = {
        "dense": {name: dense(name, arguments.rounds) for name in ("sgd", "adam")},
        "tables": {name: {rows: table(name, rows, arguments.rounds) for rows in SIZES} for name in PEERS},
        "threads": arguments.threads,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
