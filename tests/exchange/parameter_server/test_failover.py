"""Servers with replicas: what dies, stops or is replaced loses nothing that was acknowledged, and doubles nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from exchange.parameter_server.holding import blocks_of, spec
from exchange.parameter_server.serving import Cluster, Process, Thread, cluster
from verbund.errors import RunFailed
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.holdings import Image
from verbund.exchange.parameter_server.left_out import CompressedPushes
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part
from verbund.job import Compression

COUNTERS = Plan(tuple(blocks_of({"a": (64, 32)}, 16)), spec("sgd", 1.0), Rule("asynchronous"))
ADAM = Plan(tuple(blocks_of({"a": (64, 32)}, 16)), spec("adam", 0.01), Rule("asynchronous", compensation=0.1))
TWO = [(0, 1), (1, 0), (0, 1), (1, 0)]
THREE = [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1)]


def begin(client: Client) -> None:
    for number, block in enumerate(client._plan.blocks):
        client.begin(number, torch.zeros(block.count))


def ones() -> list[Part]:
    return [Part(number, 0, torch.ones(block.count)) for number, block in enumerate(COUNTERS.blocks)]


def half(of: Plan) -> Plan:
    """The same, of which gradients are pushed as float16: a one stays a one."""
    return replace(of, compression=Compression(name="fp16"))


def places() -> dict[int, torch.Tensor]:
    return {number: torch.zeros(block.count) for number, block in enumerate(COUNTERS.blocks)}


class Counting:
    """Clients that count, each ticket one, while something happens; they look at what they see."""

    def __init__(self, servers: Cluster, clients: int = 2) -> None:
        self.servers = servers
        self.clients = [servers.client(island, patience=0.5) for island in range(clients)]
        begin(self.clients[0])
        self.pushed = [0] * clients
        self._failures: list[BaseException] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._count, args=(island,)) for island in range(clients)]
        for thread in self._threads:
            thread.start()

    def _count(self, island: int) -> None:
        try:
            client, into = self.clients[island], places()
            compressed = CompressedPushes(self.servers.plan, island, 0)
            before: dict[int, int] = {}
            while not self._ends.is_set():
                ticket = self.pushed[island] * len(self.clients) + island
                parts = compressed.encoded(ticket, ones(), 1.0)
                outcomes, versions = client.push_pull(ticket, parts, into, weight=1.0)
                compressed.settle(parts, outcomes)
                self.pushed[island] += 1
                for block, version in versions.items():
                    assert version >= max(before.get(block, 0), self.pushed[island]), "a version was taken back"
                    assert torch.equal(into[block], torch.full_like(into[block], -version)), "a push counted twice"
                before = versions
        except BaseException as error:
            self._failures.append(error)

    def go_on(self, pushes: int = 5, seconds: float = 20.0) -> None:
        """Waits until each client has pushed so many times more."""
        goals = [pushed + pushes for pushed in self.pushed]
        deadline = time.monotonic() + seconds
        while any(pushed < goal for pushed, goal in zip(self.pushed, goals, strict=True)):
            assert not self._failures, self._failures[0]
            assert time.monotonic() < deadline, "the clients do not go on"
            time.sleep(0.005)

    def end(self) -> None:
        """Ends, and looks whether each push counted once."""
        self._ends.set()
        for thread in self._threads:
            thread.join(30.0)
        assert not self._failures, self._failures[0]
        into = places()
        total = sum(self.pushed)
        assert self.clients[0].pull(into) == dict.fromkeys(into, total)
        assert all(torch.equal(values, torch.full_like(values, -total)) for values in into.values())


def images(servers: Cluster) -> dict[int, list[Image]]:
    """Of each block what all of its holders have."""
    return {
        block: [servers.servers[rank].server.custody.holdings.image(block) for rank in holders]
        for block, holders in enumerate(servers.view.holders)
    }


def same(servers: Cluster) -> None:
    for block, (first, *others) in images(servers).items():
        for other in others:
            assert first.fields == other.fields, block
            assert first.tensors.keys() == other.tensors.keys()
            assert all(torch.equal(first.tensors[name], other.tensors[name]) for name in first.tensors), block


def test_replicas_are_equal() -> None:
    with cluster(ADAM, TWO) as servers:
        clients = [servers.client(island) for island in (0, 1)]
        begin(clients[0])

        def train(island: int) -> None:
            chance = random.Random(island)
            generator = torch.Generator().manual_seed(island)
            into = places()
            versions = clients[island].pull(into)
            for ticket in range(island, 60, 2):
                chosen = [block for block in into if chance.random() < 0.7]
                parts = [Part(b, versions[b], torch.randn(into[b].numel(), generator=generator)) for b in chosen]
                clients[island].push(ticket, parts, weight=3.0)
                versions |= clients[island].pull({block: into[block] for block in chosen[:2] or [0]})

        threads = [threading.Thread(target=train, args=(island,)) for island in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same(servers)
        assert all(len(found) == 2 and found[0].fields["version"] > 5 for found in images(servers).values())


def test_one_is_lost_and_another_joins_while_pushes_go_on() -> None:
    with cluster(COUNTERS, TWO) as servers:
        counting = Counting(servers)
        for rank in (0, 1, 0):
            counting.go_on()
            servers.kill(rank)
            servers.fail_over(rank)
            counting.go_on()
            servers.settled()
            counting.go_on()
        counting.end()
        assert all(len(holders) == 2 for holders in servers.view.holders)
        same(servers)


def test_two_of_three_are_lost() -> None:
    with cluster(COUNTERS, THREE) as servers:
        counting = Counting(servers)
        counting.go_on()
        for rank in (0, 2):
            servers.kill(rank)
        servers.fail_over(0, 2)
        counting.go_on()
        servers.settled()
        counting.end()
        same(servers)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_at_random(seed: int) -> None:
    """Processes, killed with what they have in hand."""
    chance = random.Random(seed)
    with cluster(COUNTERS, TWO, kind=Process) as servers:
        counting = Counting(servers)
        for _ in range(5):
            counting.go_on(chance.randrange(1, 4))
            rank = chance.randrange(2)
            time.sleep(chance.uniform(0, 0.01))
            servers.kill(rank)
            time.sleep(chance.uniform(0, 0.05))
            servers.fail_over(rank)
            servers.settled()
        counting.go_on()
        counting.end()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_of_three_killed_at_random(seed: int) -> None:
    """The second one before the first one's place is filled, or just after."""
    chance = random.Random(seed)
    with cluster(COUNTERS, THREE, kind=Process) as servers:
        counting = Counting(servers)
        for _ in range(3):
            counting.go_on(chance.randrange(1, 4))
            ranks = chance.sample(range(3), 2)
            for rank in ranks:
                servers.kill(rank)
                time.sleep(chance.choice([0.0, 0.005]))
            for rank in ranks:
                servers.fail_over(rank)
                time.sleep(chance.choice([0.0, 0.005, 0.05]))
            servers.settled()
        counting.go_on()
        counting.end()


@pytest.mark.parametrize("seed", [0, 1])
def test_shares_and_rows_survive(seed: int) -> None:
    """A synchronous rule: shares that wait are in images too; and tables whose rows are born when they are needed."""
    table = [Block("t", (1000, 4), "float32", (low, 0), (500, 4), "rows", (7, 0.1)) for low in (0, 500)]
    dense = blocks_of({"a": (8, 4)}, 4)
    plan = Plan((*dense, *table), spec("adagrad", 0.1), Rule("synchronous", shares=2))
    chance = random.Random(seed)

    def trained(servers: Cluster, lost: list[int]) -> list[torch.Tensor]:
        clients = [servers.client(island) for island in (0, 1)]
        for block, of in enumerate(plan.blocks):
            clients[0].begin(block, torch.zeros(of.count) if of.kind == "dense" else None)
        failures: list[BaseException] = []

        def train(island: int) -> None:
            try:
                client, generator = clients[island], torch.Generator().manual_seed(island)
                into = {block: torch.zeros(of.count) for block, of in enumerate(dense)}
                for ticket in range(30):
                    rows = torch.unique(torch.randint(0, 1000, (20,), generator=generator))
                    client.pull(into, least=ticket)
                    seen = client.pull_rows({"t": rows}, least=ticket)["t"]
                    parts = [Part(block, ticket, value + 1) for block, value in into.items()]
                    runs = client.tables.parts("t", rows, seen.values + 1, seen.versions)
                    idle = {2, 3} - {part.block for part in runs}
                    parts += [*runs, *(Part(block, ticket, None) for block in idle)]
                    client.push(ticket, parts, weight=0.5, share=island)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=train, args=(island,)) for island in (0, 1)]
        for thread in threads:
            thread.start()
        for rank in lost:
            time.sleep(chance.uniform(0.05, 0.15))
            servers.kill(rank)
            servers.fail_over(rank)
            servers.settled()
        for thread in threads:
            thread.join(30.0)
        assert not failures, failures[0]
        same(servers)
        into = {block: torch.zeros(of.count) for block, of in enumerate(dense)}
        clients[0].pull(into, least=30)
        return [*into.values(), clients[0].pull_rows({"t": torch.arange(1000)})["t"].values]

    with cluster(plan, [(0, 1), (1, 0), (0, 1), (1, 0)]) as servers:
        straight = trained(servers, [])
    with cluster(plan, [(0, 1), (1, 0), (0, 1), (1, 0)]) as servers:
        again = trained(servers, [0, 1, 0])
    assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_stands_still(rank: int) -> None:
    """A stopped server is replaced; when it goes on it finds that it has been, and nobody listens to it."""
    holders = [(0, 1)] * 4
    with cluster(COUNTERS, holders, kind=Process) as servers:
        counting = Counting(servers)
        counting.go_on()
        stopped = servers.servers.pop(rank)
        stopped.stop()
        try:
            time.sleep(0.3)
            servers.fail_over(rank)
            servers.settled()
            counting.go_on()
            stopped.go_on()
            counting.go_on(20)
            counting.end()
        finally:
            stopped.go_on()
            stopped.kill()


def test_a_primary_that_was_replaced_acknowledges_nothing() -> None:
    """It does not know of the newer view, its replica does."""
    with cluster(COUNTERS, [(0, 1)] * 4) as servers:
        client = servers.client()
        begin(client)
        client.push(0, ones(), weight=1.0)
        old = servers.servers[0].server
        servers.view = replace(servers.view, number=2, holders=((1,),) * 4)
        servers.servers[1].see(servers.view)
        told: list[Any] = []
        late = servers.client(1, deadline=1.5)
        thread = threading.Thread(target=lambda: told.append(fails(lambda: late.push(1, ones(), weight=1.0))))
        thread.start()
        thread.join(10.0)
        assert "it has other blocks by view 2" in str(told[0])
        assert old.custody._replication._fenced == 2
        servers.change(joining=((0,),) * 4)  # now everybody knows
        late.push(1, ones(), weight=1.0)
        servers.settled()
        client.push(2, ones(), weight=1.0)
        into = places()
        client.pull(into)
        assert all(torch.equal(values, torch.full_like(values, -3)) for values in into.values())
        same(servers)


def fails(what: Callable[[], Any]) -> RunFailed | None:
    try:
        what()
    except RunFailed as error:
        return error
    return None


def test_a_replica_that_is_silent_is_named() -> None:
    with cluster(COUNTERS, [(0, 1)] * 4, kind=Process, deadline=1.0) as servers:
        client = servers.client(deadline=5.0)
        begin(client)
        servers.servers[1].stop()
        try:
            with pytest.raises(RunFailed, match=r"server 1 \(generation 0\) has not taken what was pushed to block 0"):
                client.push(0, ones(), weight=1.0)
            reader = threading.Thread(target=lambda: fails(lambda: client.pull(places())))
            reader.start()
            reader.join(0.2)
            assert reader.is_alive()  # it would see what a failover could take back
        finally:
            servers.servers[1].go_on()
        reader.join(10.0)
        client.push(0, ones(), weight=1.0)
        into = places()
        client.pull(into)
        assert all(torch.equal(values, torch.full_like(values, -1)) for values in into.values())


def test_one_who_joins_and_takes_nothing_holds_nobody_up() -> None:
    with cluster(COUNTERS, [(0, 1)] * 4, kind=Process) as servers:
        counting = Counting(servers)
        counting.go_on()
        servers.kill(1)
        with servers._lock:
            servers.fail_over(1)
            servers.servers[1].stop()
        counting.go_on(20)
        servers.servers[1].go_on()
        servers.settled()
        counting.end()


def test_a_seat_that_nobody_takes_is_named() -> None:
    with cluster(COUNTERS, [(0, 1)] * 4, kind=Thread, deadline=0.5) as servers:
        client = servers.client(deadline=3.0)
        begin(client)
        servers.kill(1)
        with pytest.raises(RunFailed, match=r"server 1 \(generation 0\) has not taken what was pushed"):
            client.push(0, ones(), weight=1.0)


def test_who_reads_the_memory_of_a_server_that_was_replaced() -> None:
    """It waits no longer for what nobody settles there any more, and reads at the new primary."""
    with cluster(COUNTERS, [(0, 1)] * 4, kind=Process) as servers:
        client, other = servers.client(0), servers.client(1)
        begin(client)
        into = places()
        client.push_pull(0, ones(), into, weight=1.0)
        servers.servers[1].stop()  # what is pushed now is applied by the primary, and settled nowhere
        pushing = other.start_push(1, ones(), weight=1.0)
        pulling = client.start_pull(into)
        time.sleep(0.2)
        former = servers.servers.pop(0)
        former.stop()
        servers.servers[1].go_on()
        try:
            start = time.monotonic()
            servers.fail_over(0)
            assert pulling.result()[0] in (1, 2)
            pushing.result()
            assert time.monotonic() - start < 5.0
            servers.settled()
            assert client.pull(into) == dict.fromkeys(into, 2)
        finally:
            former.go_on()
            former.kill()
