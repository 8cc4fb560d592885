"""Clipping where servers hold the parameters: the norm is that of all gradients, of rows too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import losses
from exchange.parameter_server.holding import begun, blocks_of, part_of, push, send, spec
from exchange.parameter_server.serving import SECRET, cluster
from exchange.parameter_server.test_failover import same
from trained import parameters
from verbund.comm.wire import Calls, dial
from verbund.errors import InputError, JobError, RunFailed
from verbund.exchange.parameter_server.clipping import Clipping, norm_of
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part, Push
from verbund.job import Job
from verbund.run import Run

TASK = """
import torch
from torch import nn
from verbund import Table

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table(300, 8, seed=2)
        self.words = nn.Embedding(300, 4, sparse=True)
        self.head = nn.Linear(12, 5)
    def forward(self, ids):
        return self.head(torch.cat([self.table(ids), self.words(ids)], 1))

def model():
    torch.manual_seed(1)
    return Model()

def inputs(batch):
    return batch["ids"]
"""
CHANGES: dict[str, Any] = {
    "data.input": "ids",
    "train.steps": 6,
    "train.global_batch": 24,
    "train.clip_norm": 0.1,
    "train.optimizer": {"name": "sgd", "lr": 1.0},
}
RunJob = Callable[..., Run]


def ids() -> dict[str, Any]:
    random = np.random.default_rng(4)
    return {"ids": random.integers(0, 300, 144), "y": random.integers(0, 5, 144)}


def alike(run_job: RunJob, changes: dict[str, Any]) -> Run:
    """Trains with servers, and as one process with clipping and without; gives the first."""
    alone = run_job(TASK, CHANGES, **ids())
    unclipped = run_job(TASK, {**CHANGES, "train.clip_norm": None}, **ids())
    run = run_job(TASK, {**CHANGES, **changes}, **ids())
    torch.testing.assert_close(losses(run), losses(alone), rtol=1e-5, atol=1e-6)
    ours, theirs, others = parameters(run), parameters(alone), parameters(unclipped)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(others[name], value, rtol=1e-3, atol=1e-4), "nothing was clipped"
    return run


@pytest.mark.parametrize("consistency", ["bulk_synchronous", "bounded_staleness", "asynchronous"])
@pytest.mark.parametrize("mesh", [{}, {"data": 2}])
def test_one_island_clips_as_a_single_process_does(consistency: str, mesh: dict[str, int], run_job: RunJob) -> None:
    exchange = {"name": "parameter_server", "log": False, "consistency": consistency}
    alike(run_job, {"strategy.mesh": mesh, "strategy.exchange": exchange})


@pytest.mark.parametrize("mesh", [{}, {"data": 2}])
def test_shares_that_are_added_up_are_clipped_together(mesh: dict[str, int], run_job: RunJob) -> None:
    """By the norm of the whole gradient, of which neither an island nor a server has all."""
    exchange = {"name": "parameter_server", "servers": 2, "block_bytes": 1024}
    alike(run_job, {"strategy.mesh": mesh, "strategy.islands": 2, "strategy.exchange": exchange})


def test_without_some_shares_there_is_no_norm(make_job: Callable[..., Job]) -> None:
    changes = {"train.clip_norm": 1.0, "strategy.islands": 2}
    with pytest.raises(JobError, match=r"`train.clip_norm` needs the norm of all shares.*`strategy.exchange.backup`"):
        make_job(changes={**changes, "strategy.exchange": {"name": "parameter_server", "backup": 1}})


# -- the servers' side ---------------------------------------------------------------------------------------------

TABLE = Block("t", (9, 2), "float32", (0, 0), (9, 2), "rows")
SUM = Block("s", (2,), "float32", (0,), (2,), "sum")
PLAN = Plan((*blocks_of({"a": (4, 2)}, 2), SUM, TABLE), spec("sgd", 1.0), Rule("synchronous", shares=2, clip=0.5))
FIRST = {"a": torch.zeros(4, 2), "t": torch.zeros(9, 2), "s": torch.zeros(2)}


def share_of(ticket: int, share: int) -> Push:
    generator = torch.Generator().manual_seed(10 * ticket + share)
    rows = torch.randperm(9, generator=generator)[: 2 + share].sort().values
    sizes = [(4, None), (4, None), (2, None), (2 * len(rows), rows)]
    parts = [Part(n, ticket, torch.randn(size, generator=generator), r) for n, (size, r) in enumerate(sizes)]
    return push(parts, ticket, share, weight=1.0 + share, scale=1.0 + 2 * share)


def stepped(tickets: int) -> dict[str, Tensor]:
    """What torch makes of the same, in float64."""
    theirs = {name: torch.zeros(FIRST[name].shape, dtype=torch.float64, requires_grad=True) for name in ("a", "t")}
    total = torch.zeros(2, dtype=torch.float64)
    for ticket in range(tickets):
        for tensor in theirs.values():
            tensor.grad = torch.zeros_like(tensor)
        for share in range(2):
            one = share_of(ticket, share)
            for part in one.parts:
                block, values = PLAN.blocks[part.block], part.values
                assert values is not None
                gradient = values.double() * one.scale
                if block.kind == "sum":
                    total += gradient
                    continue
                whole_gradient = theirs[block.name].grad
                assert whole_gradient is not None
                if part.rows is not None:
                    whole_gradient[part.rows] += gradient.view(-1, 2) / 3.0
                else:
                    whole_gradient[block.offset[0] : block.offset[0] + 2] += gradient.view(2, 2) / 3.0
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        torch.optim.SGD(theirs.values(), lr=1.0).step()
    return {**{name: tensor.detach() for name, tensor in theirs.items()}, "s": total}


def divided() -> list[Holdings]:
    """Two servers, each with some of the blocks."""
    servers = [begun(PLAN, FIRST), begun(PLAN, FIRST)]
    for rank, server in enumerate(servers):
        for block in range(len(PLAN.blocks)):
            if block % 2 != rank:
                server.drop(block)
    return servers


def norm(servers: list[Holdings], ticket: int) -> float | None:
    return norm_of([servers[block % 2].square(block, ticket) for block in range(len(PLAN.blocks))])


def test_who_comes_second_finds_the_norm_where_the_ticket_was_taken() -> None:
    """A client may be lost after it has told some of the servers."""
    servers = divided()
    mine = [[block for block in range(len(PLAN.blocks)) if block % 2 == rank] for rank in range(2)]
    for ticket in range(3):
        for share in (1, 0):
            for rank, server in enumerate(servers):
                assert not server.complete(rank, ticket)
                send(server, share_of(ticket, share).of_blocks(mine[rank]))
        first = norm(servers, ticket)
        assert first is not None
        servers[0].clip(Clipping(ticket, first, mine[0]))
        there = Holdings(PLAN)  # which another server takes over
        for block in mine[1]:
            there.put(servers[1].image(block))
        servers[1] = there
        assert norm(servers, ticket) == first
        for rank, server in enumerate(servers):
            states = [outcome.state for outcome in server.clip(Clipping(ticket, first, mine[rank]))]
            assert set(states) == {"applied" if rank else "known"}
        assert norm(servers, ticket) == first  # whoever asks after that
    assert norm(servers, 0) is None
    for name, value in stepped(3).items():
        ours = torch.zeros_like(FIRST[name])
        for block, of in enumerate(PLAN.blocks):
            if of.name == name:
                low, high = of.offset[0], of.offset[0] + of.length[0]
                server = servers[block % 2]
                ours[low:high] = (
                    server.read_rows(block, torch.arange(low, high))
                    if of.kind == "rows"
                    else server.read([block]).view(of.length)
                )
        torch.testing.assert_close(ours.double(), value, rtol=1e-6, atol=1e-6)


def test_a_server_is_lost_while_its_blocks_wait_for_the_norm() -> None:
    """Two clients push and clip, one after the other and at once; what is lost in between is taken up by a replica."""
    with cluster(PLAN, [(0, 1), (1, 0), (0, 1), (1, 0)]) as servers:
        clients = [servers.client(0, patience=0.5), servers.client(1, patience=0.5)]
        for number, block in enumerate(PLAN.blocks):
            clients[0].begin(number, part_of(block, FIRST[block.name]))
        for ticket in range(4):
            for share, client in enumerate(clients):
                one = share_of(ticket, share)
                client.push(ticket, one.parts, weight=one.weight, share=share, scale=one.scale)
            if ticket % 2:
                servers.kill(ticket // 2)
                servers.fail_over(ticket // 2)
            threads = [threading.Thread(target=client.clip, args=(ticket,)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20.0)
            assert clients[0].pull({0: torch.zeros(4)}) == {0: ticket + 1}
            servers.settled()
        same(servers)
        into = {number: torch.zeros(block.count) for number, block in enumerate(PLAN.blocks) if block.kind != "rows"}
        clients[1].pull(into)
        theirs = stepped(4)
        torch.testing.assert_close(torch.cat([into[0], into[1]]).double().view(4, 2), theirs["a"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(into[2].double(), theirs["s"], rtol=1e-6, atol=1e-6)
        rows = clients[1].pull_rows({"t": torch.arange(9)})["t"].values
        torch.testing.assert_close(rows.double(), theirs["t"], rtol=1e-6, atol=1e-6)


def test_what_cannot_be_clipped_is_refused() -> None:
    with cluster(PLAN, deadline=0.5) as servers:
        client = servers.client(0, deadline=0.5)
        for number, block in enumerate(PLAN.blocks):
            client.begin(number, part_of(block, FIRST[block.name]))
        one = share_of(0, 0)
        client.push(0, one.parts, weight=one.weight, scale=one.scale)
        with pytest.raises(RunFailed, match=r"of ticket 0 these shares have not come: 1"):
            client.clip(0)
        line = Calls(lambda seconds: dial(servers.view.seats[0].address, SECRET, seconds), "the server")
        head = {"model": PLAN.model, "view": 1, "client": 0, "generation": 0, "ticket": 0, "blocks": [0]}
        for wrong, said in [({"norm": 1.0}, "before all shares have come"), ({"norm": -1.0}, "a number from 0")]:
            with pytest.raises(InputError, match=said):
                line.ask("clip", {**head, **wrong}, 5.0)
        with pytest.raises(RunFailed, match="was replaced by generation 0"):
            line.ask("clip", {**head, "generation": 7, "norm": 1.0}, 5.0)
        line.close(wait=False)
        assert servers.servers[0].server.failure is None
