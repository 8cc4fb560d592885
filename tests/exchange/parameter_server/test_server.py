"""Clients and one server: what is pushed, pulled and refused."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from exchange.parameter_server.holding import blocks_of, part_of, spec
from exchange.parameter_server.serving import SECRET, Cluster, cluster
from verbund.comm.wire import Calls, Message, Reply, dial
from verbund.errors import InputError, RunFailed
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Part
from verbund.exchange.parameter_server.server import Server

SHAPES = {"a": (5, 3), "b": (4,)}
TABLE = [Block("t", (10, 2), "float32", (0, 0), (6, 2), "rows"), Block("t", (10, 2), "float32", (6, 0), (4, 2), "rows")]


def plan(rule: Rule = Rule("asynchronous"), tables: bool = False) -> Plan:  # noqa: B008
    return Plan(tuple(blocks_of(SHAPES) + (TABLE if tables else [])), spec("sgd", 1.0), rule)


def begin(client: Client, of: Plan) -> None:
    for number, block in enumerate(of.blocks):
        client.begin(number, torch.zeros(block.count))


def ones(of: Plan, base: int = 0) -> list[Part]:
    return [
        Part(number, base, torch.ones(block.count)) for number, block in enumerate(of.blocks) if block.kind == "dense"
    ]


def places(of: Plan) -> dict[int, torch.Tensor]:
    return {number: torch.full((block.count,), 9.0) for number, block in enumerate(of.blocks) if block.kind == "dense"}


def ask(servers: Cluster, kind: str, fields: dict[str, object], **arrays: object) -> object:
    """A request as it is, of whoever."""
    address = servers.view.seats[0].address
    calls = Calls(lambda seconds: dial(address, SECRET, seconds), "the server")
    try:
        return calls.ask(kind, {"model": servers.plan.model, "view": 1, "client": 0, **fields}, 10.0, None, **arrays)  # type: ignore[arg-type]
    finally:
        calls.close()


def test_pushes_and_pulls() -> None:
    made = plan()
    with cluster(made) as servers:
        client, other = servers.client(0), servers.client(1)
        begin(client, made)
        begin(other, made)  # the second time it changes nothing
        into = places(made)
        assert client.pull(into) == dict.fromkeys(into, 0)
        assert all(not values.any() for values in into.values())
        outcomes = client.push(0, ones(made), weight=2.0)
        assert [(outcome.state, outcome.version, outcome.staleness) for outcome in outcomes] == [("applied", 1, 0)] * 5
        outcomes, versions = other.push_pull(1, ones(made), into, weight=1.0)
        assert [(outcome.version, outcome.staleness) for outcome in outcomes] == [(2, 1)] * 5
        assert versions == dict.fromkeys(into, 2)
        assert all(torch.equal(values, torch.full_like(values, -1.5)) for values in into.values())
        assert {outcome.state for outcome in other.push(1, ones(made), weight=1.0)} == {"known"}
        totals = servers.servers[0].server.totals()
        assert (totals["pushes"], totals["applied"], totals["known"]) == (3, 10, 5)


def test_rows() -> None:
    made = plan(tables=True)
    with cluster(made) as servers:
        client = servers.client()
        whole = torch.arange(20.0).view(10, 2)
        for number, block in enumerate(made.blocks):
            client.begin(number, part_of(block, whole) if block.kind == "rows" else torch.zeros(block.count))
        rows = torch.tensor([1, 5, 6, 9])
        found = client.pull_rows({"t": rows})["t"]
        assert torch.equal(found.values, whole[rows])
        assert found.versions == {5: 0, 6: 0}
        client.push(0, client.tables.parts("t", rows, torch.ones(4, 2), found.versions), weight=1.0)
        after = client.pull_rows({"t": torch.arange(10)})["t"]
        expected = whole.clone()
        expected[rows] -= 1
        assert torch.equal(after.values, expected)
        assert after.versions == {5: 1, 6: 1}
        with pytest.raises(InputError, match="no row 10"):
            client.pull_rows({"t": torch.tensor([3, 10])})


def test_rows_of_the_cache() -> None:
    made = plan(tables=True)
    with cluster(made) as servers:
        client = servers.client(row_cache=2)
        for number, block in enumerate(made.blocks):
            client.begin(number, torch.zeros(block.count))
        rows = torch.tensor([1, 5, 6])
        client.pull_rows({"t": rows}, ticket=0)
        client.push(0, client.tables.parts("t", rows, torch.ones(3, 2), {}), weight=1.0)
        more = torch.tensor([0, 1, 5, 6, 7])
        cached = client.pull_rows({"t": more}, ticket=2)["t"]
        assert cached.values[:, 0].tolist() == [0.0] * 5  # as they were at ticket 0, and new ones
        assert cached.versions == {5: 0, 6: 0}
        assert client.pull_rows({"t": rows}, ticket=2, least=1)["t"].values[:, 0].tolist() == [-1.0] * 3
        assert client.pull_rows({"t": more}, ticket=5)["t"].values[:, 0].tolist() == [0.0, -1.0, -1.0, -1.0, 0.0]
        assert client.cache is not None
        assert client.cache.hits == 3


def test_synchronous_readers_wait() -> None:
    made = plan(Rule("synchronous", shares=2))
    with cluster(made) as servers:
        clients = [servers.client(0), servers.client(1)]
        begin(clients[0], made)
        values: list[dict[int, torch.Tensor]] = [places(made), places(made)]

        def train(share: int) -> None:
            for ticket in range(20):
                clients[share].push_pull(
                    ticket, ones(made, ticket), values[share], weight=0.5, share=share, least=ticket + 1
                )
                assert all(float(each[0]) == -2.0 * (ticket + 1) for each in values[share].values())

        threads = [threading.Thread(target=train, args=(share,)) for share in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert float(values[0][0][0]) == float(values[1][0][0]) == -40.0


def test_who_is_missing_is_named() -> None:
    made = plan(Rule("synchronous", shares=3))
    with cluster(made) as servers:
        client = servers.client(deadline=0.5)
        with pytest.raises(RunFailed, match=r"nobody has given block 0 \(`a`\) its first values"):
            client.pull(places(made))
        begin(client, made)
        client.push(0, ones(made), weight=1.0, share=1)
        with pytest.raises(RunFailed, match="version 1 was waited for: of ticket 0 these shares have not come: 0, 2"):
            client.pull(places(made), least=1)


class TestRefused:
    """One client's mistake is told to it, and harms nobody else."""

    @pytest.fixture
    def servers(self):  # type: ignore[no-untyped-def]
        made = plan(tables=True)
        with cluster(made) as servers:
            client = servers.client()
            begin(client, made)
            yield servers
            client.push(7, ones(made), weight=1.0)
            into = places(made)
            client.pull(into)
            assert all(float(each[0]) == -1.0 for each in into.values())

    def push(self, servers: Cluster, part: Part, match: str, **more: object) -> None:
        with pytest.raises(InputError, match=match):
            servers.client(1).push(0, [part], **{"weight": 1.0, **more})  # type: ignore[arg-type]

    def test_lengths(self, servers: Cluster) -> None:
        self.push(servers, Part(1, 0, torch.ones(5)), "6 values in a row are needed")

    def test_dtypes(self, servers: Cluster) -> None:
        self.push(servers, Part(1, 0, torch.ones(6, dtype=torch.float64)), "has dtype float32")

    def test_what_is_not_finite(self, servers: Cluster) -> None:
        self.push(servers, Part(1, 0, torch.full((6,), float("nan"))), "not all values are finite")
        self.push(servers, Part(1, 0, torch.ones(6)), "`weight` of a push is a finite number", weight=float("inf"))

    def test_rows(self, servers: Cluster) -> None:
        self.push(servers, Part(5, 0, torch.ones(2), torch.tensor([7])), "row 7 is not among its rows")
        self.push(servers, Part(5, 0, torch.ones(4), torch.tensor([3, 3])), "not ascending")

    def test_another_model(self, servers: Cluster) -> None:
        with pytest.raises(InputError, match=r"island 0: this request is about another model"):
            ask(servers, "pull", {"model": "abc", "parts": [[0, None]]})

    def test_a_generation_that_was_replaced(self, servers: Cluster) -> None:
        servers.change(clients=(0, 1))
        with pytest.raises(RunFailed, match="island 1 of generation 0 was replaced by generation 1"):
            servers.client(1, 0).push(0, ones(servers.plan), weight=1.0)
        servers.client(1, 1).push(1, ones(servers.plan)[:0], weight=1.0)

    @pytest.mark.parametrize(
        ("kind", "fields", "match"),
        [
            ("dance", {}, "no request `dance`"),
            ("pull", {}, "no list of parts"),
            ("pull", {"parts": [[99, None]]}, "no block 99"),
            ("pull", {"parts": [["a", None]]}, "not block, rows"),
            ("pull", {"parts": [[5, None]]}, "which block 5 does not fit"),
            ("pull", {"parts": [[0, 1]]}, "which block 0 does not fit"),
            ("pull", {"parts": [[0, None]], "view": None}, "by which view"),
            ("pull", {"parts": [[0, None]], "least": "x"}, "no version"),
            ("push", {"generation": 0, "parts": []}, "`ticket` of a push"),
            ("begin", {"block": 99}, "no block 99"),
        ],
    )
    def test_what_is_no_request(self, servers: Cluster, kind: str, fields: dict[str, object], match: str) -> None:
        with pytest.raises(InputError, match=match):
            ask(servers, kind, fields)

    def test_arrays_that_are_missing(self, servers: Cluster) -> None:
        fields = {"generation": 0, "ticket": 0, "share": 0, "low": 0, "scale": 1.0, "weight": 1.0, "rate": 1.0}
        with pytest.raises(InputError, match="lacks the array `v0`"):
            ask(servers, "push", {**fields, "parts": [[0, 0, True, None]]})
        with pytest.raises(InputError, match="names a block twice"):
            ask(servers, "push", {**fields, "parts": [[0, 0, False, None]] * 2})


def test_a_slow_reader_holds_nobody_up() -> None:
    """One who asks for much and takes nothing; the server goes on with others."""
    made = Plan((Block("a", (4 << 20,), "float32", (0,), (4 << 20,)),), spec("sgd", 1.0), Rule("asynchronous"))
    with cluster(made) as servers:
        client = servers.client()
        client.begin(0, torch.zeros(4 << 20))
        slow = dial(servers.view.seats[0].address, SECRET)
        fields = {"model": made.model, "view": 1, "client": 1, "parts": [[0, None]], "request": ["slow", 1, 1]}
        slow.send("pull", fields)
        time.sleep(0.1)
        start = time.monotonic()
        for ticket in range(5):
            client.push(ticket, [Part(0, 0, torch.ones(4 << 20))], weight=1.0)
        assert time.monotonic() - start < 5.0
        assert float(slow.receive(5.0).arrays["v0"][-1]) == 0.0  # what it asked for, when it asked
        slow.close()


def test_who_does_not_answer_is_named() -> None:
    made = plan()
    with cluster(made) as servers:
        client = servers.client(deadline=0.5)
        begin(client, made)
        servers.kill(0)
        with pytest.raises(RunFailed, match=r"parameter server 0 \(generation 0\)"):
            client.push(0, ones(made), weight=1.0)


def test_numbers_of_half_precision() -> None:
    made = Plan((Block("a", (6,), "bfloat16", (0,), (6,)),), spec("sgd", 1.0), Rule("asynchronous"))
    with cluster(made) as servers:
        client = servers.client()
        client.begin(0, torch.zeros(6, dtype=torch.bfloat16))
        client.push(0, [Part(0, 0, torch.full((6,), 0.3, dtype=torch.bfloat16))], weight=1.0)
        into = torch.zeros(6, dtype=torch.bfloat16)
        client.pull({0: into})
        assert torch.equal(into, -torch.full((6,), 0.3, dtype=torch.bfloat16))
        assert np.isfinite(float(into[0]))


def test_a_server_that_shares_no_memory_is_asked_for_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def none(self: Server, message: Message) -> Reply:
        asked.append(message.fields["name"])
        return Reply("none", keep=False)

    monkeypatch.setattr(Server, "_window", none)
    made = plan()
    with cluster(made) as servers:
        client = servers.client()
        begin(client, made)
        for ticket in range(3):
            client.push(ticket, ones(made), weight=1.0)
    assert len(asked) == 1
