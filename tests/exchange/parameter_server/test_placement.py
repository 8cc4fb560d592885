"""Placement: distinct servers, bounded shares, and few blocks that move."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exchange.parameter_server.holding import ASYNCHRONOUS, spec
from verbund.errors import InputError
from verbund.exchange.parameter_server.placement import BOUND, place
from verbund.exchange.parameter_server.plan import Block, Plan


def plan_of(sizes: list[int]) -> Plan:
    blocks = [Block(f"layer{n}.weight", (size,), "float32", (0,), (size,)) for n, size in enumerate(sizes)]
    return Plan(tuple(blocks), spec("sgd"), ASYNCHRONOUS)


def held(plan: Plan, placed: list[tuple[int, ...]], servers: int, copies: int = 99) -> list[int]:
    loads = [0] * servers
    for block, holders in zip(plan.blocks, placed, strict=True):
        for server in holders[:copies]:
            loads[server] += block.count
    return loads


SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 7), st.integers(0, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_holders_are_distinct_and_loads_bounded(
    sizes: list[int], servers: int, replicas: int, data: st.DataObject
) -> None:
    replicas = min(replicas, servers - 1)
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=servers, max_size=servers))
    plan = plan_of(sizes)
    placed = place(plan, servers, replicas, weights)
    assert placed == place(plan, servers, replicas, weights)
    assert all(len(set(holders)) == len(holders) == replicas + 1 for holders in placed)
    assert all(0 <= server < servers for holders in placed for server in holders)
    primaries = held(plan, placed, servers, 1)
    for load, weight in zip(primaries, weights, strict=True):
        # Where no server has room, one block goes to who is then the least beyond its share, as a multiple of it.
        assert load <= BOUND * sum(sizes) * weight / sum(weights) + max(sizes) * weight / min(weights)


@pytest.mark.parametrize("servers", [2, 3, 5, 8])
@pytest.mark.parametrize("replicas", [0, 1])
def test_many_blocks_keep_within_the_bound(servers: int, replicas: int) -> None:
    plan = plan_of([1000] * 400 + [10] * 100)
    placed = place(plan, servers, replicas)
    for copies in range(1, replicas + 2):
        loads = held(plan, placed, servers, copies)
        assert max(loads) <= BOUND * sum(loads) / servers
    weighted = held(plan, place(plan, servers, 0, [2.0] + [1.0] * (servers - 1)), servers)
    assert weighted[0] == pytest.approx(2 * sum(weighted) / (servers + 1), rel=0.3)


def test_few_large_blocks_are_even() -> None:
    assert sorted(held(plan_of([100] * 8), place(plan_of([100] * 8), 4, 0), 4)) == [200] * 4
    assert sorted(held(plan_of([100] * 3), place(plan_of([100] * 3), 3, 2), 3)) == [300] * 3


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_few_blocks_move_when_a_server_comes(servers: int) -> None:
    plan = plan_of([1000] * 300 + [10] * 100)
    before, after = place(plan, servers, 0), place(plan, servers + 1, 0)
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert moved <= 1.6 * len(plan.blocks) / (servers + 1)
    before, after = place(plan, servers, 1), place(plan, servers + 1, 1)
    copied = sum(len(set(b) - set(a)) for a, b in zip(before, after, strict=True))
    assert copied <= 2.2 * 2 * len(plan.blocks) / (servers + 1)


def test_it_does_not_matter_which_other_blocks_there_are_where_there_is_room() -> None:
    some, more = plan_of([10] * 300), plan_of([10] * 330)
    before, after = place(some, 4, 0), place(more, 4, 0)
    assert sum(a != b for a, b in zip(before, after[:300], strict=True)) < 15


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InputError, match="2 replicas besides the primary need 3 servers, and there are 2"):
        place(plan_of([1]), 2, 2)
    for weights in ([1.0], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(InputError, match="2 servers need as many weights above 0"):
            place(plan_of([1]), 2, 0, weights)


def test_who_places_needs_no_torch() -> None:
    code = "import sys, verbund.exchange.parameter_server.placement; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
