"""The ledger: every share once, whatever the order and however often it comes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from verbund.exchange.parameter_server.ledger import Ledger

KEYS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=60)


@given(KEYS, st.integers(1, 3))
def test_a_share_is_taken_once_in_any_order_and_with_any_repetition(keys: list[tuple[int, int]], shares: int) -> None:
    keys = [(ticket, share % shares) for ticket, share in keys]
    ledger, taken = Ledger(shares), []
    for ticket, share in keys:
        assert ((ticket, share) in ledger) == ((ticket, share) in taken)
        if ledger.add(ticket, share):
            taken.append((ticket, share))
    assert len(taken) == len(set(taken))
    assert set(taken) == set(keys)
    whole = next(ticket for ticket in range(99) if any((ticket, share) not in taken for share in range(shares)))
    assert ledger.low == whole  # what is there whole takes no memory
    assert all((ticket, share) in ledger for ticket, share in keys)


@given(KEYS, st.lists(st.integers(0, 8), max_size=4))
def test_what_is_below_the_low_water_mark_is_there(keys: list[tuple[int, int]], lows: list[int]) -> None:
    ledger, taken = Ledger(3), set()
    for index, (ticket, share) in enumerate(keys):
        if lows and index % 5 == 4:
            ledger.forget(lows[index % len(lows)])
        assert ledger.add(ticket, share) == ((ticket, share) not in taken and ticket >= max(ledger.low, 0)) or (
            ledger.low > ticket
        )
        taken.add((ticket, share))
    low = ledger.low
    ledger.forget(low - 1)
    assert ledger.low == low
    assert all((ticket, share) in ledger for ticket in range(low) for share in range(3))
    assert all(ticket >= low for ticket, *_ in ledger.record()["later"])


@given(KEYS, KEYS)
def test_a_record_goes_on_as_the_ledger_does(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    ledger = Ledger(3)
    for key in before:
        ledger.add(*key)
    copy = Ledger.of(json.loads(json.dumps(ledger.record())), 3)
    assert [ledger.add(*key) for key in after] == [copy.add(*key) for key in after]
    assert ledger.record() == copy.record()


def test_the_order_of_shares_does_not_show() -> None:
    one, other = Ledger(4), Ledger(4)
    for share in (0, 1, 3):
        one.add(2, share)
    for share in (3, 1, 0):
        other.add(2, share)
    assert one.record() == other.record() == {"low": 0, "later": [[2, 0, 1, 3]]}
