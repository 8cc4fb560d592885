"""Clients that are none, are of another run, or send what they like: each is refused, and nobody else is harmed."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exchange.parameter_server.serving import SECRET, Cluster, cluster
from exchange.parameter_server.test_server import begin, ones, places, plan
from verbund.comm.wire import Calls, Message, Refused, Secret, WireError, dial
from verbund.errors import ClusterLost, InputError, RunFailed, VerbundError
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.coordinator import Coordinator
from verbund.exchange.parameter_server.leases import Leases, Stops
from verbund.exchange.parameter_server.plan import Plan

PLAN = plan(tables=True)
NUMBERS = st.integers(-3, 12) | st.sampled_from([10**9, -(10**9), 2**53, 2**64])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ARRAYS = st.sampled_from(
    [
        np.zeros(0, np.float32),
        np.zeros(3, np.float32),
        np.full(6, np.nan, np.float32),
        np.arange(3),
        np.array([10**12, -5]),
        np.zeros((2, 2)),
    ]
)
REQUESTS: dict[str, dict[str, Any]] = {
    "push": {
        "client": 1,
        "generation": 0,
        "ticket": 0,
        "share": 0,
        "scale": 1.0,
        "weight": 1.0,
        "rate": 1.0,
        "low": 0,
        "parts": [[0, 0, True, None]],
        "pull": True,
        "least": 0,
        "places": [0],
        "outbox": "",
    },
    "pull": {"client": 1, "parts": [[0, None]], "least": 0, "looks": True},
    "squares": {"client": 1, "blocks": [0], "ticket": 0},
    "clip": {"client": 1, "generation": 0, "blocks": [0], "ticket": 0, "norm": 1.0},
    "begin": {"client": 1, "block": 0, "version": 0, "optimizer": [["exp_avg", "float32"]]},
    "load": {"client": 1, "blocks": [0], "folder": "/nowhere", "version": 0},
    "window": {"outbox": {"host": "", "arena": []}, "name": "n"},
    "record": {"stream": [1, 0, 1], "sequence": 1, "of": "push", "versions": [1], "record": {}},
    "saved": {"step": 5},
    "view": {"record": {"number": 1, "seats": [], "holders": [], "joining": [], "clients": []}},
}


@st.composite
def requests(draw: st.DrawFn, of: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A request of which some fields are not what they should be, or are not there."""
    kind = draw(st.sampled_from(sorted(of)))
    fields = dict(of[kind])
    for name in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3, unique=True)):
        fields.pop(name)
        if draw(st.booleans()):
            fields[name] = draw(ANYTHING)
    return kind, fields


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Cluster, Client]]:
    with cluster(PLAN, deadline=1.0) as servers:
        client = servers.client(0)
        begin(client, PLAN)
        yield servers, client


def calls(servers: Cluster, secret: Secret | None = SECRET) -> Calls:
    address = servers.view.seats[0].address
    return Calls(lambda seconds: dial(address, secret, seconds), "the server")


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_of_which_anything_may_be_wrong(served: tuple[Cluster, Client], data: st.DataObject) -> None:
    servers, client = served
    kind, fields = data.draw(requests(REQUESTS))
    arrays = data.draw(st.dictionaries(st.sampled_from(["v0", "r0", "values", "o0", "t0"]), ARRAYS, max_size=2))
    line = calls(servers)
    try:
        with suppress(VerbundError, WireError, ValueError):  # ValueError: it cannot travel
            line.ask(kind, {"model": PLAN.model, "view": 1, "seconds": 0.2, **fields}, 5.0, None, **arrays)
    finally:
        line.close(wait=False)
    server = servers.servers[0].server
    assert server.failure is None
    into = places(PLAN)
    before = client.pull(into)
    _, after = client.push_pull(server.totals()["pushes"] + 100, ones(PLAN), into, weight=1.0)
    assert all(after[block] == before[block] + 1 for block in into)
    assert all(torch.isfinite(values).all() for values in into.values())


def test_who_is_not_of_the_run(served: tuple[Cluster, Client]) -> None:
    servers, _ = served
    line = calls(servers, Secret.create())
    try:
        with pytest.raises(Refused):
            line.ask("pull", {"model": PLAN.model, "view": 1, **REQUESTS["pull"]}, 5.0)
    finally:
        line.close()
    line = calls(servers)
    try:
        with pytest.raises(InputError, match="another model"):
            line.ask("pull", {"model": "0" * 16, "view": 1, **REQUESTS["pull"]}, 5.0)
        with pytest.raises(InputError, match="knows no request `close`"):
            line.ask("close", {"model": PLAN.model}, 5.0)
        fields = {**REQUESTS["push"], "generation": 10**9, "parts": [], "places": None}
        with pytest.raises(RunFailed, match="generation 1000000000 was replaced"):
            line.ask("push", {"model": PLAN.model, "view": 1, **fields}, 5.0)
    finally:
        line.close()


def test_frames_that_announce_too_much(served: tuple[Cluster, Client]) -> None:
    """Nobody gets memory by saying that much is to come, and no one who is not trusted is listened to at all."""
    servers, client = served
    path = servers.view.seats[0].address.removeprefix("unix:")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            with suppress(OSError):
                sock.sendall(struct.pack("<IIQQ", 0x314E4256, 1 << 31, 1 << 60, 0) + b"x" * (1 << 16))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000
    assert client.pull(places(PLAN))


# -- the coordinator -------------------------------------------------------------------------------------------------

RECORD = PLAN.record()
QUESTIONS: dict[str, dict[str, Any]] = {
    "enter": {"island": 0, "generation": 1, "plan": RECORD},
    "begun": {"island": 0, "generation": 1},
    "lease": {"island": 0, "generation": 1, "number": 0, "count": 1, "worker": 0, "done": 0},
    "done": {"island": 0, "generation": 1, "worker": 0, "done": 0},
    "settle": {"island": 0, "generation": 1, "step": 50, "reason": None, "judged": {}},
    "seat": {"server": 0, "generation": 1, "address": "unix:/0", "recovered": False},
    "joined": {"server": 0, "generation": 1, "blocks": [0]},
    "watch": {"known": -1},
}


def desk(folder: Path, fatal: list[VerbundError]) -> Coordinator:
    leases = Leases(2, 1, False, 0, Stops(50, (10,)))
    return Coordinator(folder, leases, 2, lambda made: [(0, 1)] * len(made.blocks), {}, fatal.append)


def ask(coordinator: Coordinator, kind: str, **fields: Any) -> dict[str, Any]:
    return dict(coordinator.handle(Message(kind, fields, {})).fields)


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_questions_of_which_anything_may_be_wrong(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verbund.exchange.parameter_server.coordinator._WAIT", 0.001)
    folder, fatal = tmp_path_factory.mktemp("desk"), list[VerbundError]()
    coordinator = desk(folder, fatal)
    ask(coordinator, "enter", island=0, generation=1, plan=RECORD)
    ask(coordinator, "enter", island=1, generation=1, plan=RECORD)
    for server in (0, 1):
        ask(coordinator, "seat", server=server, generation=1, address=f"unix:/{server}", recovered=False)
    for kind, fields in data.draw(st.lists(requests(QUESTIONS), min_size=1, max_size=6)):
        with suppress(VerbundError):  # and nothing else
            ask(coordinator, kind, **fields)
    known = ask(coordinator, "watch", known=-1)
    again = desk(folder, fatal)  # what it has taken it can read
    assert ask(again, "watch", known=-1) == known
    assert ask(again, "lease", island=1, generation=1, number=0, count=1, worker=0, done=0)


def test_nobody_fences_all_others_for_ever(tmp_path: Path) -> None:
    coordinator = desk(tmp_path, [])
    ask(coordinator, "enter", island=0, generation=1, plan=RECORD)
    with pytest.raises(InputError, match="`generation` of a request"):
        ask(coordinator, "enter", island=0, generation=10**9, plan=RECORD)
    with pytest.raises(InputError, match="`generation` of a request"):
        ask(coordinator, "seat", server=0, generation=10**9, address="unix:/0", recovered=False)
    ask(coordinator, "seat", server=0, generation=1, address="unix:/0", recovered=False)
    with pytest.raises(ClusterLost):
        ask(coordinator, "lease", **{**QUESTIONS["lease"], "generation": 0})


def test_what_it_keeps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verbund.exchange.parameter_server.coordinator._COMPACT", 50)
    coordinator = desk(tmp_path, [])
    ask(coordinator, "enter", island=0, generation=1, plan=RECORD)
    for number in range(400):
        ask(coordinator, "seat", server=0, generation=1, address="unix:/0", recovered=False)
        ask(coordinator, "seat", server=1, generation=1, address=f"unix:/{number}", recovered=False)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 50_000
    with pytest.raises(InputError, match="`judged` of a request"):
        ask(coordinator, "settle", **{**QUESTIONS["settle"], "judged": {"best": "x" * 100_000}})
    with pytest.raises(InputError, match="`address` of a request"):
        ask(coordinator, "seat", server=0, generation=1, address="x" * 10_000, recovered=False)


def test_a_plan_that_is_none(tmp_path: Path) -> None:
    coordinator = desk(tmp_path, [])
    block = RECORD["blocks"][0]
    for wrong in (
        None,
        {},
        {**RECORD, "blocks": []},
        {**RECORD, "blocks": [{**block, "offset": [99, 0]}]},
        {**RECORD, "blocks": [{**block, "dtype": "nothing"}]},
        {**RECORD, "blocks": [{**block, "kind": "any"}]},
        {**RECORD, "optimizer": {"lr": "fast"}},
        {**RECORD, "rule": {**RECORD["rule"], "consistency": "none"}},
    ):
        with pytest.raises(InputError, match="`plan` of a request"):
            ask(coordinator, "enter", island=0, generation=1, plan=wrong)
    assert isinstance(Plan.of(RECORD), Plan)
    ask(coordinator, "enter", island=0, generation=1, plan=RECORD)
