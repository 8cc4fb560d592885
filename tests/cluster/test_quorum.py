"""Which islands take part from border to border, without any process: what is asked, and when it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from verbund.cluster.membership import Era
from verbund.cluster.quorum import AGAIN, GATHER, JOIN, LAST, ON, OUT, Asked, Quorum
from verbund.errors import ClusterLost


@dataclass
class Run:
    """Islands, and what each worker was told last."""

    quorum: Quorum
    size: int = 1
    told: dict[int, tuple[str, Era, list[int]]] = field(default_factory=dict)
    broken: list[tuple[int, ...]] = field(default_factory=list)

    def ask(self, what: str, *ranks: int, step: int = 4, **more: bool) -> None:
        for rank in ranks:

            def reply(answer: str, era: Era, holders: list[int], rank: int = rank) -> None:
                self.told[rank] = answer, era, holders

            self.quorum.ask(rank, Asked(what, step, reply, **more))

    def turn(self, now: float, stalled: Callable[[int], bool] = lambda _: False) -> dict[int, str]:
        """What was answered in this turn."""
        self.told.clear()
        self.quorum.turn(now, stalled)
        return {rank: answer for rank, (answer, _, _) in self.told.items()}


def _run(islands: int = 3, size: int = 1, least: int = 2, met: bool = True) -> Run:
    run = Run(Quorum(islands, size, least, grace=5.0, deadline=60.0), size)
    run.quorum.announce = lambda era, cut: run.broken.append(era.members) if cut else None
    for rank in range(islands * size if met else 0):
        run.quorum.met(rank)
    return run


def _gathers(run: Run, *ranks: int, **more: bool) -> None:
    run.ask(GATHER, *ranks, **{"joins": True, "combines": True, **more})


def test_all_are_there() -> None:
    run = _run()
    _gathers(run, 0, 1)
    assert run.turn(0.0) == {}
    _gathers(run, 2)
    assert run.turn(1.0) == {0: ON, 1: ON, 2: ON}
    run.ask("exchange", 0, 1, 2)
    assert set(run.turn(2.0).values()) == {ON}
    assert run.quorum.era == Era(0, (0, 1, 2))


def test_a_late_one_is_left_out_and_comes_back() -> None:
    run = _run()
    _gathers(run, 0, 2)
    assert run.turn(10.0) == {}
    assert run.turn(14.9) == {}, "the grace is 5 s from when the first was there"
    assert run.turn(15.0) == {0: ON, 2: ON}
    assert run.broken == [(0, 2)]
    assert run.told[0][1].members == (0, 2)
    formed = run.told[0][1].number
    run.ask("exchange", 0, 2)
    assert run.turn(16.0) == {0: ON, 2: ON}
    run.told.clear()
    _gathers(run, 1)  # it comes to its border in the end
    assert run.told[1][0] == OUT
    run.ask(JOIN, 1, step=0)
    run.ask("validation", 0, 2, step=5)
    assert run.turn(17.0) == {0: ON, 2: ON}, "nobody comes back but before an exchange"
    _gathers(run, 0, 2)
    assert run.turn(18.0) == {0: ON, 1: ON, 2: ON}
    answer, era, holders = run.told[1]
    assert (answer, era.members, holders) == (ON, (0, 1, 2), [0, 2])
    assert era.number > formed


def test_who_is_lost_is_not_waited_for() -> None:
    run = _run()
    _gathers(run, 0, 1)
    assert run.turn(0.0) == {}
    assert run.quorum.lost(2)
    assert run.turn(0.1) == {0: ON, 1: ON}
    assert run.told[0][1].members == (0, 1)


def test_one_that_is_asked_to_end_goes_after_an_exchange() -> None:
    run = _run()
    assert run.quorum.leave(2)
    assert not run.quorum.leave(1), "the others would be too few"
    _gathers(run, 0, 1, 2)
    assert set(run.turn(0.0).values()) == {ON}
    run.ask("exchange", 0, 1, 2)
    assert run.turn(0.1) == {0: LAST, 1: LAST, 2: LAST}, "what it has learnt is with the others"
    _gathers(run, 0, 1, joins=False, combines=False)
    run.ask(GATHER, 2)
    assert run.told[2][0] == OUT
    assert run.turn(0.2) == {0: ON, 1: ON}
    assert run.told[0][1].members == (0, 1)
    assert run.quorum.departed() == []
    run.ask(JOIN, 2)
    assert run.quorum.departed() == [2], "another process takes its place"
    run.ask(JOIN, 2)
    _gathers(run, 0, 1)
    assert run.turn(0.3) == {0: ON, 1: ON, 2: ON}


def test_an_exchange_that_was_broken_off_is_done_again() -> None:
    """Whoever has it, and whoever has not: nobody applies it before all have it."""
    run = _run()
    run.ask("exchange", 0, 1)
    assert run.quorum.lost(2)
    assert run.turn(0.0) == {0: AGAIN, 1: AGAIN}
    _gathers(run, 0, 1)
    assert run.turn(0.1) == {0: ON, 1: ON}
    run.ask("exchange", 0)
    run.ask("exchange", 1, ok=False)  # a connection was lost, and nobody has gone
    assert run.turn(0.2) == {0: AGAIN, 1: AGAIN}
    before = run.quorum.era.number
    _gathers(run, 0, 1)
    assert run.turn(0.3) == {0: ON, 1: ON}
    assert run.quorum.era == Era(before + 1, (0, 1)), "with the same members, but all meet anew"


def test_one_that_stands_still_in_the_middle_of_an_exchange() -> None:
    run = _run()
    for rank in range(3):
        run.quorum.waits(rank)
    assert run.turn(0.0) == {}
    assert run.turn(6.0) == {}, "all have come: a slow network is nobody's fault"
    assert run.turn(6.1, stalled=lambda rank: rank == 1) == {}
    assert run.broken == [(0, 2)], "the others are told, so that they ask"
    run.ask("exchange", 0, 2, ok=False)
    assert run.turn(6.2) == {0: AGAIN, 2: AGAIN}


def test_too_few_wait_for_those_that_are_to_come() -> None:
    run = _run(islands=2, least=2)
    _gathers(run, 0)
    assert run.turn(0.0) == {}
    assert run.turn(20.0) == {}, "a late one is not left out where the others are too few"
    assert run.quorum.lost(1)
    assert run.turn(21.0) == {}
    run.ask(JOIN, 1, step=0)
    assert run.turn(22.0) == {0: ON, 1: ON}
    assert run.quorum.lost(1)
    _gathers(run, 0)
    run.turn(30.0)
    with pytest.raises(
        ClusterLost, match=r"island 0 is left, and an exchange needs 2 islands .*nobody has come within"
    ):
        run.turn(91.0)


def test_too_few_where_nobody_can_come() -> None:
    run = _run(islands=2, least=2)
    assert run.quorum.lost(1)
    _gathers(run, 0, joins=False)
    with pytest.raises(ClusterLost, match="an exchange needs 2 islands"):
        run.turn(0.0)
    run = _run(islands=2, least=2)
    assert run.quorum.lost(1)
    _gathers(run, 0, joins=False, combines=False)
    assert run.turn(0.0) == {0: ON}, "a validation needs no quorum"


def test_an_island_is_there_when_all_its_workers_are() -> None:
    run = _run(islands=2, size=2, least=1)
    _gathers(run, 0, 1, 2)
    assert run.turn(0.0) == {}
    assert run.turn(5.0) == {0: ON, 1: ON, 2: OUT}
    run.ask(JOIN, 2)
    _gathers(run, 0, 1)
    assert run.turn(6.0) == {0: ON, 1: ON}
    run.ask(JOIN, 3)
    _gathers(run, 0, 1)
    assert run.turn(7.0) == {0: ON, 1: ON, 2: ON, 3: ON}


def test_one_that_has_come_back_may_fail_to() -> None:
    """It is a member, but has nothing yet: the next era hands it over again."""
    run = _run(islands=2, least=1)
    assert run.quorum.lost(1)
    run.ask(JOIN, 1)
    _gathers(run, 0)
    assert run.turn(0.0) == {0: ON, 1: ON}
    run.ask("exchange", 0, ok=False)
    run.ask(GATHER, 1, step=0, holds=False, joins=True)
    assert run.turn(0.1) == {0: AGAIN}
    _gathers(run, 0)
    assert run.turn(0.2) == {0: ON, 1: ON}
    assert run.told[1][2] == [0]


def test_meeting_in_vain_ends() -> None:
    run = _run(islands=2, least=1)

    def meet(times: int) -> None:
        for _ in range(times):
            run.ask("exchange", 0, 1, ok=False)
            run.turn(0.0)
            _gathers(run, 0, 1)
            run.turn(0.0)

    with pytest.raises(ClusterLost, match="could not meet"):
        meet(20)


def test_ends_of_a_run() -> None:
    run = _run(met=False)
    assert not run.quorum.lost(1), "before all have met, all begin again"
    run = _run(islands=2, least=1)
    assert run.quorum.lost(0)
    assert not run.quorum.lost(1), "nobody is left"
    run = _run(islands=2, least=1)
    assert run.quorum.lost(1)
    run.quorum.closing = True
    run.ask(JOIN, 1)
    _gathers(run, 0)
    assert run.turn(0.0) == {0: ON}, "where all are to stop nobody comes back"
