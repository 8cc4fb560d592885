"""Rounds as a state machine: whatever comes in whatever order, and killed at any point."""

from __future__ import annotations

import hashlib
import random
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from exchange.federated.playing import NAMES, played
from verbund.errors import InputError
from verbund.exchange.federated import cohort
from verbund.exchange.federated.audit import AuditLog, Head, heads_told, verify, verify_keys
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.round import Event, Phase, Rounds, Terms
from verbund.exchange.federated.round_journal import RoundJournal


def digest(client: str, round_: int) -> str:
    return f"{hash((client, round_)) & 0xFFFF:064x}"


def begun(**terms: int | float) -> Rounds:
    rounds = Rounds(Terms(**{"rounds": 2, "cohort": 3, "quorum": 2, "attempts": 2, **terms}))  # type: ignore[arg-type]
    played(rounds, rounds.select(NAMES, waited_enough=False))
    return rounds


def test_a_round_closes_with_the_cohort_and_late_updates_are_told_so() -> None:
    rounds = begun(over_selection=5 / 3)
    assert len(rounds.members) == 5
    first = sorted(rounds.members)
    for client in first[:3]:
        events, answer = rounds.update(client, 1, digest(client, 1), {})
        played(rounds, events)
        assert answer.counts
    assert rounds.phase is Phase.AGGREGATING
    assert rounds.closed == first[:3]
    assert rounds.update(first[3], 1, digest(first[3], 1), {}) == ([], rounds.update(first[3], 1, "x", {})[1])
    assert "too late" in rounds.update(first[3], 1, "x", {})[1].why
    assert rounds.update(first[0], 1, digest(first[0], 1), {})[1].counts  # once more: the answer was lost
    played(rounds, rounds.stepped({"sha256": "v1"}))
    assert rounds.version == 1
    assert rounds.phase is Phase.SELECTING
    assert rounds.update(first[0], 1, digest(first[0], 1), {})[1].counts  # even a round later
    assert not rounds.update(first[3], 1, digest(first[3], 1), {})[1].counts


def test_quorum_and_deadline() -> None:
    rounds = begun()
    one, two, _ = sorted(rounds.members)
    played(rounds, rounds.update(one, 1, "a", {})[0])
    played(rounds, rounds.expired())
    assert rounds.phase is Phase.SELECTING
    assert rounds.attempt == 2
    assert two in rounds.why
    assert "1 of at least 2" in rounds.why
    played(rounds, rounds.select(NAMES, waited_enough=False))
    one, two, _three = sorted(rounds.members)
    played(rounds, rounds.update(one, 1, "a", {})[0])
    played(rounds, rounds.update(two, 1, "b", {})[0])
    played(rounds, rounds.expired())
    assert rounds.closed == [one, two]


def test_a_failed_client_ends_the_waiting_and_too_many_end_the_training() -> None:
    rounds = begun()
    one, two, three = sorted(rounds.members)
    played(rounds, rounds.update(one, 1, "a", {})[0])
    played(rounds, rounds.report(two, 1, "failed", "DataError"))
    played(rounds, rounds.update(three, 1, "c", {})[0])
    assert rounds.closed == [one, three]  # nobody waits for the deadline
    rounds = begun()
    for attempt in (1, 2):
        for client in sorted(rounds.members)[:2]:
            played(rounds, rounds.report(client, 1, "failed", "DataError"))
        if attempt == 1:
            assert rounds.phase is Phase.SELECTING
            played(rounds, rounds.select(NAMES, waited_enough=False))
    assert rounds.phase is Phase.FAILED
    assert "DataError" in rounds.why


def test_too_few_clients() -> None:
    rounds = Rounds(Terms(rounds=1, cohort=3, quorum=2, attempts=2))
    assert rounds.select(NAMES[:2], waited_enough=False) == []
    played(rounds, rounds.select(NAMES[:1], waited_enough=True))
    assert rounds.attempt == 2
    played(rounds, rounds.select(NAMES[:2], waited_enough=True))
    assert sorted(rounds.members) == NAMES[:2]
    for client in NAMES[:2]:
        played(rounds, rounds.update(client, 1, client, {})[0])
    assert rounds.phase is Phase.AGGREGATING


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_messages_keeps_the_promises(seed: int) -> None:
    """Who replays the events that were written comes to the state that was; no round counts an update twice, or one of
    another round, or fewer than the quorum."""
    source = random.Random(seed)
    rounds = Rounds(Terms(rounds=4, cohort=3, quorum=2, over_selection=1.5, attempts=50, seed=seed))
    written: list[Event] = []
    accepted: dict[tuple[int, str], str] = {}
    for _ in range(600):
        client, round_ = source.choice(NAMES), source.randint(1, 5)
        match source.randrange(7):
            case 0:
                events = rounds.select(source.sample(NAMES, source.randint(0, 6)), source.random() < 0.3)
            case 1 | 2 | 3:
                sent = f"{client}/{round_}/{source.randrange(2)}"
                events, answer = rounds.update(client, round_, sent, {})
                if events:
                    accepted[round_, client] = sent
                    assert answer.counts
            case 4:
                events = rounds.report(client, round_, source.choice(["failed", "lost"]), "")
            case 5:
                events = rounds.expired() if source.random() < 0.2 else rounds.stepped({"sha256": f"v{rounds.round}"})
            case _:
                events = []
                if rounds.closed and source.random() < 0.2:
                    events = rounds.unusable(source.choice(rounds.closed), "NaN")
        before = deepcopy(rounds)
        done = played(rounds, events)
        assert not events or before != rounds
        written += done
        for event in done:
            if event["event"] == "closed":
                assert len(event["clients"]) >= 2
                assert event["clients"] == sorted(set(event["clients"]))
                assert set(event["clients"]) <= set(before.members)
            if event["event"] == "stepped":
                assert event["version"] == before.version + 1
        again = Rounds(rounds.terms)
        for event in written:
            again.apply(event)
        assert again == rounds
        if rounds.phase in (Phase.DONE, Phase.FAILED):
            break
    for event in written:
        if event["event"] == "update":
            assert event["sha256"].startswith(f"{event['client']}/{event['round']}/")


def test_the_journal_goes_on_from_any_event(tmp_path: Path) -> None:
    """A copy of the journal as it was after each event, with half a line behind it, has the state of that moment."""
    terms = Terms(rounds=2, cohort=2, quorum=2)
    states: list[tuple[bytes, Rounds]] = []
    journal = RoundJournal(
        tmp_path / "server", terms, lambda event: states.append((journal.path.read_bytes(), deepcopy(journal.rounds)))
    )
    journal.begin(sha256=journal.versions.put(b"version 0"))
    for round_ in (1, 2):
        journal.record(journal.rounds.select(NAMES[:2], waited_enough=False))
        for client in NAMES[:2]:
            content = f"{client} {round_}".encode()
            sha256 = journal.updates.put(content)
            journal.record(journal.rounds.update(client, round_, sha256, {"weight": 1.0})[0])
        journal.record(journal.rounds.stepped({"sha256": journal.versions.put(f"version {round_}".encode())}))
    assert journal.rounds.phase is Phase.DONE
    assert len(states) == 11
    for n, (content, expected) in enumerate(states):
        folder = tmp_path / f"copy-{n}"
        (folder / "versions").mkdir(parents=True)
        (folder / "updates").mkdir()
        for name in ("version 0", "version 1", "version 2"):
            again = RoundJournal(tmp_path / "contents", terms)
            again.versions.put(name.encode())
            again.close()
        for client in NAMES[:2]:
            for round_ in (1, 2):
                again = RoundJournal(tmp_path / "contents", terms)
                again.updates.put(f"{client} {round_}".encode())
                again.close()
        for kind in ("versions", "updates"):
            (folder / kind).rmdir()
            (folder / kind).symlink_to(tmp_path / "contents" / kind)
        (folder / "audit.jsonl").write_bytes(content + b'{"n":99,"ev')
        reopened = RoundJournal(folder, terms)
        assert reopened.rounds == expected
        assert (folder / "audit.jsonl").read_bytes() == content
        reopened.close()


def test_a_missing_update_is_noticed(tmp_path: Path) -> None:
    terms = Terms(rounds=1, cohort=2, quorum=2)
    journal = RoundJournal(tmp_path, terms)
    journal.begin(sha256=journal.versions.put(b"version 0"))
    journal.record(journal.rounds.select(NAMES[:2], waited_enough=False))
    sha256 = journal.updates.put(b"update")
    journal.record(journal.rounds.update(NAMES[0], 1, sha256, {})[0])
    journal.updates.path(sha256).unlink()
    journal.close()
    with pytest.raises(InputError, match="a file is gone"):
        RoundJournal(tmp_path, terms)


def test_a_rewritten_log_shows(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    heads = [log.append("step", {"value": n}) for n in range(5)]
    log.close()
    assert verify(path, heads) == heads[-1]
    lines = path.read_bytes().splitlines(keepends=True)
    for n in range(5):  # a line is changed, left out, put in twice, put elsewhere
        changed = [line.replace(b'"value":', b'"value":1') if k == n else line for k, line in enumerate(lines)]
        for forged in (changed, lines[:n] + lines[n + 1 :], lines[: n + 1] + lines[n:], [lines[n], *lines]):
            path.write_bytes(b"".join(forged))
            with pytest.raises(InputError):
                verify(path, heads)
    path.unlink()  # the whole is written anew, as a chain that is sound by itself
    again = AuditLog(path)
    for n in range(6):
        again.append("step", {"value": -n})
    again.close()
    verify(path)
    with pytest.raises(InputError, match=r"line 3: .* the log was rewritten"):
        verify(path, [heads[2]])
    path.write_bytes(b"".join(lines[:2]))
    verify(path)
    with pytest.raises(InputError, match="cut off"):
        verify(path, [heads[2]])
    with pytest.raises(InputError):
        verify(path, [Head(1, "0" * 64)])
    notes = AuditLog(tmp_path / "client.jsonl")
    notes.append("round", {"server": heads[1].record()})
    notes.append("other", {})
    notes.close()
    assert heads_told(tmp_path / "client.jsonl", heads[0].hash) == [heads[1]]
    with pytest.raises(InputError, match="written anew"):
        heads_told(tmp_path / "client.jsonl", "0" * 64)


def test_the_draw_is_fair_and_depends_on_little() -> None:
    counts = dict.fromkeys(NAMES, 0)
    for round_ in range(3000):
        for name in cohort.draw(7, round_, 1, NAMES, 2):
            counts[name] += 1
    assert all(abs(count - 1000) < 5 * (3000 * 2 / 9) ** 0.5 for count in counts.values())
    assert cohort.draw(7, 1, 1, NAMES, 2) == cohort.draw(7, 1, 1, reversed(NAMES), 2)
    assert cohort.draw(7, 1, 1, NAMES, 2) != cohort.draw(7, 1, 2, NAMES, 2)
    kept = cohort.draw(7, 1, 1, NAMES, 3)
    assert kept == cohort.draw(7, 1, 1, kept, 3)  # who was not drawn need not have been there
    assert cohort.selected(10, 1.3) == 13
    assert cohort.selected(3, 1.0) == 3
    assert cohort.fits({"region": "north", "size": "big"}, {"region": "north"})
    assert not cohort.fits({}, {"region": "north"})
    assert cohort.fits({"a": "1"}, {"a": ["1", "2"]})


def test_a_file_comes_in_parts_whoever_is_killed_when(tmp_path: Path) -> None:
    whole = np.arange(100, dtype=np.uint8)
    name = hashlib.sha256(whole.tobytes()).hexdigest()
    content = Content(tmp_path)
    assert content.append(name, 100, 0, whole[:40], "north") == 40
    assert content.append(name, 100, 0, whole[:40], "north") == 40  # once more
    assert content.append(name, 100, 90, whole[90:], "north") == 40  # not the next one
    assert Content(tmp_path).received(name, 100, "south") == 0
    part = next(tmp_path.glob(".*north*"))
    part.write_bytes(whole.tobytes())  # all was there, and its receiver was killed
    assert not content.whole(name)
    assert Content(tmp_path).received(name, 100, "north") == 100
    assert content.whole(name)
    other = "0" * 64
    with pytest.raises(InputError, match="not what its name says"):
        content.append(other, 100, 0, whole)
    assert content.received(other, 100) == 0
    part.with_name(f".{other}..part").write_bytes(whole.tobytes())
    assert content.received(other, 100) == 0


def test_a_key_that_one_client_alone_was_shown_is_found(tmp_path: Path) -> None:
    server, client = AuditLog(tmp_path / "server"), AuditLog(tmp_path / "client")
    server.append("invited", {"keys": {"a": "1" * 64, "b": "2" * 64}})
    client.append("peers", {"keys": {"a": "1" * 64, "c": "9" * 64}})
    assert verify_keys(server.path, client.path) == 1
    client.append("peers", {"keys": {"b": "3" * 64}})
    with pytest.raises(InputError, match=r"3333.* as the public key of `b`, and the server's log has 2222"):
        verify_keys(server.path, client.path)


def test_spent_budgets_end_a_training_that_has_begun_and_fail_one_that_has_not() -> None:
    rounds = Rounds(Terms(rounds=5, cohort=3, quorum=2, attempts=2))
    (event,) = rounds.out_of_budget(1)
    assert event["event"] == "gave_up"
    assert "not enough for one round of all but 1 clients" in event["why"]
    rounds.apply({"event": "stepped", "round": 1, "version": 1})
    assert not rounds.last_attempt
    rounds.apply({"event": "abandoned", "round": 2, "attempt": 1, "why": "too few"})
    assert rounds.last_attempt
    assert rounds.out_of_budget(2) == [{"event": "ended", "why": "budget"}]
