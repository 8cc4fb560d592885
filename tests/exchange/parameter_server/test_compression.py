"""Compressed pushes: what arrives is what the codec says, what is left out comes later, nothing is counted twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exchange.parameter_server.holding import begun, blocks_of, push, send, spec, whole
from exchange.parameter_server.serving import SECRET, cluster
from verbund.comm.wire import Calls, dial
from verbund.errors import InputError
from verbund.exchange.parameter_server import records
from verbund.exchange.parameter_server.coded import codec_of
from verbund.exchange.parameter_server.left_out import CompressedPushes
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.exchange.parameter_server.push import Outcome, Part, Push
from verbund.job import Compression

METHODS = ["fp16", "bf16", "int8", "int4", "sign", "top_k"]
SHAPE = (40, 32)
WHOLE = Block("a", SHAPE, "float32", (0, 0), SHAPE)
TABLE = Block("t", (50, 8), "float32", (0, 0), (50, 8), "rows")
SUM = Block("s", (200,), "float32", (0,), (200,), "sum")


def plan(method: str, rule: Rule | None = None, **settings: Any) -> Plan:
    compression = Compression(name=method, warmup=0, **settings)
    return Plan((WHOLE, SUM, TABLE), spec("sgd", 1.0), rule or Rule("asynchronous"), compression)


def taught(ticket: int) -> list[Part]:
    generator = torch.Generator().manual_seed(ticket)
    rows = torch.tensor([3, 17, 40])
    return [
        Part(0, 0, torch.randn(WHOLE.count, generator=generator)),
        Part(1, 0, torch.randn(200, generator=generator)),
        Part(2, 0, torch.randn(3 * TABLE.width, generator=generator), rows),
    ]


def size_of(method: str, count: int) -> int:
    """Bytes of a message, by the description of each format; parts begin at multiples of 16."""

    def parts(*sizes: float) -> int:
        return sum(16 * math.ceil(size / 16) for size in sizes)

    kept = round(0.05 * count)
    return {
        "fp16": parts(16, 2 * count),
        "bf16": parts(2 * count),
        "int8": parts(count, 4 * math.ceil(count / 256)),
        "int4": parts(count / 2, 4 * math.ceil(count / 128)),
        "sign": parts(count / 8, 4 * math.ceil(count / 256)),
        "top_k": parts(4 * kept, 4 * kept),
    }[method]


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_format_and_nothing_is_lost(method: str) -> None:
    """On the way to a server and to its replica. What servers have, and what the worker still keeps, is the sum."""
    made = plan(method)
    with cluster(made, [(0, 1)] * 3) as servers:
        client = servers.client(0)
        for number, block in enumerate(made.blocks):
            client.begin(number, torch.zeros(block.count))
        begun_with = servers.servers[0].server.totals()["replicated_bytes"]
        compressed = CompressedPushes(made, 0, 7)
        total = torch.zeros(WHOLE.count, dtype=torch.float64)
        for ticket in range(6):
            parts = taught(ticket)
            assert parts[0].values is not None
            total += parts[0].values.double() * 0.25  # the factor makes gradients of values
            sent = compressed.encoded(ticket, parts, 0.25)
            compressed.settle(sent, client.push(ticket, sent, weight=8.0, scale=2.0))
        cast = method in ("fp16", "bf16")
        rows = size_of(method, 24) if cast else 4 * 24
        expected = 6 * (size_of(method, WHOLE.count) + 4 * 200 + rows + 8 * 3)
        server = servers.servers[0].server
        assert server.totals()["bytes"] == expected
        assert server.totals()["replicated_bytes"] - begun_with == expected
        assert compressed.totals.bytes_with == 6 * (size_of(method, WHOLE.count) + rows)
        assert compressed.totals.bytes_without == 6 * 4 * (WHOLE.count + 24)
        into = {0: torch.zeros(WHOLE.count), 1: torch.zeros(200)}
        client.pull(into)
        torch.testing.assert_close(into[0].double(), compressed.errors[0].double() - total, rtol=1e-5, atol=1e-5)
        assert set(compressed.errors) == {0}
        plain = sum((taught(ticket)[1].values for ticket in range(6)), start=torch.zeros(200))
        torch.testing.assert_close(into[1], 2.0 * plain)
        exact = sum((taught(ticket)[2].values for ticket in range(6)), start=torch.zeros(24)) * 0.25
        found = client.pull_rows({"t": torch.tensor([3, 17, 40])})["t"].values
        torch.testing.assert_close(found.view(-1), -exact, rtol=1e-2 if cast else 1e-5, atol=2e-2 if cast else 1e-5)
        for block in range(3):
            images = [servers.servers[rank].server.custody.holdings.image(block) for rank in (0, 1)]
            assert all(torch.equal(images[0].tensors[n], images[1].tensors[n]) for n in images[0].tensors)


def test_warm_up_and_what_would_not_be_smaller_travel_as_they_are() -> None:
    made = replace(plan("int8"), compression=Compression(name="int8", warmup=2))
    compressed = CompressedPushes(made, 0, 0)
    for ticket, message in [(0, False), (1, False), (2, True)]:
        sent = compressed.encoded(ticket, taught(ticket), 1.0)
        assert [part.message is not None for part in sent] == [message, False, False]
    small = Plan(tuple(blocks_of({"b": (5,)})), spec("sgd"), Rule("asynchronous"), Compression(name="fp16"))
    assert codec_of(small, 0, 5) is None
    whole_numbers = Block("n", (900,), "int64", (0,), (900,))
    assert codec_of(replace(small, blocks=(whole_numbers,)), 0, 900) is None


def test_what_came_too_late_counts_as_not_sent() -> None:
    compressed = CompressedPushes(plan("top_k"), 0, 0)
    outcomes = [Outcome("applied", 1, 0)] * 3
    compressed.settle(compressed.encoded(0, taught(0), 1.0), outcomes)
    kept = compressed.errors[0].clone()
    late = compressed.encoded(1, taught(1), 1.0)
    compressed.settle(late, [Outcome("late", 1, None), *outcomes[1:]])
    assert torch.equal(compressed.errors[0], kept)
    assert late[0].message is not None


def test_what_others_may_have_pushed_travels_as_it_is_and_changes_nothing_that_is_kept() -> None:
    """Of a process that is lost servers may have a push, or not: with both the sum is what it was to be."""
    made = plan("top_k", Rule("synchronous", shares=1))
    for former_came in (False, True):
        holdings = begun(made, {"a": torch.zeros(SHAPE), "t": torch.zeros(50, 8), "s": torch.zeros(200)})
        former, later = CompressedPushes(made, 0, 0), CompressedPushes(made, 0, 0)
        if former_came:
            send(holdings, push(former.encoded(0, taught(0), 1.0), 0))
        parts = later.encoded(0, taught(0), 1.0, again=True)
        outcomes = send(holdings, push(parts, 0))
        assert outcomes[0].state == ("known" if former_came else "applied")
        later.settle(parts, outcomes)
        assert not later.errors
        assert all(part.message is None for part in parts)
        second = later.encoded(1, taught(1), 1.0)
        later.settle(second, send(holdings, push(second, 1)))
        values = [taught(ticket)[0].values for ticket in (0, 1)]
        assert values[0] is not None
        assert values[1] is not None
        there = whole(holdings, "a").view(-1).double() - later.errors[0].double()
        lost = former._left[0].double() if former_came else 0.0
        torch.testing.assert_close(-there, values[0].double() + values[1].double() - lost, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_message_is_made_once_and_again_the_same(rounding: str) -> None:
    """By whoever has the same gradients: what is drawn is keyed by seed, ticket, share and block."""
    made = plan("int8", rounding=rounding)
    messages = [CompressedPushes(made, 1, 5).encoded(3, taught(3), 0.5)[0].message for _ in range(2)]
    assert messages[0] is not None
    assert messages[1] is not None
    assert torch.equal(messages[0], messages[1])
    other = CompressedPushes(made, 2, 5).encoded(3, taught(3), 0.5)[0].message
    assert other is not None
    assert torch.equal(messages[0], other) == (rounding == "nearest")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes(dtype: str) -> None:
    """Values come in the block's own type, and what that rounds is kept, too."""
    of = replace(WHOLE, dtype=dtype)
    kind = getattr(torch, dtype)
    made = Plan((of,), spec("sgd", 1.0), Rule("asynchronous"), Compression(name="int8"))
    compressed = CompressedPushes(made, 0, 0)
    values = torch.randn(of.count, generator=torch.Generator().manual_seed(2)).to(kind)
    (part,) = compressed.encoded(0, [Part(0, 0, values)], 1.0)
    one = push([part])
    there = Push.of(one.fields(), {name: tensor.numpy() for name, tensor in one.arrays().items()}, made)
    said = there.parts[0].values
    assert said is not None
    assert said.dtype == kind
    assert part.values is not None
    assert torch.equal(said, part.values)
    compressed.settle([part], [Outcome("applied", 1, 0)])
    torch.testing.assert_close(said.double() + compressed.errors[0].double(), values.double(), rtol=1e-6, atol=1e-6)


def test_a_log_has_messages_and_is_replayed_to_the_same_bits(tmp_path: Path) -> None:
    made = plan("int4")
    with cluster(made, log=True) as servers:
        client = servers.client(0)
        for number, block in enumerate(made.blocks):
            client.begin(number, torch.zeros(block.count))
        compressed = CompressedPushes(made, 0, 0)
        for ticket in range(3):
            parts = compressed.encoded(ticket, taught(ticket), 1.0)
            compressed.settle(parts, client.push(ticket, parts, weight=1.0))
        before = [servers.servers[0].server.custody.holdings.image(block) for block in range(3)]
        servers.kill(0)
        servers.fail_over(0)
        after = [servers.servers[0].server.custody.holdings.image(block) for block in range(3)]
        for one, other in zip(before, after, strict=True):
            assert one.fields == other.fields
            assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


WRONG: dict[str, tuple[str, Any]] = {
    "too short": ("int8", np.zeros(5, np.uint8)),
    "no bytes": ("int8", np.zeros(size_of("int8", WHOLE.count), np.int8)),
    "of another shape": ("int8", np.zeros((2, size_of("int8", WHOLE.count) // 2), np.uint8)),
    "beyond the block": ("top_k", np.full(size_of("top_k", WHOLE.count), 127, np.uint8)),
    "before the block": ("top_k", np.full(size_of("top_k", WHOLE.count), 255, np.uint8)),
    "no numbers": ("int8", np.full(size_of("int8", WHOLE.count), 255, np.uint8)),
    "not agreed upon": ("none", np.zeros(100, np.uint8)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_message_that_is_none_is_refused(what: str) -> None:
    method, message = WRONG[what]
    made = plan(method) if method != "none" else replace(plan("int8"), compression=Compression())
    with cluster(made) as servers:
        client = servers.client(0)
        client.begin(0, torch.zeros(WHOLE.count))
        line = Calls(lambda seconds: dial(servers.view.seats[0].address, SECRET, seconds), "the server")
        fields = {"model": made.model, "view": 1, **push([Part(0, 0, torch.zeros(WHOLE.count))]).fields()}
        with pytest.raises(InputError):
            line.ask("push", fields, 5.0, None, c0=message)
        line.close(wait=False)
        assert servers.servers[0].server.failure is None
        assert client.push(5, [Part(0, 0, torch.ones(WHOLE.count))], weight=1.0)[0].version == 1


def test_a_record_of_blocks_keeps_its_messages() -> None:
    one = push(CompressedPushes(plan("int8"), 0, 0).encoded(0, taught(0), 1.0))
    part = records.of_blocks(one, {0})
    assert isinstance(part, Push)
    assert part.arrays().keys() == {"c0"}
