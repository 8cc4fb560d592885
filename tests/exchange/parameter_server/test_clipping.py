"""Clipping where servers hold the parameters: the norm is that of all gradients, of rows too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import losses
from exchange.parameter_server.holding import begun, blocks_of, part_of, push, send, spec, whole
from exchange.parameter_server.serving import SECRET, cluster
from exchange.parameter_server.test_failover import same
from trained import parameters
from verbund.comm.wire import Calls, dial
from verbund.errors import InputError, RunFailed
from verbund.exchange.parameter_server.clipping import Clipping, norm_of
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part, Push
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


@cache
def _trained() -> dict[float | None, tuple[list[float], dict[str, Tensor]]]:
    """What single processes have come to, by the norm that they clip to."""
    return {}


def alone(run_job: RunJob, clip: float | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of a single process."""
    if clip not in _trained():
        run = run_job(TASK, {**CHANGES, "train.clip_norm": clip}, **ids())
        _trained()[clip] = losses(run), parameters(run)
    return _trained()[clip]


def alike(run_job: RunJob, changes: dict[str, Any]) -> None:
    """Trains with servers, and compares with one process that clips and one that does not."""
    run = run_job(TASK, {**CHANGES, **changes}, **ids())
    curve, theirs = alone(run_job, CHANGES["train.clip_norm"])
    torch.testing.assert_close(losses(run), curve, rtol=1e-5, atol=1e-6)
    ours, (_, others) = parameters(run), alone(run_job, None)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(others[name], value, rtol=1e-3, atol=1e-4), "nothing was clipped"


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


def test_what_counts_is_clipped_where_some_are_not_waited_for(run_job: RunJob) -> None:
    """Which islands count is chance; but a clipped step of SGD is as long as the learning rate times the norm."""
    exchange = {"name": "parameter_server", "servers": 2, "block_bytes": 1024, "backup": 1}
    changes = {**CHANGES, "strategy.islands": 2, "strategy.exchange": exchange}

    def moved(clip: float | None, steps: int) -> Tensor:
        found = parameters(run_job(TASK, {**changes, "train.clip_norm": clip, "train.steps": steps}, **ids()))
        return torch.cat([found[name].double().flatten() for name in sorted(found)])

    first = moved(1e-9, 1)  # as good as not trained at all
    lengths = [float(torch.linalg.vector_norm(moved(*how) - first)) for how in ((0.1, 1), (None, 1), (0.1, 6))]
    assert lengths[0] == pytest.approx(0.1, rel=1e-4)
    assert lengths[1] > 0.11, "nothing was clipped"
    assert lengths[2] < 0.6 + 1e-4


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


BACKUP = Plan(PLAN.blocks, PLAN.optimizer, Rule("synchronous", shares=3, backup=1, clip=0.5))
ORDERS = [[(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)], [(2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0)]]
"""By ticket and block the order in which shares come: the first two count."""


def with_backup(tickets: int) -> dict[str, Tensor]:
    """What torch makes of the same participation, in float64."""
    theirs = {name: torch.zeros(FIRST[name].shape, dtype=torch.float64, requires_grad=True) for name in ("a", "t")}
    total = torch.zeros(2, dtype=torch.float64)
    for ticket in range(tickets):
        gradients = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in theirs.items()}
        for number, block in enumerate(BACKUP.blocks):
            counted = [share_of(ticket, share) for share in ORDERS[ticket][number][:2]]
            weight = sum(one.weight for one in counted)
            for one in counted:
                part = one.parts[number]
                assert part.values is not None
                gradient = part.values.double() * one.scale
                if block.kind == "sum":
                    total += gradient
                elif part.rows is not None:
                    gradients["t"].index_add_(0, part.rows, gradient.view(-1, 2) / weight)
                else:
                    gradients["a"][block.offset[0] : block.offset[0] + 2] += gradient.view(2, 2) / weight
        for name, tensor in theirs.items():
            tensor.grad = gradients[name]
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        torch.optim.SGD(theirs.values(), lr=1.0).step()
    return {**{name: tensor.detach() for name, tensor in theirs.items()}, "s": total}


@pytest.mark.parametrize("moves", [False, True])
def test_with_backup_the_norm_is_that_of_what_counts(moves: bool) -> None:
    """A share that comes while a block waits for the norm is late, whoever has the block then."""
    server, every = begun(BACKUP, FIRST), list(range(len(BACKUP.blocks)))
    for ticket, orders in enumerate(ORDERS):
        for place in range(3):
            for block, order in enumerate(orders):
                states = {one.state for one in send(server, share_of(ticket, order[place]).of_blocks({block}))}
                assert states == {"late" if place == 2 else "waiting"}
                assert server.complete(block, ticket) == (place >= 1)
            if place == 0:
                continue
            norm = norm_of([server.square(block, ticket) for block in every])
            assert norm is not None
            if moves:  # with what it has added up for the norm
                there = Holdings(BACKUP)
                for block in every:
                    there.put(server.image(block))
                server = there
            assert norm_of([server.square(block, ticket) for block in every]) == norm
        assert {one.state for one in server.clip(Clipping(ticket, norm, every))} == {"applied"}
        for block, order in enumerate(orders):  # said again
            assert send(server, share_of(ticket, order[2]).of_blocks({block}))[0].state == "known"
    theirs = with_backup(2)
    for name, value in theirs.items():
        torch.testing.assert_close(whole(server, name).double(), value, rtol=1e-6, atol=1e-6)


def test_a_slow_client_is_not_waited_for_by_those_that_clip() -> None:
    """Its share comes late, before the norm is told or after, and a server is lost in between."""
    with cluster(BACKUP, [(0, 1), (1, 0), (0, 1), (1, 0)], clients=3) as servers:
        clients = [servers.client(share, patience=0.5) for share in range(3)]
        for number, block in enumerate(BACKUP.blocks):
            clients[0].begin(number, part_of(block, FIRST[block.name]))

        def pushed(ticket: int, share: int) -> set[str]:
            one = share_of(ticket, share)
            outcomes = clients[share].push(ticket, one.parts, weight=one.weight, share=share, scale=one.scale)
            return {outcome.state for outcome in outcomes}

        for ticket in range(2):
            assert pushed(ticket, 0) == pushed(ticket, 2) == {"waiting"}
            if ticket:
                assert pushed(ticket, 1) == {"late"}
                servers.kill(0)
                servers.fail_over(0)
            for client in clients:
                client.clip(ticket)
            if not ticket:
                assert pushed(ticket, 1) == {"late"}
                clients[1].clip(ticket)
            assert clients[1].pull({0: torch.zeros(4)}, least=ticket + 1) == {0: ticket + 1}
        servers.settled()
        same(servers)


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
