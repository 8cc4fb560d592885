"""Servers' blocks in checkpoints: each primary writes its part, and begins with what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exchange.parameter_server.holding import blocks_of, push, spec, whole
from exchange.parameter_server.serving import SECRET, Cluster, cluster
from exchange.parameter_server.test_failover import same
from verbund import checkpoint
from verbund.comm.wire import Calls, dial
from verbund.errors import RunFailed
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Plan, Rule
from verbund.exchange.parameter_server.push import Part

PLAN = Plan(tuple(blocks_of({"a": (8, 3), "b": (6,)})), spec("adam", 0.1), Rule("asynchronous"))
TWO = [(0, 1), (1, 0)] * 3 + [(0, 1)]


def ask(servers: Cluster, rank: int, kind: str, **fields: Any) -> dict[str, Any]:
    calls = Calls(lambda seconds: dial(servers.view.seats[rank].address, SECRET, seconds), "a server")
    try:
        return calls.ask(kind, {"model": PLAN.model, "view": servers.view.number, **fields}, 10.0).fields
    finally:
        calls.close()


def test_saved_and_loaded(tmp_path: Path) -> None:
    holders = TWO[: len(PLAN.blocks)]
    with cluster(PLAN, holders) as servers:
        client = servers.client()
        for block, of in enumerate(PLAN.blocks):
            client.begin(block, torch.ones(of.count))
        for ticket in range(5):
            parts = [Part(block, ticket, torch.full((of.count,), block + 1.0)) for block, of in enumerate(PLAN.blocks)]
            client.push(ticket, parts, weight=1.0)
        folder = checkpoint.partial_folder(tmp_path, 5)
        for part in (0, 1, 0):  # once more: it is the same save
            ask(servers, part, "save", step=5, by="0", folder=str(folder), part=part)
        client.push(5, parts, weight=1.0)  # while it is written
        records = [ask(servers, part, "saved", step=5, by="0")["record"] for part in (0, 1)]
        path = checkpoint.commit(tmp_path, 5, records, {})
        with pytest.raises(RunFailed, match="step 6 is not being saved"):
            ask(servers, 0, "saved", step=6, by="0")
    with cluster(PLAN, holders) as servers:
        client = servers.client()
        client.load(str(path), version=5)
        client.load(str(path), version=7)  # they have begun
        into = {block: torch.zeros(of.count) for block, of in enumerate(PLAN.blocks)}
        assert client.pull(into) == dict.fromkeys(into, 5)
        client.push(5, [Part(part.block, 5, part.values) for part in parts], weight=1.0)
        same(servers)
        client.pull(into)
        straight = Holdings(PLAN)
        for block, of in enumerate(PLAN.blocks):
            straight.create(block, torch.ones(of.count))
        for ticket in range(6):
            straight.apply(push([Part(part.block, ticket, part.values) for part in parts], ticket))
        for block in into:
            assert torch.equal(into[block], straight.read([block]))
        assert whole(straight, "a").shape == (8, 3)
