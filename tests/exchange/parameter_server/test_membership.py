"""Views: a lost server's blocks go on with who else has them, and nobody counts as having what it has not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.errors import ClusterLost
from verbund.exchange.parameter_server import membership
from verbund.exchange.parameter_server.view import Seat, View


def _seated(servers: int, places: list[tuple[int, ...]], islands: int = 2) -> View:
    view = membership.first(places, servers, islands)
    for server in range(servers):
        view = membership.seated(view, server, f"unix:/{server}", 1, False)
    return view


def test_a_replica_becomes_primary_and_the_new_process_joins() -> None:
    view = _seated(2, [(0, 1), (1, 0)])
    assert view.holders == ((0, 1), (1, 0))
    after = membership.seated(view, 0, "unix:/new", 2, False)
    assert after.number == view.number + 1
    assert after.seats[0] == Seat("unix:/new", 2)
    assert after.holders == ((1,), (1,))
    assert after.joining == ((0,), (0,))
    whole = membership.joined(after, 0, 2, [0, 1])
    assert whole.holders == ((1, 0), (1, 0))
    assert whole.joining == ((), ())


def test_what_an_older_process_was_given_counts_for_nothing() -> None:
    view = membership.seated(_seated(2, [(0, 1)]), 1, "unix:/new", 2, False)
    again = membership.seated(view, 1, "unix:/newer", 3, False)
    assert membership.joined(again, 1, 2, [0]) == again


def test_other_replicas_of_a_lost_primary_stay_holders() -> None:
    """So many servers may be lost at once as there are replicas, whichever is told of first."""
    view = _seated(3, [(0, 1, 2)])
    after = membership.seated(view, 0, "unix:/new", 2, False)
    assert after.holders == ((1, 2),)
    assert after.joining == ((0,),)
    both = membership.seated(after, 1, "unix:/new", 2, False)
    assert both.holders == ((2,),)
    assert both.joining == ((0, 1),)
    lost_replica = membership.seated(view, 2, "unix:/new", 2, False)
    assert lost_replica.holders == ((0, 1),)
    assert lost_replica.joining == ((2,),)


def test_who_recovers_from_a_log_keeps_its_blocks() -> None:
    view = _seated(2, [(0,), (1,)])
    after = membership.seated(view, 0, "unix:/new", 2, True)
    assert after.holders == view.holders
    assert after.seats[0].generation == 2


def test_the_last_holder_lost_ends_it() -> None:
    view = _seated(2, [(0, 1)])
    view = membership.seated(view, 1, "unix:/new", 2, False)
    with pytest.raises(ClusterLost, match="nobody else has block 0"):
        membership.seated(view, 0, "unix:/new", 2, False)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), servers=st.integers(2, 5))
def test_holders_are_never_lost_one_at_a_time(seed: int, servers: int) -> None:
    choose = random.Random(seed)
    places = [tuple(choose.sample(range(servers), 2)) for _ in range(6)]
    view = _seated(servers, places)
    generation = [1] * servers
    for _ in range(12):
        lost = choose.randrange(servers)
        generation[lost] += 1
        number = view.number
        view = membership.seated(view, lost, f"unix:/{lost}/{generation[lost]}", generation[lost], False)
        for server in range(servers):  # all that joins gets everything before the next one is lost
            blocks = [block for block, waiting in enumerate(view.joining) if server in waiting]
            view = membership.joined(view, server, generation[server], blocks)
        assert view.number > number
        assert all(sorted(had) == sorted(place) for had, place in zip(view.holders, places, strict=True))
        assert all(waiting == () for waiting in view.joining)


def test_a_view_survives_its_record() -> None:
    view = membership.entered(_seated(2, [(0, 1), (1,)]), 1, 3)
    assert View.of(view.record()) == view
    assert view.clients == (0, 3)
