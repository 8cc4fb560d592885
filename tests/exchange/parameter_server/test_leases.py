"""Leases: every ticket is done, no worker passes a stop, and what a dead one had is given anew."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.exchange.parameter_server.leases import Leases, Stops, stops


def _drive(leases: Leases, seed: int, deaths: float, divided: bool) -> tuple[dict[int, list[int]], list[int]]:
    """Islands lease, work, report and die at random until training has ended; who did which ticket, and all stops."""
    choose = random.Random(seed)
    islands = range(len(leases.islands))
    workers, begin = len(leases.islands[0].done), leases.rested
    generation = [1] * len(islands)
    for island in islands:
        leases.enter(island, 1)
    number = [0] * len(islands)
    done = [[0] * workers for _ in islands]
    finished: dict[int, list[int]] = {}
    given: dict[tuple[int, int], set[tuple[int, int]]] = {}
    rests: list[int] = []
    for _ in range(100_000):
        # Servers take what is below for done.
        assert all(ticket in finished for ticket in range(begin, leases.low))
        if leases.ended is not None:
            return finished, rests
        if leases.resting:
            assert leases.stop is not None
            assert leases.low == leases.stop
            assert all(not own.given for own in leases.islands)
            rests.append(leases.stop)
            leases.settle(leases.stop, None)
            continue
        island = choose.choice(islands)
        if choose.random() < deaths:
            generation[island] += 1
            leases.enter(island, generation[island])
            number[island], done[island] = 0, [0] * workers
            continue
        own = leases.islands[island]
        if choose.random() < 0.5 and number[island] - min(done[island]) < 3:
            if leases.lease(island, number[island]):
                ticket = leases.ticket(island, number[island])
                assert leases.stop is None or ticket < leases.stop
                # Whoever comes to a ticket that lost processes may have pushed is told so, and nobody else.
                place = island if divided else 0
                others = given.setdefault((ticket, place), {(island, generation[island])})
                others.add((island, generation[island]))
                assert (ticket in own.again) == (len(others) > 1)
                number[island] += 1
        else:
            worker = choose.randrange(workers)
            if done[island][worker] < number[island]:
                before = min(done[island])
                done[island][worker] += 1
                if min(done[island]) > before:
                    finished.setdefault(leases.ticket(island, before), []).append(island)
                leases.done(island, worker, done[island][worker])
        assert own is leases.islands[island]
    raise AssertionError("it does not end")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    islands=st.integers(1, 5),
    workers=st.integers(1, 3),
    divided=st.booleans(),
    begin=st.integers(0, 7),
    total=st.integers(0, 40),
    every=st.lists(st.integers(1, 9), max_size=2),
)
def test_every_ticket_is_done_and_all_rest_where_they_should(
    seed: int, islands: int, workers: int, divided: bool, begin: int, total: int, every: list[int]
) -> None:
    end = begin + total
    leases = Leases(islands, workers, divided, begin, Stops(end, tuple(every)))
    finished, rests = _drive(leases, seed, 0.03, divided)
    assert set(finished) >= set(range(begin, end))
    assert all(begin <= ticket < end for ticket in finished)
    if divided:
        assert all(set(by) == set(range(islands)) for by in finished.values())
    expected = {n for n in range(begin + 1, end + 1) if any(n % k == 0 for k in every)} | {end}
    assert rests == sorted(expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), divided=st.booleans())
def test_without_deaths_each_ticket_is_given_once(seed: int, divided: bool) -> None:
    leases = Leases(3, 1, divided, 0, Stops(30, (10,)))
    finished, _ = _drive(leases, seed, 0.0, divided)
    times = 3 if divided else 1
    assert all(len(by) == times for by in finished.values())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 2), deaths=st.sampled_from([0.0, 0.03]))
def test_islands_come_and_go_and_every_ticket_is_done(seed: int, workers: int, deaths: float) -> None:
    """Without deaths each is done once, whoever comes and goes; who has gone is asked for nothing any more."""
    choose = random.Random(seed)
    leases = Leases(2, workers, False, 0, Stops(40, (15,)))
    generation, living = {0: 1, 1: 1}, {0, 1}
    for island in living:
        leases.enter(island, 1)
    number: dict[int, int] = {0: 0, 1: 0}
    done = {0: [0] * workers, 1: [0] * workers}
    finished: dict[int, int] = {}
    rests, gone = [], 0
    for _ in range(20_000):
        assert all(ticket in finished for ticket in range(leases.low))
        if leases.ended is not None:
            break
        if leases.resting:
            rests.append(leases.stop)
            leases.settle(rests[-1] or 0, None)
            continue
        event = choose.random()
        if event < 0.02:
            leases.release(choose.randrange(1, len(leases.islands)))
            continue
        if event < 0.05 or (deaths and event < 0.05 + deaths):
            island = choose.choice(sorted(living)) if event > 0.05 else choose.randrange(1, 5)
            generation[island] = generation.get(island, 0) + 1
            if event < 0.05:
                if island in living:
                    continue
                leases.admit(island)
            leases.enter(island, generation[island])
            number[island], done[island] = 0, [0] * workers
            living.add(island)
            continue
        island = choose.choice(sorted(living))
        if leases.gone(island):
            living.remove(island)
            gone += 1
            assert not leases.lease(island, number[island])
        elif choose.random() < 0.5 and number[island] - min(done[island]) < 3:
            number[island] += leases.lease(island, number[island])
        else:
            worker = choose.randrange(workers)
            if done[island][worker] < number[island]:
                before = min(done[island])
                done[island][worker] += 1
                if min(done[island]) > before:
                    ticket = leases.ticket(island, before)
                    finished[ticket] = finished.get(ticket, 0) + 1
                leases.done(island, worker, done[island][worker])
    assert leases.ended == "steps"
    assert rests == [15, 30, 40]
    assert sorted(finished) == list(range(40))
    assert deaths or set(finished.values()) == {1}


@pytest.mark.parametrize("divided", [True, False])
def test_who_is_asked_to_end_finishes_what_is_leased(divided: bool) -> None:
    leases = Leases(2, 1, divided, 0, Stops(None, ()))
    for island in (0, 1):
        leases.enter(island, 1)
    for number in range(3):
        assert leases.lease(0, number)
    assert leases.lease(1, 0)
    leases.end_soon("interrupt")
    last = 3 if divided else 4
    assert leases.stop == last
    assert not leases.lease(0, 3)
    if divided:
        assert [leases.lease(1, n) for n in range(1, 4)] == [True, True, False]
        leases.done(1, 0, 3)
    else:
        assert not leases.lease(1, 1)
        leases.done(1, 0, 1)
    assert not leases.resting
    leases.done(0, 0, 3)
    assert leases.resting
    leases.settle(last, None)
    assert leases.ended == "interrupt"


def test_what_a_lost_island_had_is_not_done_while_another_does_it_after_later_tickets() -> None:
    leases = Leases(2, 1, False, 0, Stops(20, ()))
    assert leases.lease(0, 0)
    assert [leases.lease(1, number) for number in range(2)] == [True, True]
    leases.done(1, 0, 1)
    leases.enter(0, 1)
    assert leases.lease(1, 2)
    assert [leases.ticket(1, number) for number in (1, 2)] == [2, 0]
    assert leases.low == 0
    leases.done(1, 0, 2)
    assert leases.low == 0
    leases.done(1, 0, 3)
    assert leases.low == 3


def test_a_state_is_what_its_record_says() -> None:
    leases = Leases(2, 2, False, 0, Stops(20, (5,)))
    leases.enter(0, 1)
    leases.enter(1, 1)
    for number in range(3):
        leases.lease(0, number)
    leases.enter(0, 2)
    leases.lease(1, 0)
    other = Leases(2, 2, False, 0, Stops(20, (5,)))
    other.load(copy.deepcopy(leases.record()))
    for state in (leases, other):
        state.lease(0, 0)
        state.lease(0, 1)
    assert other.record() == leases.record()
    assert other.low == leases.low == 0


def test_stops_of_a_job() -> None:
    assert stops(None, ["end", "epoch", 7], 10) == Stops(None, (7, 10))
    assert Stops(25, (10,)).after(0) == 10
    assert Stops(25, (10,)).after(20) == 25
    assert Stops(None, ()).after(3) is None
