"""What clients may ask of a server, and what becomes of those that send anything."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeJob, wait_for
from held import Hold, holding, part
from verbund.comm.wire import Identity, Pinned
from verbund.errors import ClusterLost, InputError, RunFailed, VerbundError
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.enrolment import Token
from verbund.exchange.federated.policy import Policy
from verbund.exchange.federated.round import Phase
from verbund.stage.federated import server as serving
from verbund.stage.federated.files import SHARED, TOLD, packed, unpacked
from verbund.stage.federated.home import Home
from verbund.stage.federated.line import Line, enrol
from verbund.stage.federated.offer import Offer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def hold(tmp_path: Path, make_job: MakeJob) -> Iterator[Hold]:
    with holding(tmp_path, make_job) as start:
        yield start


def asked(line: Line) -> dict[str, Any]:
    """The task that the server has for a client."""
    while (task := line.next().fields)["do"] == "wait":
        pass
    return task


def version(line: Line, task: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    shared, _ = unpacked(line.fetch(task["sha256"], task["size"], Content(folder)), SHARED, TOLD)
    return shared


def send(
    line: Line, task: dict[str, Any], folder: Path, change: dict[str, torch.Tensor], **facts: Any
) -> dict[str, Any]:
    """Sends an update, and says what became of it."""
    content = Content(folder)
    digest = content.put(packed(difference=change, aux={}))
    line.send(digest, content)
    told = {"weight": 3.0, "local_steps": 2, "sums": {"loss": [1.0, 2.0]}, "bytes": 10, "version": task["version"]}
    return line.ask("update", {"sha256": digest, "round": task["round"], **told, **facts}).fields


def test_two_clients_and_the_weighted_mean(hold: Hold, tmp_path: Path) -> None:
    held = hold(rounds=1)
    lines = [held.client(name) for name in ("north", "south")]
    for line in lines:
        assert line.join().offer == Offer.of(held.job)
    tasks_ = [asked(line) for line in lines]
    before = version(lines[0], tasks_[0], tmp_path / "north")
    moved = [{name: torch.full_like(values, size) for name, values in before.items()} for size in (1.0, -2.0)]
    answers = [
        send(line, task, tmp_path / "content", change, weight=weight)
        for line, task, change, weight in zip(lines, tasks_, moved, (3.0, 1.0), strict=True)
    ]
    assert [answer["counts"] for answer in answers] == [True, True]
    final = asked(lines[0])
    assert final["do"] == "evaluate"
    after = version(lines[0], final, tmp_path / "north")
    for name, values in before.items():
        torch.testing.assert_close(after[name], values + (3 * 1.0 + 1 * -2.0) / 4)
    for line in lines:
        line.ask("metrics", {"version": 1, "state": None})
    for line in lines:
        assert asked(line)["do"] == "end"
        line.leave()
    assert held.server.journal.rounds.phase is Phase.DONE


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda change: {name: values * float("nan") for name, values in change.items()}, "no finite numbers"),
        (lambda change: {name: values.reshape(-1)[:1] for name, values in change.items()}, "has shape"),
        (lambda change: {"other": torch.ones(2)}, "in its difference"),
        (lambda change: {}, "in its difference"),
    ],
)
def test_what_cannot_be_used_is_refused_and_the_round_goes_on(
    spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], why: str, hold: Hold, tmp_path: Path
) -> None:
    held = hold(rounds=1)
    lines = [held.client(name) for name in ("north", "south")]
    for line in lines:
        line.join()
    tasks_ = [asked(line) for line in lines]
    change = {name: torch.ones_like(v) for name, v in version(lines[0], tasks_[0], tmp_path / "north").items()}
    refused = send(lines[0], tasks_[0], tmp_path / "content", spoil(change))
    assert refused["counts"] is False
    assert why in refused["why"]
    assert send(lines[1], tasks_[1], tmp_path / "content", change)["counts"] is True
    wait_for(lambda: held.events("stepped"), "the step")
    assert held.events("closed")[0]["clients"] == ["south"]
    assert why in held.events("failed")[0]["reason"]


def test_garbage_is_answered_and_changes_nothing(hold: Hold, tmp_path: Path) -> None:
    held = hold(rounds=1)
    line, other = held.client("north"), held.client("south")
    for each in (line, other):
        each.join()
    task = asked(line)
    part = np.zeros(8, np.uint8)
    wrong: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("nothing", {}, {}),
        ("join", {"protocol": 99}, {}),
        ("get", {"sha256": "../../etc/passwd", "offset": 0}, {}),
        ("get", {"sha256": held.server.journal.rule, "offset": 0}, {}),  # the rule's state is not for clients
        ("get", {"sha256": task["sha256"], "offset": -1}, {}),
        ("put", {"sha256": "x", "size": 8, "offset": 0}, {"part": part}),
        ("put", {"sha256": "0" * 64, "size": 1 << 50, "offset": 0}, {"part": part}),
        ("put", {"sha256": "0" * 64, "size": 8, "offset": 0}, {"part": part}),  # not what its name says
        ("put", {"sha256": "1" * 64, "size": 8, "offset": 0}, {"part": np.zeros(8)}),
        ("update", {"round": 1}, {}),
        ("update", {"round": 1, "sha256": "2" * 64, "weight": float(2), "local_steps": 1, "sums": {}}, {}),
        ("report", {"round": 1, "state": "happy", "reason": ""}, {}),
        ("metrics", {"version": 0, "state": {"x": "y"}}, {}),
        ("metrics", {"version": 0, "state": [[[[[[1]]]]]]}, {}),
    ]
    for kind, fields, arrays in wrong:
        with pytest.raises(VerbundError):
            line.ask(kind, fields, **arrays)
    for weight in (0.0, -1.0, True, "3", None):
        with pytest.raises(InputError, match="weight"):
            send(line, task, tmp_path / "content", {"a": torch.ones(1)}, weight=weight)
    gone = {"round": 1, "sha256": "2" * 64, "weight": 1.0, "local_steps": 1, "sums": {}, "bytes": 1, "version": 0}
    assert line.ask("update", gone).kind == "missing"
    late = send(line, {**task, "round": 7}, tmp_path / "content", {"a": torch.ones(1)})
    assert late["counts"] is False
    assert held.server.journal.rounds.phase is Phase.TRAINING
    assert not held.server.journal.rounds.updates
    assert asked(other)["do"] == "train"


def test_a_failure_reaches_its_owner_whole_and_the_server_by_its_kind(hold: Hold) -> None:
    held = hold(rounds=2)
    policy = Policy(tasks=["*"])
    # The first loses a process, which another one replaces; the second fails once for good.
    failures: dict[str, list[VerbundError]] = {
        "north": [ClusterLost("worker 0 was killed")],
        "south": [RunFailed("row 17 is odd", where="patients.parquet")],
    }
    clients = {name: part(held, name, failures[name], policy) for name in failures}
    threads = [threading.Thread(target=c.hold, args=(lambda: False,), daemon=True) for c, _ in clients.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert (clients["north"][0].counted, clients["south"][0].counted) == (2, 1)
    (failed,) = held.events("failed")
    assert (failed["client"], failed["reason"]) == ("south", "RunFailed")
    assert "odd" not in held.server.journal.path.read_text()
    assert "row 17 is odd" in (clients["south"][1].folder / "audit.jsonl").read_text()


def test_a_policy_declines_rounds(hold: Hold) -> None:
    held = hold(rounds=3)
    clients = {
        "north": part(held, "north", [], Policy(tasks=["*"])),
        "south": part(held, "south", [], Policy(tasks=["*"], rounds=1)),
    }
    threads = [threading.Thread(target=c.hold, args=(lambda: False,), daemon=True) for c, _ in clients.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert (clients["north"][0].counted, clients["south"][0].counted) == (3, 1)
    assert {(event["client"], event["reason"]) for event in held.events("failed")} == {("south", "policy, rounds")}


def test_an_update_that_a_step_of_others_has_swept_away_is_asked_for_again(hold: Hold, tmp_path: Path) -> None:
    """Steps are taken while one is looked into, where nobody is waited for."""
    held = hold(rounds=1, clients=3, rule={"name": "fedbuff", "buffer": 1})
    line = held.client("north")
    line.join()
    task = asked(line)
    change = {name: torch.ones_like(v) for name, v in version(line, task, tmp_path / "north").items()}
    content = Content(tmp_path / "content")
    digest = content.put(packed(difference=change, aux={}))
    told = {"weight": 1.0, "local_steps": 1, "sums": {}, "bytes": 1, "version": 0, "round": 1, "sha256": digest}
    look = held.server.desk._screen

    def swept(name: str, facts: Any) -> str | None:
        why = look(name, facts)
        held.server.journal.updates.keep(set())
        return why

    held.server.desk._screen = swept
    line.send(digest, content)
    assert line.ask("update", told).kind == "missing"
    assert not held.events("update")
    held.server.desk._screen = look
    line.send(digest, content)
    assert line.ask("update", told).fields["counts"] is True
    wait_for(lambda: held.events("stepped"), "the step")


def test_a_step_of_others_leaves_what_is_being_sent(hold: Hold) -> None:
    held = hold(rounds=1, clients=3, rule={"name": "fedbuff", "buffer": 1})
    line = held.client("north")
    line.join()
    asked(line)
    raw = np.arange(64, dtype=np.uint8)
    digest = hashlib.sha256(raw.tobytes()).hexdigest()
    assert line.ask("put", {"sha256": digest, "size": 64, "offset": 0}, part=raw[:40]).fields["bytes"] == 40
    with held.server.desk.changed:
        held.server.journal._sweep()
    assert line.ask("put", {"sha256": digest, "size": 64, "offset": 0}).fields["bytes"] == 40


def test_a_token_is_good_once_and_for_its_server(hold: Hold, tmp_path: Path) -> None:
    held = hold()
    token = held.enrolment.invite("west", {"region": "west"}, 60.0)
    with pytest.raises(InputError, match="pinned"):
        enrol(held.address, Token("west", "0" * 64, token.secret), Home(tmp_path / "a"), 5.0)
    enrol(held.address, token, Home(tmp_path / "a"), 20.0)
    enrol(held.address, token, Home(tmp_path / "a"), 20.0)  # the answer was lost
    with pytest.raises(InputError, match="was used"):
        enrol(held.address, token, Home(tmp_path / "b"), 20.0)
    old = held.enrolment.invite("east", {}, -1.0)
    with pytest.raises(InputError, match="too old"):
        enrol(held.address, old, Home(tmp_path / "b"), 20.0)
    stranger = Line(held.address, Pinned(token.fingerprint), 20.0)
    for kind in ("join", "next", "get", "update"):
        with pytest.raises(InputError, match="not enrolled"):
            stranger.ask(kind, {})
    assert held.enrolment.labels("west") == {"region": "west"}
    known = Line(held.address, Pinned(token.fingerprint, Home(tmp_path / "a").identity), 20.0)
    assert known.join().name == "west"
    held.enrolment.remove("west")
    with pytest.raises(InputError):
        Line(held.address, Pinned(token.fingerprint, Home(tmp_path / "a").identity), 20.0).join()


def test_an_address_that_is_none_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no address"):
        Line("nowhere", Pinned("0" * 64), 60.0)


def test_labels_select(hold: Hold) -> None:
    held = hold(round={"labels": {"region": "north"}, "quorum": 1, "gather": 1.0, "lost_after": 5.0})
    for name, region in (("near", "north"), ("far", "south")):
        secret = held.enrolment.invite(name, {"region": region}, 60.0).secret
        identity = Identity.kept(held.folder / name / "identity.pem")
        held.enrolment.enrol(name, secret, identity.certificate)
    near, far = held.client("near"), held.client("far")
    far.join()
    near.join()
    assert asked(near)["do"] == "train"
    assert held.events("round")[0]["cohort"] == ["near"]


def test_the_server_tells_policies_from_failures_and_whom_it_waits_for(
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "_QUIET_SECONDS", 0.0)
    held = hold()
    said: list[str] = []
    held.server._notify = held.server.desk._notify = said.append
    lines = [held.client(name) for name in ("north", "south")]
    for line, refusal in zip(lines, ((["tasks"], ""), ([], "DataError")), strict=True):
        line.join()
        line.refuse(*refusal)
    assert "north takes no part: its policy does not permit it (tasks)" in said
    assert any(text.startswith("south takes no part: its data or machine do not fit") for text in said)
    lines[0].join()
    wait_for(lambda: "round 1 waits: 1 of 2 clients are there (north)" in said, "what is said")
    assert held.events("refused")[1]["keys"] == ["DataError"]


def test_a_round_does_not_wait_for_who_refuses_after_it_has_begun(hold: Hold, tmp_path: Path) -> None:
    """As data are read only after joining, the round may have begun with a client that then cannot take part."""
    held = hold(rounds=1, round={"quorum": 1, "deadline": 3600.0, "lost_after": 3600.0})
    lines = [held.client(name) for name in ("north", "south")]
    for line in lines:
        line.join()
    tasks_ = [asked(line) for line in lines]
    lines[1].refuse([], "DataError")
    change = {name: torch.ones_like(v) for name, v in version(lines[0], tasks_[0], tmp_path / "north").items()}
    assert send(lines[0], tasks_[0], tmp_path / "content", change)["counts"] is True
    wait_for(lambda: held.events("stepped"), "the step")
    assert held.events("closed")[0]["clients"] == ["north"]
    (failed,) = held.events("failed")
    assert (failed["client"], failed["state"]) == ("south", "declined")
    assert "DataError" in failed["reason"]


def test_who_has_spent_its_budget_is_neither_asked_nor_waited_for(hold: Hold, tmp_path: Path) -> None:
    """The round after begins at once with those who are left, and the training ends when too few are."""
    held = hold(rounds=3, round={"quorum": 1, "lost_after": 5.0, "gather": 600.0})
    lines = {name: held.client(name) for name in ("north", "south")}
    for line in lines.values():
        line.join()
    for name, line in lines.items():
        task = asked(line)
        before = version(line, task, tmp_path / name)
        if name == "north":
            line.ask("report", {"round": task["round"], "state": "declined", "reason": "privacy.budget"})
        else:
            send(line, task, tmp_path / "content", before)
    task = asked(lines["south"])
    assert (task["do"], task["round"], task["members"]) == ("train", 2, 1)
    lines["south"].ask("report", {"round": 2, "state": "declined", "reason": "privacy.budget"})
    assert asked(lines["north"])["do"] == "evaluate"
    assert [event["why"] for event in held.events("ended")] == ["budget"]
    for line in lines.values():
        line.close()
