"""Rounds that wait for nobody: K updates make a step, each counts once, and a kill at any point loses none."""

from __future__ import annotations

import random

import pytest

from exchange.federated.playing import NAMES, played
from verbund.exchange.federated.buffered import BufferedRounds
from verbund.exchange.federated.round import Event, Phase, Terms


def begun(**terms: int) -> BufferedRounds:
    return BufferedRounds(
        Terms(**{"rounds": 5, "cohort": 4, "buffer": 3, "quorum": 2, "attempts": 2, **terms})  # type: ignore[arg-type]
    )


def send(rounds: BufferedRounds, client: str) -> None:
    round_ = rounds.members[client].round
    events, answer = rounds.update(client, round_, f"{client}/{round_}", {})
    assert answer.counts
    played(rounds, events)


def under_way(rounds: BufferedRounds) -> list[str]:
    return sorted(name for name, member in rounds.members.items() if member.state == "asked")


def test_others_start_in_the_places_of_those_that_are_done() -> None:
    rounds = begun()
    played(rounds, rounds.select(NAMES, False))
    first = under_way(rounds)
    assert len(first) == 4
    send(rounds, first[0])
    played(rounds, rounds.select(NAMES, False))
    assert len(under_way(rounds)) == 4
    assert first[0] not in under_way(rounds), "its update is in the buffer"
    send(rounds, first[1])
    send(rounds, first[2])
    assert rounds.phase is Phase.AGGREGATING
    assert rounds.closed == first[:3]
    late = first[3]
    send(rounds, late)  # while the step is taken: it is the first of the next buffer
    played(rounds, rounds.stepped({"sha256": "v1"}))
    assert (rounds.phase, rounds.version, list(rounds.updates)) == (Phase.TRAINING, 1, [late])
    assert rounds.updates[late]["base_version"] == 0


def test_how_old_an_update_is_does_not_come_from_the_client() -> None:
    rounds = begun()
    played(rounds, rounds.select(NAMES, False))
    one = under_way(rounds)[0]
    events, _ = rounds.update(one, 1, "a", {"base_version": 77})
    assert events[0]["base_version"] == 0
    assert rounds.update(one, 2, "a", {})[0] == [], "it was not asked for that one"


def test_an_update_that_comes_again_counts_once() -> None:
    rounds = begun()
    played(rounds, rounds.select(NAMES, False))
    one, two, three, *_ = under_way(rounds)
    for client in (one, two, three):
        send(rounds, client)
    assert rounds.update(one, 1, f"{one}/1", {}) == ([], rounds.update(one, 1, f"{one}/1", {})[1])
    assert rounds.update(one, 1, f"{one}/1", {})[1].counts
    assert not rounds.update(one, 1, "another", {})[1].counts
    played(rounds, rounds.stepped({"sha256": "v1"}))
    assert rounds.update(one, 1, f"{one}/1", {})[1].counts, "the answer was lost, and a step was taken"


def test_who_is_lost_is_not_waited_for_and_still_counts_when_it_is_back() -> None:
    rounds = begun()
    played(rounds, rounds.select(NAMES[:5], False))
    lost, *others = under_way(rounds)
    played(rounds, rounds.report(lost, 1, "lost", "no connection"))
    played(rounds, rounds.select(NAMES[:5], False))
    assert len(under_way(rounds)) == 4, "another one has started in its place"
    for client in under_way(rounds)[:3]:
        send(rounds, client)
    played(rounds, rounds.stepped({"sha256": "v1"}))
    send(rounds, lost)
    assert rounds.updates[lost]["base_version"] == 0
    assert others


def test_the_deadline_steps_with_a_quorum_and_otherwise_begins_anew() -> None:
    rounds = begun(cohort=3)
    played(rounds, rounds.select(NAMES[:3], False))
    one, two, three = under_way(rounds)
    send(rounds, one)
    played(rounds, rounds.expired())
    assert (rounds.attempt, list(rounds.updates)) == (2, [one]), "what is there stays"
    send(rounds, two)
    played(rounds, rounds.expired())
    assert rounds.closed == sorted([one, two])
    assert rounds.members[three].state == "asked"


def test_all_that_are_there_had_their_turn() -> None:
    rounds = begun()
    played(rounds, rounds.select(NAMES[:2], False))
    for client in under_way(rounds):
        send(rounds, client)
    assert rounds.select(NAMES[:2], False) == [], "others may come"
    played(rounds, rounds.select(NAMES[:2], True))
    assert rounds.phase is Phase.AGGREGATING
    rounds = begun(cohort=3)
    for _ in range(2):
        played(rounds, rounds.select(NAMES[:3], False))
        for client in under_way(rounds):
            played(rounds, rounds.report(client, 1, "failed", "RunFailed"))
        assert rounds.select(NAMES[:2], False) == [], "others may come"
        played(rounds, rounds.select(NAMES[:3], False))
    assert rounds.phase is Phase.FAILED
    assert "RunFailed" in rounds.why


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_in_whatever_order_each_update_is_used_once(seed: int) -> None:
    source = random.Random(seed)
    rounds, log, sent, used = begun(), [], [], []

    def record(events: list[Event]) -> None:
        log.extend(played(rounds, events))

    for _ in range(400):
        if rounds.phase is Phase.DONE:
            break
        if source.random() < 0.1:  # killed: the same events lead to the same state
            again = begun()
            for event in log:
                again.apply(event)
            assert vars(again) == vars(rounds)
            rounds = again
        record(rounds.select(source.sample(NAMES, 5), False))
        waited = [n for n, m in rounds.members.items() if m.state in ("asked", "lost")]
        if waited:
            name = source.choice(waited)
            round_ = rounds.members[name].round
            if source.random() < 0.2:
                record(rounds.report(name, round_, source.choice(["lost", "failed"]), ""))
            else:
                events, answer = rounds.update(name, round_, f"{name}/{round_}", {})
                assert answer.counts
                sent.append((name, round_))
                record(events)
        if rounds.phase is Phase.AGGREGATING and source.random() < 0.5:
            assert len(rounds.closed) == 3
            used += [(name, rounds.updates[name]["round"]) for name in rounds.closed]
            record(rounds.stepped({"sha256": ""}))
    assert rounds.phase is Phase.DONE
    assert len(used) == len(set(used)) == 15
    assert sorted([*used, *((name, event["round"]) for name, event in rounds.updates.items())]) == sorted(sent)
