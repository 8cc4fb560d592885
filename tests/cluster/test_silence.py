"""How long a process may be silent: never shorter than the job says, longer where signs of life come late for all."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from verbund.cluster.process import Process, ProcessSpec
from verbund.cluster.silence import Pauses, allowed
from verbund.cluster.watched import Watched, patience
from verbund.job import Cluster

LIMITS = Cluster(heartbeat=0.2, lost_after=3.0)


class Stopped:
    """A cluster that knows of some processes that they are stopped."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def suspended(self, process: Process) -> bool:
        return process.pid in self._pids


def watched(pid: int, pauses: list[float], silent: float, host: int = 0) -> Watched:
    """A process that has given signs of life with these pauses, and none for so many seconds since."""
    connection: Any = None
    now = time.monotonic()
    one = Watched(Process(ProcessSpec("worker", pid, 4, ""), pid, connection, host), now - silent, beaten=True)
    at = now - silent - sum(pauses)
    for pause in [0.0, *pauses]:
        at += pause
        one.pauses.sign(at)
    return one


def may_be_silent(one: Watched, *others: Watched, stopped: tuple[int, ...] = ()) -> float:
    cluster: Any = Stopped(*stopped)
    return patience(one, [one, *others], LIMITS, cluster)


def test_on_a_machine_at_rest_it_is_what_the_job_says() -> None:
    draw = random.Random(1)
    for silent in (0.1, 2.9, 3.1, 50.0):
        calm = [draw.uniform(0.15, 0.6) for _ in range(50)]
        assert may_be_silent(watched(1, calm, silent), watched(2, calm, 0.1)) == 3.0


def test_pauses_of_late_make_it_longer() -> None:
    """Seeded pauses of a starved machine, up to twice the limit: a fixed one would have taken it for lost."""
    draw = random.Random(2)
    pauses = [draw.lognormvariate(0.5, 0.4) for _ in range(200)]
    assert max(pauses) > LIMITS.lost_after
    fixed = adaptive = 0
    for at in range(20, len(pauses)):
        silent = pauses[at]
        fixed += silent > LIMITS.lost_after
        adaptive += silent > may_be_silent(watched(1, pauses[:at], silent))
    assert fixed > 5
    assert adaptive == 0


def test_what_its_neighbours_have_seen_counts_and_no_other_host_does() -> None:
    first = watched(1, [0.2] * 30, 5.0)
    starved = [0.2] * 10 + [2.0, 0.2]
    assert may_be_silent(first, watched(2, starved, 0.1)) == pytest.approx(8.0)
    assert may_be_silent(first, watched(2, starved, 0.1, host=1)) == 3.0


def test_it_has_a_limit_and_is_forgotten() -> None:
    assert may_be_silent(watched(1, [500.0], 5.0)) == 12.0
    assert may_be_silent(watched(1, [500.0, *[0.2] * 20], 5.0)) == 3.0


def test_a_stopped_one_is_not_waited_for() -> None:
    """Two heartbeats, whatever was seen before; one that the kernel calls stopped does not come back by itself."""
    one = watched(1, [2.0] * 20, 0.7)
    assert may_be_silent(one, stopped=(1,)) == pytest.approx(0.4)
    assert may_be_silent(one) == 3.0
    assert may_be_silent(watched(1, [2.0] * 20, 5.0), stopped=(1,)) == pytest.approx(0.4)


def test_the_listener_s_own_absence_is_no_pause() -> None:
    pauses = Pauses()
    pauses.sign(0.0)
    pauses.discount(60.0)
    pauses.sign(60.2)
    assert pauses.longest == pytest.approx(0.2)
    assert allowed(3.0, [pauses]) == 3.0
