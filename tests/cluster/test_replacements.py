"""Processes that are lost and replaced: by whom, how often, and what becomes of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.staged import Actor, Part, StagedCluster
from verbund.cluster.process import ProcessSpec
from verbund.cluster.replacements import Budget, Replacements
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.errors import ClusterLost, RunFailed
from verbund.interrupts import Interrupts
from verbund.job import Cluster as Limits

WORKERS = [ProcessSpec("worker", rank, 2, "x:y", neighbours=2, residents=3) for rank in range(2)]
SERVER = ProcessSpec("server", 0, 1, "x:y", serves=True)
COORDINATOR = ProcessSpec("coordinator", 0, 1, "x:y", serves=True)

# -- the budget ------------------------------------------------------------------------------------------------------


def test_a_unit_is_replaced_as_a_whole() -> None:
    told: list[tuple[list[ProcessSpec], str]] = []
    budget = Replacements([WORKERS, [SERVER]], Budget(3, 60.0), lambda *what: told.append(what))
    fresh = budget.of(WORKERS[1], "worker 1 was killed")
    assert fresh is not None
    assert [(spec.name, spec.life) for spec in fresh] == [("worker 0", 1), ("worker 1", 1)]
    assert told == [(fresh, "worker 1 was killed")]
    again = budget.of(fresh[0], "once more")
    assert again is not None
    assert [spec.life for spec in again] == [2, 2]


def test_who_is_in_no_unit_is_not_replaced() -> None:
    budget = Replacements([WORKERS], Budget(3, 60.0))
    assert budget.of(SERVER, "gone") is None
    assert not budget.budget.spent


def test_the_budget_is_that_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = Replacements([WORKERS, [SERVER]], Budget(2, 10.0))
    assert budget.of(SERVER, "1")
    now[0] = 105.0
    assert budget.of(WORKERS[0], "2")
    assert budget.of(SERVER, "3") is None
    assert budget.budget.spent
    now[0] = 110.5  # the first is forgotten
    assert budget.of(SERVER, "4")
    assert budget.of(SERVER, "5") is None


def test_no_budget() -> None:
    budget = Replacements([WORKERS], Budget(0, 10.0))
    assert budget.of(WORKERS[0], "gone") is None


# -- the supervisor --------------------------------------------------------------------------------------------------


def serve(actor: Actor) -> None:
    actor.beat("serving")
    if actor.hears("finish"):
        actor.done()


def die(actor: Actor) -> None:
    actor.beat("computing", 7)
    actor.end(-9)


def work(actor: Actor) -> None:
    actor.beat("computing")
    time.sleep(0.3)
    actor.done(life=actor.spec.life)


def wait(actor: Actor) -> None:
    actor.beat("waiting")
    actor.killed()


Run = Callable[..., tuple[list[dict[str, Any]], StagedCluster]]


@pytest.fixture
def run() -> Iterator[Run]:
    clusters = []

    def play(
        parts: dict[tuple[str, int, int], Part | None],
        limit: int = 3,
        interrupts: Interrupts | None = None,
        **more: Any,
    ) -> tuple[list[dict[str, Any]], StagedCluster]:
        cluster = StagedCluster(parts)
        clusters.append(cluster)
        specs = [*WORKERS, SERVER]
        units = [[WORKERS[0]], [WORKERS[1]], [SERVER]]
        limits = Limits(**{"lost_after": 5.0, "stop_grace": 1.0, "step_deadline": 20.0, **more})
        budget = Replacements(more.pop("units", units), Budget(limit, 60.0))
        supervisor = Supervisor(cluster, limits, lambda *_: None, interrupts, budget)
        return supervisor.run(specs), cluster

    yield play
    for cluster in clusters:
        cluster.close()


def starts(cluster: StagedCluster) -> list[tuple[str, int]]:
    return [(spec.name, spec.life) for spec in cluster.started[3:]]


def test_a_lost_worker_and_a_lost_server(run: Run) -> None:
    results, cluster = run(
        {
            ("worker", 0, 0): work,
            ("worker", 1, 0): die,
            ("worker", 1, 1): work,
            ("server", 0, 0): die,
            ("server", 0, 1): serve,
        }
    )
    assert results == [{"life": 0}, {"life": 1}, {}]
    assert sorted(starts(cluster)) == [("server 0", 1), ("worker 1", 1)]


def test_a_replacement_has_the_share_of_its_host_that_the_lost_one_had(run: Run) -> None:
    _, cluster = run({("worker", 0, 0): work, ("worker", 1, 0): die, ("worker", 1, 1): work, ("server", 0, 0): serve})
    (fresh,) = cluster.started[3:]
    assert (fresh.neighbours, fresh.residents) == (2, 3)


def test_one_that_does_not_come_to_life_is_replaced_again(run: Run) -> None:
    parts: dict[tuple[str, int, int], Part | None] = {
        ("worker", 0, 0): work,
        ("worker", 1, 0): die,
        ("worker", 1, 1): None,
        ("worker", 1, 2): work,
        ("server", 0, 0): serve,
    }
    results, cluster = run(parts)
    assert results[1] == {"life": 2}
    assert starts(cluster) == [("worker 1", 1), ("worker 1", 2)]
    parts["worker", 0, 0] = wait
    with pytest.raises(Failed, match=r"before it had started; 1 loss within 60 s had been survived before"):
        run(parts, limit=1)


def test_when_the_budget_is_spent_the_run_fails_with_its_cause(run: Run) -> None:
    parts: dict[tuple[str, int, int], Part | None] = {("worker", 1, life): die for life in range(3)}
    with pytest.raises(Failed) as caught:
        run({**parts, ("worker", 0, 0): wait, ("server", 0, 0): serve}, limit=2)
    error = caught.value.error
    assert isinstance(error, ClusterLost)
    assert "worker 1" in error.what
    assert "was killed by SIGKILL while acting (step 7); 2 losses within 60 s had been survived" in error.what


def test_an_error_is_no_loss(run: Run) -> None:
    def err(actor: Actor) -> None:
        actor.fail(RunFailed("the loss became nan"))

    with pytest.raises(Failed, match="the loss became nan"):
        run({("worker", 0, 0): wait, ("worker", 1, 0): err, ("server", 0, 0): serve})


def test_a_server_that_is_lost_at_the_end_is_not_missed(run: Run) -> None:
    def die_at_the_end(actor: Actor) -> None:
        actor.beat("serving")
        actor.hears("finish")
        actor.end(-9)

    def fail_at_the_end(actor: Actor) -> None:
        actor.beat("serving")
        actor.hears("finish")
        actor.fail(ClusterLost("the coordinator is gone"))

    def hang_at_the_end(actor: Actor) -> None:
        actor.beat("serving")
        actor.hears("finish")
        actor.killed()

    for end in (die_at_the_end, fail_at_the_end, hang_at_the_end):
        results, cluster = run({("worker", 0, 0): work, ("worker", 1, 0): work, ("server", 0, 0): end})
        assert results == [{"life": 0}, {"life": 0}, {}]
        assert starts(cluster) == []


def test_a_server_that_is_silent_at_the_end_is_not_waited_for(run: Run) -> None:
    def silent(actor: Actor) -> None:
        actor.beat("serving")
        actor.killed()

    began = time.monotonic()
    run({("worker", 0, 0): work, ("worker", 1, 0): work, ("server", 0, 0): silent})
    assert time.monotonic() - began < 4


def test_a_run_that_ends_while_a_server_is_replaced(run: Run) -> None:
    def die_late(actor: Actor) -> None:
        actor.beat("serving")
        time.sleep(0.25)
        actor.end(-9)

    def late(actor: Actor) -> None:
        if actor.hears("finish"):
            actor.fail(ClusterLost("the coordinator is gone"))

    results, _ = run(
        {("worker", 0, 0): work, ("worker", 1, 0): work, ("server", 0, 0): die_late, ("server", 0, 1): late}
    )
    assert results == [{"life": 0}, {"life": 0}, {}]


def test_consequences_without_a_cause_end_the_run(run: Run) -> None:
    """Also while a process waits for its turn to be replaced, whose predecessor does not end."""

    def consequence(actor: Actor) -> None:
        actor.fail(ClusterLost("the coordinator is gone"))

    with pytest.raises(Failed, match="the coordinator is gone"):
        run({("worker", 0, 0): consequence, ("worker", 1, 0): wait, ("server", 0, 0): serve})


def test_one_that_is_asked_to_end_is_replaced_and_costs_nothing(run: Run) -> None:
    def asked(actor: Actor) -> None:
        actor.beat("serving")
        actor._connection.send("leaving", {})
        actor.killed()

    for lost in (("worker", 1), ("server", 0)):
        parts: dict[tuple[str, int, int], Part | None] = {("worker", 0, 0): work, ("worker", 1, 0): work}
        parts |= {("server", 0, 0): serve, (*lost, 0): asked, (*lost, 1): serve if lost[0] == "server" else work}
        _, cluster = run(parts, limit=0)
        assert starts(cluster) == [(f"{lost[0]} {lost[1]}", 1)]


def test_one_that_is_silent_is_killed_and_replaced(run: Run) -> None:
    results, cluster = run(
        {("worker", 0, 0): work, ("worker", 1, 0): wait, ("worker", 1, 1): work, ("server", 0, 0): keep_serving},
        lost_after=0.5,
    )
    assert results[1] == {"life": 1}
    assert starts(cluster) == [("worker 1", 1)]


def keep_serving(actor: Actor) -> None:
    while not actor._over.wait(0.1):
        actor.beat("serving")
        if actor._connection.ready(0.0) and actor._connection.receive(1.0).kind == "finish":
            actor.done()


def test_interrupted_while_one_is_replaced(run: Run) -> None:
    def stop(actor: Actor) -> None:
        actor.beat("computing")
        if actor.hears("stop"):
            actor.done(stopped=True)

    interrupts = Interrupts()

    def die_and_interrupt(actor: Actor) -> None:
        interrupts.count = 1
        die(actor)

    results, _ = run(
        {
            ("worker", 0, 0): stop,
            ("worker", 1, 0): die_and_interrupt,
            ("worker", 1, 1): stop,
            ("server", 0, 0): serve,
        },
        interrupts=interrupts,
    )
    assert [result.get("stopped") for result in results] == [True, True, None]
