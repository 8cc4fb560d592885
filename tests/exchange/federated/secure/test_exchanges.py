"""The five exchanges as events: made anew from them at any point, and whatever comes in whatever order."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from exchange.federated.secure.rounds import Federation
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.round import Event, Phase, Rounds, Terms
from verbund.exchange.federated.secure import Client, Sent, whole
from verbund.exchange.federated.secure.exchanges import Exchanges, terms_of
from verbund.exchange.federated.secure.fixed_point import as_words
from verbund.exchange.federated.secure.messages import Malformed, opened
from verbund.job import Secure

SETTINGS = Secure()


def invited(folder: Path, federation: Federation) -> tuple[Exchanges, list[Event], dict[str, str]]:
    exchanges = Exchanges(SETTINGS, folder)
    keys = {name: identity.public.hex() for name, identity in federation.identities.items()}
    log = exchanges.invitation("run", keys, federation.length, 0)
    for event in log:
        exchanges.apply(event)
    return exchanges, log, keys


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_point_it_comes_to_the_same_sum(seed: int, tmp_path: Path) -> None:
    source, federation, content = random.Random(seed), Federation(5), Content(tmp_path)
    exchanges, log, keys = invited(tmp_path, federation)
    terms = terms_of("run", keys, SETTINGS, federation.length, 0)
    vectors = federation.vectors(seed)
    clients = {
        name: Client(name, federation.identities[name], federation.roster, terms, whole(as_words(v, np.dtype("u4"))))
        for name, v in vectors.items()
    }
    lost = {source.choice(federation.names): source.choice(["advertise", "masked", "reveal"])}
    gone: set[str] = set()

    def record(events: list[Event]) -> None:
        nonlocal exchanges
        for event in events:
            log.append(event)
            exchanges.apply(event)
        if source.random() < 0.4:
            exchanges = Exchanges(SETTINGS, tmp_path)
            for event in log:
                exchanges.apply(event)

    while exchanges.step is not None:
        step = exchanges.step
        for name in source.sample(federation.names, 5):
            if lost.get(name) == step:
                gone.add(name)
            sent = exchanges.due(name)
            if name in gone or sent is None:
                continue
            digest = content.put(clients[name].receive(opened(sent.packed())).packed())
            events, why = exchanges.answer(name, exchanges.number, step, digest)
            assert not why
            record(events)
            assert exchanges.answer(name, exchanges.number, step, digest) == ([], ""), "once more changes nothing"
            assert (
                exchanges.answer(name, exchanges.number, step, "0" * 64)[1]
                == "another message of the client came first"
            )
            assert exchanges.due(name) is None
        assert exchanges.missing == frozenset(gone & exchanges.server.expected)
        assert exchanges.shortfall(exchanges.missing) is None
        if step == "reveal":
            break
        record(exchanges.advance())
    exchanges.closing = True
    found = exchanges.finish()
    survivors = [name for name in federation.names if lost.get(name) not in ("advertise", "masked")]
    assert found.survivors == tuple(survivors)
    np.testing.assert_array_equal(found.integers, sum(vectors[name] for name in survivors))


def test_too_few_are_known_before_the_step_is_over(tmp_path: Path) -> None:
    federation = Federation(5)
    exchanges, _, _ = invited(tmp_path, federation)
    assert exchanges.shortfall(frozenset(federation.names[:1])) is None
    why = exchanges.shortfall(frozenset(federation.names[:2]))
    assert why is not None
    assert "3 of 5 clients are left in secure aggregation (`advertise`), 4 are needed" in why


def test_garbage_costs_its_sender_the_round(tmp_path: Path) -> None:
    federation, content = Federation(5), Content(tmp_path)
    exchanges, _, _ = invited(tmp_path, federation)
    for event in exchanges.answer("c0001", 1, "advertise", content.put(b"\0" * 9))[0]:
        exchanges.apply(event)
    assert "its message cannot be read" in exchanges.cheated["c0001"]
    assert exchanges.server.expected == frozenset(federation.names) - {"c0001"}


@pytest.mark.parametrize("seed", range(3))
def test_packed_messages_are_opened_or_refused(seed: int) -> None:
    source = random.Random(seed)
    sent = Sent("shares", {"a": 1}, {"x": np.arange(40, dtype=np.uint32).reshape(8, 5), "y": np.zeros(0, np.uint8)})
    packed = sent.packed()
    message = opened(packed)
    assert (message.kind, message.fields) == ("shares", {"a": 1})
    np.testing.assert_array_equal(message.arrays["x"], sent.arrays["x"])  # type: ignore[arg-type]
    for _ in range(300):
        spoilt = bytearray(packed[: source.randint(0, len(packed))])
        for _ in range(source.randint(0, 3)):
            if spoilt:
                spoilt[source.randrange(len(spoilt))] = source.randrange(256)
        try:
            opened(bytes(spoilt))
        except Malformed:
            continue


def test_rounds_with_a_phase_of_exchanges() -> None:
    rounds = Rounds(Terms(rounds=2, cohort=3, quorum=3, attempts=2, secure=True))

    def played(events: list[Event]) -> None:
        for event in events:
            rounds.apply(event)
            played(rounds.settle())

    names = ["a", "b", "c"]
    token = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    played(rounds.select(names, False))
    for name in names:
        events, answer = rounds.update(name, 1, token[name], {})
        played(events)
        assert (answer.counts, answer.final) == (True, False)
    assert rounds.phase is Phase.SECURING
    assert not rounds.update("a", 1, token["a"], {})[1].final, "not yet"
    played(rounds.report("b", 1, "lost", "no connection"))
    played(rounds.unsummed("too few", revealed=False))
    assert (rounds.phase, rounds.attempt) == (Phase.SELECTING, 2)
    played(rounds.select(names, False))
    for name in names:
        played(rounds.update(name, 1, token[name], {})[0])
    played(rounds.unsummed("too few", revealed=True))
    assert (rounds.phase, rounds.version, rounds.attempt) == (Phase.SELECTING, 1, 1)
    answer = rounds.update("a", 1, token["a"], {})[1]
    assert (answer.counts, answer.final) == (False, True)
    played(rounds.select(names, False))
    for name in names:
        played(rounds.update(name, 2, token[name], {})[0])
    played(rounds.summed(["a", "c"], {"sha256": "s"}))
    assert rounds.phase is Phase.AGGREGATING
    played(rounds.stepped({"sha256": "v2"}))
    assert rounds.phase is Phase.DONE
    assert rounds.update("a", 2, token["a"], {})[1].counts
    assert not rounds.update("b", 2, token["b"], {})[1].counts


def test_rounds_whose_sums_are_lost_again_and_again_fail() -> None:
    rounds = Rounds(Terms(rounds=9, cohort=1, quorum=1, attempts=2, secure=True))
    for number in (1, 2):
        for event in rounds.select(["a"], False):
            rounds.apply(event)
        for event in rounds.update("a", number, "t", {})[0]:
            rounds.apply(event)
        for event in rounds.settle():
            rounds.apply(event)
        for event in rounds.unsummed("lost", True):
            rounds.apply(event)
    assert rounds.phase is Phase.FAILED
