"""A client that sends wrong things is named, and the others' round goes on where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exchange.federated.secure.rounds import Federation, Play
from verbund.comm.wire.bits import Bits
from verbund.errors import RunFailed
from verbund.exchange.federated.secure import ClientCheated, Sent, TooFewClients


def cheats(kind: str, change: Callable[[Sent], Sent], who: str = "c0001") -> Callable[[str, Sent], Sent]:
    return lambda name, sent: change(sent) if name == who and sent.kind == kind else sent


def with_array(name: str, change: Callable[[Any], Any]) -> Callable[[Sent], Sent]:
    def changed(sent: Sent) -> Sent:
        found = sent.arrays[name]
        new = change(found if isinstance(found, Bits) else np.array(found))
        return Sent(sent.kind, sent.fields, {**sent.arrays, name: new})

    return changed


def flipped(array: Any) -> Any:
    array.reshape(-1)[0] ^= 1
    return array


LEFT_OUT = [
    ("advertise", with_array("keys", flipped), "has keys that `c0001`, as it was enrolled, has not signed"),
    ("advertise", with_array("signature", lambda a: a[:-1]), r"`signature` of uint8 \[63\] for uint8 \[64\]"),
    ("advertise", lambda s: Sent(s.kind, {**s.fields, "weight": 10**6}, s.arrays), "has the weight 1000000; 1 is the"),
    ("advertise", lambda s: Sent(s.kind, {**s.fields, "weight": float("nan")}, s.arrays), "has the weight nan"),
    ("advertise", lambda s: Sent(s.kind, {**s.fields, "weight": -1}, s.arrays), "has the weight -1"),
    ("shares", with_array("sealed", lambda a: a[:, :-1]), "`sealed`"),
    ("shares", with_array("clients", lambda a: a[:-1]), "shares for others than"),
    (
        "masked",
        with_array("vector", lambda b: Bits(b.values[:-1], b.width)),
        r"`vector` of uint32 \[49\] for uint32 \[50\]",
    ),
    ("masked", with_array("vector", lambda b: Bits(b.values * 0 + (1 << 24), 32)), "words of more than 19 bits"),
    ("masked", lambda s: Sent("reveal", s.fields, s.arrays), "is `reveal` where `masked` is due"),
]


@pytest.mark.parametrize(("kind", "change", "why"), LEFT_OUT)
def test_a_wrong_message_costs_its_sender_the_round(kind: str, change: Callable[[Sent], Sent], why: str) -> None:
    import re

    federation = Federation(5)
    play = Play(federation, federation.vectors(), up=cheats(kind, change))
    result = play.run()
    assert result.survivors == ("c0000", "c0002", "c0003", "c0004")
    assert list(result.cheated) == ["c0001"]
    assert re.search(why, result.cheated["c0001"]), result.cheated
    np.testing.assert_array_equal(result.integers, play.expected(result.survivors))


def test_nobody_speaks_for_another() -> None:
    """c0001 sends what c0002 has signed, under its own name; and comes with a key that nobody has enrolled."""
    federation = Federation(5)
    kept: dict[str, Sent] = {}

    def up(name: str, sent: Sent) -> Sent:
        kept.setdefault(name, sent)
        return kept["c0000"] if name == "c0001" and sent.kind == "advertise" else sent

    assert "has not signed" in Play(federation, federation.vectors(), up=up).run().cheated["c0001"]
    play = Play(federation, federation.vectors())
    with pytest.raises(ClientCheated, match="client mallory: it takes no part in this round"):
        play.server.receive("mallory", kept["c0000"].message())


def test_a_message_that_comes_twice_counts_once() -> None:
    federation = Federation(4)
    play = Play(federation, federation.vectors())
    for _ in range(2):
        play.step()
    answer = play.clients["c0000"].receive(play.due["c0000"].message()).message()
    play.server.receive("c0000", answer)
    with pytest.raises(ClientCheated, match="a second time"):
        play.server.receive("c0000", answer)
    del play.due["c0000"]
    result = play.run()
    np.testing.assert_array_equal(result.integers, play.expected(federation.names))


@pytest.mark.parametrize("what", ["seeds", "keys"])
def test_a_wrong_share_is_known_for_one_and_not_needed(what: str) -> None:
    federation = Federation(7, settings={"threshold": 0.7})
    up = cheats("reveal", with_array(what, flipped))
    play = Play(federation, federation.vectors(), lost={"masked": ["c0006"]}, up=up)
    result = play.run()
    assert "another share of" in result.cheated["c0001"]
    np.testing.assert_array_equal(result.integers, play.expected(result.survivors))
    assert "c0001" in result.survivors, "its vector was in order"


def test_shares_that_cannot_be_opened_are_told_of() -> None:
    federation = Federation(7)
    up = cheats("shares", with_array("sealed", flipped))
    play = Play(federation, federation.vectors(), up=up)
    result = play.run()
    assert result.cheated == {"c0001": "client c0000 cannot open the shares that it was sent, or they are wrong"}
    assert play.clients["c0000"].suspected == ["c0001"]
    np.testing.assert_array_equal(result.integers, play.expected(federation.names))


def test_shares_that_none_can_open_end_the_round_with_the_name() -> None:
    federation = Federation(5)
    up = cheats("shares", with_array("sealed", lambda a: a ^ 1))
    with pytest.raises(
        TooFewClients, match="1 of 4 shares of c0001's secrets are there; c0001: client c0000 cannot open"
    ):
        Play(federation, federation.vectors(), up=up).run()


def test_shares_of_another_seed_end_the_round_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(5)
    up = cheats("advertise", with_array("commitment", flipped))
    with pytest.raises(ClientCheated, match="client c0001: its shares give another seed than it has committed to"):
        Play(federation, federation.vectors(), up=up).run()


def test_shares_of_another_key_end_the_round_with_the_name() -> None:
    federation = Federation(6)
    play = Play(federation, federation.vectors(), lost={"masked": ["c0001"]})
    play.step()
    private = vars(play.clients["c0001"])["_private"]
    private["mask"][0] ^= 64  # what it shares is not what it has advertised
    with pytest.raises(ClientCheated, match="client c0001: its shares give another key than it has advertised"):
        play.run()


def test_a_sum_beyond_what_values_can_come_to_is_no_result() -> None:
    """Who is in range nobody can see under a mask; that the sum is not is seen."""
    federation = Federation(5)
    vectors = federation.vectors()
    most = (1 << (federation.round().bits - 1)) - 1
    vectors["c0001"] = np.full(50, most) - sum(vectors[n] for n in federation.names if n != "c0001")
    with pytest.raises(RunFailed, match="the sum is beyond what values in range can add up to"):
        Play(federation, vectors).run()
