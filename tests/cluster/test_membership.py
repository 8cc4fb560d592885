"""Who takes part, era by era: pure decisions, and the supervisor that carries them out."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.staged import Actor, Part, StagedCluster
from verbund.cluster import requests
from verbund.cluster.membership import Bounds, Membership
from verbund.cluster.process import ProcessSpec
from verbund.cluster.replacements import Budget
from verbund.cluster.requests import Requests
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.comm.wire import WireError
from verbund.errors import ClusterLost, RunFailed
from verbund.interrupts import Interrupts
from verbund.job import Cluster as Limits


def of(workers: int, losses: int = 9, bounds: Bounds | None = None) -> Membership:
    specs = [ProcessSpec("worker", rank, workers, "x:y", neighbours=workers) for rank in range(workers)]
    membership = Membership(specs, Budget(losses, 60.0), bounds or Bounds(1, 2 * workers))
    meet(membership)
    return membership


def meet(membership: Membership) -> None:
    for rank in membership.era.members:
        membership.met(rank, membership.era.number)


def members(membership: Membership) -> tuple[int, ...] | None:
    """Those of the next era, if members change now."""
    change = membership.change()
    return None if change is None else change[0].members


def test_who_comes_takes_the_place_of_one_that_goes() -> None:
    """Where each holds something of its own: the others wait, and keep their places."""
    membership = of(4, bounds=Bounds(4, 4, placed=True))
    assert membership.lost(0, "killed")
    assert membership.lost(2, "killed")
    assert members(membership) is None
    first, second = membership.due()
    membership.ready(second.rank)
    assert members(membership) is None
    membership.ready(first.rank)
    assert members(membership) in ((0, 1, 2, 3), (2, 1, 0, 3))
    meet(membership)
    assert membership.leave(1)  # asked to end: it stays until another has come
    (fresh,) = membership.due()
    assert fresh.rank == 4
    membership.ready(4)
    before = membership.era.members
    assert members(membership) == tuple(4 if rank == 1 else rank for rank in before)


def test_survivors_go_on_and_another_joins_them() -> None:
    membership = of(3)
    assert membership.change() is None
    assert membership.due() == []
    assert membership.lost(1, "killed")
    assert membership.change() == (membership.era, set())
    assert membership.era.members == (0, 2)
    assert membership.due() == []  # they have not met yet
    meet(membership)
    (fresh,) = membership.due()
    assert (fresh.rank, fresh.life, fresh.settings["joins"]) == (1, 1, True)
    assert membership.due() == []
    assert membership.change() is None
    membership.ready(1)
    assert members(membership) == (0, 2, 1)
    assert not membership.holds(1)
    meet(membership)
    assert membership.holds(1)
    assert membership.complete


def test_with_fewer_than_the_least_they_wait_for_those_that_come() -> None:
    membership = of(3, bounds=Bounds(2, 3))
    assert membership.lost(0, "killed")
    assert membership.lost(1, "killed")
    assert membership.change() is None
    assert [spec.rank for spec in membership.due()] == [0, 1]
    membership.ready(1)
    assert members(membership) == (2, 1)


def test_nobody_is_left_who_has_anything() -> None:
    membership = of(2)
    membership.lost(0, "killed")
    members(membership)
    meet(membership)
    membership.due()
    membership.ready(0)
    assert members(membership) == (1, 0)
    assert not membership.lost(1, "killed")  # 0 has not got it yet


def test_a_spent_budget_ends_it_unless_fewer_are_enough() -> None:
    assert not of(4, losses=0).lost(3, "killed")
    membership = of(4, losses=1, bounds=Bounds(3, 4, fewer=True))
    assert membership.lost(3, "killed")
    assert membership.lost(2, "killed")
    assert membership.wanted == 3
    assert not membership.lost(1, "killed")


def test_who_is_preempted_leaves_at_once_where_enough_stay_and_costs_nothing() -> None:
    membership = of(3, losses=0)
    assert membership.leave(0)
    change = membership.change()
    assert change is not None
    assert (change[0].members, change[1]) == ((1, 2), {0})
    assert membership.lost(0, "killed on its way out")
    meet(membership)
    assert [(spec.rank, spec.life) for spec in membership.due()] == [(0, 1)]


def test_who_is_preempted_stays_until_another_has_come_where_it_is_needed() -> None:
    membership = of(1)
    assert membership.leave(0)
    assert membership.change() is None
    (fresh,) = membership.due()
    membership.ready(fresh.rank)
    # It is needed still: nobody else has what has been trained.
    assert members(membership) == (0, fresh.rank)
    meet(membership)
    assert members(membership) == (fresh.rank,)
    meet(membership)
    assert membership.complete


def test_scaling() -> None:
    membership = of(2)
    membership.scale(4)
    fresh = membership.due()
    assert [spec.rank for spec in fresh] == [2, 3]
    membership.ready(2)
    assert members(membership) == (0, 1, 2)
    meet(membership)
    assert not membership.complete
    membership.scale(3)
    assert membership.dismissed() == [3]
    assert membership.complete
    membership.scale(1)
    assert members(membership) == (0,)
    meet(membership)
    assert membership.complete


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events_keeps_what_holds(seed: int) -> None:
    """Random losses, departures, arrivals and wishes: an era has only living members, one of whom has everything."""
    choose = random.Random(seed)
    membership = of(4, losses=1000, bounds=Bounds(choose.choice([1, 2]), 8))
    started: set[int] = set()
    number = 0
    for _ in range(80):
        event = choose.randrange(6)
        living = list(membership._living)
        if event == 0 and not membership.lost(choose.choice(living or [0]), "killed"):
            assert not any(membership.holds(rank) for rank in membership._living)
            return
        if event == 1 and living:
            membership.leave(choose.choice(living))
        if event == 2:
            membership.scale(choose.randrange(1, 9))
        if event == 3:
            started |= {spec.rank for spec in membership.due()}
        if event == 4 and started:
            membership.ready(choose.choice(sorted(started)))
        if event == 5:
            meet(membership)
        if (change := membership.change()) is not None:
            era, gone = change
            assert era.number == number + 1
            number = era.number
            assert len(set(era.members)) == len(era.members) >= membership.bounds.least
            assert not gone & set(era.members)
            assert any(membership.holds(rank) for rank in era.members)
    for _ in range(40):  # and then it comes to what is wanted
        for spec in membership.due():
            membership.ready(spec.rank)
        for rank in list(membership._joining):
            membership.ready(rank)
        membership.change()
        meet(membership)
    assert membership.complete
    assert len(membership.era.members) == membership.wanted


# -- the supervisor --------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[list[dict[str, Any]], StagedCluster]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    clusters = []

    def play(
        parts: dict[tuple[str, int, int], Part | None],
        workers: int = 2,
        losses: int = 3,
        bounds: Bounds | None = None,
        asks: Callable[[Path], None] | None = None,
        interrupts: Interrupts | None = None,
        deadline: float = 20.0,
        slow: dict[str, threading.Event] | None = None,
    ) -> tuple[list[dict[str, Any]], StagedCluster]:
        cluster = StagedCluster(parts)
        cluster.slow |= slow or {}
        clusters.append(cluster)
        specs = [ProcessSpec("worker", rank, workers, "x:y", neighbours=workers) for rank in range(workers)]
        limits = Limits(lost_after=5.0, stop_grace=1.0, step_deadline=deadline)
        membership = Membership(specs, Budget(losses, 60.0), bounds or Bounds(1, 2 * workers))
        asked = Requests(tmp_path / "requests")
        supervisor = Supervisor(cluster, limits, lambda *_: None, interrupts, None, membership, asked)
        asking = threading.Thread(target=asks or (lambda _: None), args=(tmp_path / "requests",))
        asking.start()
        try:
            return supervisor.run(specs), cluster
        finally:
            asked.close()
            asking.join()

    yield play
    for cluster in clusters:
        cluster.close()


class Member:
    """Plays a worker that trains until `until` holds of what it has been told."""

    def __init__(self, until: Callable[[int, tuple[int, ...]], bool], dies_in: int | None = None) -> None:
        self._until, self._dies_in = until, dies_in

    def __call__(self, actor: Actor) -> None:
        with contextlib.suppress(WireError):  # it is killed, perhaps
            self._play(actor)

    def _play(self, actor: Actor) -> None:
        rank = actor.spec.rank
        if actor.spec.settings.get("joins"):
            actor.beat("joining")
            actor._connection.send("ready", {})
            era, ranks = -1, ()
        else:
            era, ranks = 0, tuple(range(actor.spec.world))
            actor._connection.send("met", {"era": 0})
        while not actor._over.is_set():
            actor.beat("computing", 7)
            if rank in ranks and self._dies_in == era:
                return actor.end(-9)
            if rank in ranks and self._until(era, ranks):
                return actor.done(era=era)
            if actor._connection.ready(0.02):
                message = actor._connection.receive(1.0)
                if message.kind == "regroup":
                    former, era, ranks = ranks, int(message.fields["era"]), tuple(message.fields["members"])
                    if rank in ranks:
                        actor._connection.send("met", {"era": era})
                    elif former:
                        return actor.done(stopped_by="left")
                if message.kind == "stop":
                    return actor.done(stopped=True)
                if message.kind == "end":
                    return actor.end(1)
        return None


def full(workers: int, eras: int) -> Callable[[int, tuple[int, ...]], bool]:
    return lambda era, ranks: era >= eras and len(ranks) == workers


def test_one_is_lost_and_replaced(run: Run) -> None:
    results, cluster = run(
        {
            ("worker", 0, 0): Member(full(2, 2)),
            ("worker", 1, 0): Member(full(9, 9), dies_in=0),
            ("worker", 1, 1): Member(full(2, 2)),
        }
    )
    assert results == [{"era": 2}]
    assert [(spec.rank, spec.life) for spec in cluster.started] == [(0, 0), (1, 0), (1, 1)]
    assert cluster.started[-1].neighbours == 2


def test_one_that_cannot_start_is_a_loss_and_not_the_end(run: Run) -> None:
    def fails(actor: Actor) -> None:
        actor.beat("joining")
        actor.fail(RunFailed("no memory"))

    parts: dict[tuple[str, int, int], Part | None] = {
        ("worker", 0, 0): Member(full(2, 2)),
        ("worker", 1, 0): Member(full(9, 9), dies_in=0),
        ("worker", 1, 1): fails,
        ("worker", 1, 2): None,
        ("worker", 1, 3): Member(full(2, 2)),
    }
    results, _ = run(parts)
    assert results == [{"era": 2}]
    with pytest.raises(Failed, match=r"worker 1 failed: no memory; 1 loss within 60 s had been survived before"):
        run(parts, losses=1)


def test_one_that_does_not_come_to_join_is_replaced(run: Run) -> None:
    def hangs(actor: Actor) -> None:
        actor.beat("joining")
        actor.killed()

    parts: dict[tuple[str, int, int], Part | None] = {
        ("worker", 0, 0): Member(full(2, 2)),
        ("worker", 1, 0): Member(full(9, 9), dies_in=0),
        ("worker", 1, 1): hangs,
        ("worker", 1, 2): Member(full(2, 2)),
    }
    results, _ = run(parts, deadline=0.5)
    assert results == [{"era": 2}]


def test_a_start_that_hangs_holds_nobody_up(run: Run) -> None:
    """A host that does not answer: the others are heard, lose a member and get another one meanwhile."""

    def asks(folder: Path) -> None:
        with contextlib.suppress(WireError):
            requests.ask(folder, 3, 10.0)

    hangs = threading.Event()

    def dies(actor: Actor) -> None:
        actor._connection.send("met", {"era": 0})
        hangs.wait(10.0)
        actor.end(-9)

    def lingers(actor: Actor) -> None:
        actor.killed()

    parts: dict[tuple[str, int, int], Part | None] = {
        ("worker", 0, 0): Member(full(2, 2)),
        ("worker", 1, 0): dies,
        ("worker", 1, 1): Member(full(2, 2)),
        ("worker", 2, 0): lingers,
    }
    results, cluster = run(parts, asks=asks, slow={"worker 2": hangs})
    assert hangs.is_set()
    assert results == [{"era": 2}]
    assert [(spec.rank, spec.life) for spec in cluster.started] == [(0, 0), (1, 0), (2, 0), (1, 1)]


def test_all_are_lost(run: Run) -> None:
    parts: dict[tuple[str, int, int], Part | None] = {
        ("worker", rank, 0): Member(full(9, 9), dies_in=0) for rank in range(2)
    }
    parts["worker", 0, 1] = parts["worker", 1, 1] = Member(full(2, 1))
    with pytest.raises(Failed, match="was killed by SIGKILL") as caught:
        run(parts)
    assert isinstance(caught.value.error, ClusterLost)


def test_a_preempted_one_leaves_and_is_replaced_without_a_budget(run: Run) -> None:
    leaves = Member(full(9, 9))

    def asked(actor: Actor) -> None:
        actor._connection.send("leaving", {})
        leaves(actor)

    results, cluster = run(
        {("worker", 0, 0): Member(full(2, 2)), ("worker", 1, 0): asked, ("worker", 1, 1): Member(full(2, 2))}, losses=0
    )
    assert results == [{"era": 2}]
    assert len(cluster.started) == 3


def test_requests(run: Run) -> None:
    answers: list[dict[str, Any]] = []

    def ask(folder: Path) -> None:
        for workers in (4, 9, 3):
            answers.append(requests.ask(folder, workers, 10.0))

    parts: dict[tuple[str, int, int], Part | None] = {
        ("worker", rank, 0): Member(lambda _, ranks: len(ranks) == 3 and len(answers) == 3) for rank in range(4)
    }
    run(parts, asks=ask)
    grown, refused, shrunk = answers
    assert (grown["former"], grown["workers"]) == (2, 4)
    assert refused == {"refused": "it takes 1 to 4 workers"}
    assert (shrunk["former"], shrunk["workers"]) == (4, 3)


def test_a_request_that_comes_to_nothing_is_answered(run: Run) -> None:
    answers: list[Any] = []
    told = threading.Event()

    def ask(folder: Path) -> None:
        threading.Timer(0.5, told.set).start()
        answers.append(requests.ask(folder, 3, 10.0))

    def late(actor: Actor) -> None:
        actor.beat("joining")
        actor.killed()

    run(
        {
            ("worker", 0, 0): Member(lambda *_: told.is_set()),
            ("worker", 1, 0): Member(lambda *_: told.is_set()),
            ("worker", 2, 0): late,
        },
        asks=ask,
    )
    assert answers == [{"refused": "the training has come to its end meanwhile"}]


def test_garbage_and_silence_hold_nobody_up(run: Run, tmp_path: Path) -> None:
    done = threading.Event()

    def ask(folder: Path) -> None:
        import socket

        silent, garbage, wrong = (socket.socket(socket.AF_UNIX) for _ in range(3))
        for one in (silent, garbage, wrong):
            one.connect(str(folder / "socket"))
        garbage.send(b"GET / HTTP/1.1\r\n\r\n" * 100)
        wrong.close()
        assert requests.ask(folder, 1, 10.0)["workers"] == 1
        done.set()
        silent.close()
        garbage.close()

    began = time.monotonic()
    run(
        {
            ("worker", 0, 0): Member(lambda _, ranks: len(ranks) == 1 and done.is_set()),
            ("worker", 1, 0): Member(full(9, 9)),
        },
        asks=ask,
    )
    assert time.monotonic() - began < 5.0
    with pytest.raises(WireError):
        requests.ask(tmp_path / "requests", 1, 1.0)
