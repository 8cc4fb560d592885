"""What islands keep between steps is written by all of them for one checkpoint, whoever is lost meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from exchange.parameter_server.test_coordinator import _Desk
from verbund.exchange.parameter_server import coordinator
from verbund.exchange.parameter_server.leases import Stops


def rested(folder: Path) -> _Desk:
    """Three islands that have done a ticket each, and rest; the last leads."""
    desk = _Desk(folder, Stops(3, ()))
    for island in range(3):
        desk.enter(island)
        assert desk.ask("lease", island=island, generation=1, number=0)["ticket"] == island
    for island in (0, 1):
        desk.ask("done", island=island, generation=1, done=1)
    assert desk.ask("lease", island=2, generation=1, number=1, done=1)["meet"] == 3
    return desk


class Gather(threading.Thread):
    """The leader's question, until it has its answer."""

    def __init__(self, desk: _Desk) -> None:
        super().__init__(daemon=True)
        self.desk = desk
        self.answer: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        while not self.answer:
            self.answer = self.desk.ask("gather", island=2, generation=1, step=3)

    def result(self) -> dict[str, Any]:
        self.join(20.0)
        return self.answer


def keep(desk: _Desk, island: int, generation: int, place: int, of: int = 3) -> None:
    """An island that wants a ticket is told to write what it keeps, and does."""
    answer: dict[str, Any] = {}
    while "keep" not in answer:  # the leader may not have asked yet
        answer = desk.ask("lease", island=island, generation=generation, number=int(generation == 1))
    assert answer == {"keep": {"step": 3, "place": place, "of": of}}
    wrote = {"files": [f"{island}-{generation}"], "tensors": []}
    desk.ask("kept", island=island, generation=generation, worker=0, step=3, record=wrote)


def files(answer: dict[str, Any]) -> list[str]:
    return [name for record in answer["records"] for name in record["files"]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_WAIT", 0.05)


def test_the_leader_has_what_all_others_have_written(tmp_path: Path) -> None:
    desk = rested(tmp_path)
    gather = Gather(desk)
    keep(desk, 0, 1, 0)
    keep(desk, 1, 1, 1)
    found = gather.result()
    assert (found["place"], found["of"], files(found)) == (2, 3, ["0-1", "1-1"])
    assert files(Gather(desk).result()) == ["0-1", "1-1"]  # another worker of the leading island
    desk.ask("settle", island=2, generation=1, step=3, reason=None, judged={})
    assert desk.ask("lease", island=0, generation=1, number=1) == {"end": "steps", "step": 3}


def test_whoever_comes_in_between_is_asked_too(tmp_path: Path) -> None:
    """And who has written writes again: which part is whose may be different now."""
    desk = rested(tmp_path)
    gather = Gather(desk)
    keep(desk, 0, 1, 0)
    desk.enter(1, 2)
    keep(desk, 1, 2, 1)
    keep(desk, 0, 1, 0)
    assert files(gather.result()) == ["0-1", "1-2"]


def test_a_coordinator_that_is_lost_is_asked_again(tmp_path: Path) -> None:
    desk = rested(tmp_path)
    gather = Gather(desk)
    keep(desk, 0, 1, 0)
    desk.restart()
    keep(desk, 1, 1, 1)
    keep(desk, 0, 1, 0)
    assert files(gather.result()) == ["0-1", "1-1"]


def test_who_is_to_go_keeps_nothing(tmp_path: Path) -> None:
    desk = rested(tmp_path)
    desk.enter(3)
    desk.coordinator.want(3)
    gather = Gather(desk)
    keep(desk, 1, 1, 1)
    assert desk.ask("lease", island=3, generation=1, number=0) == {"end": "released", "step": 0}
    keep(desk, 0, 1, 0)
    assert files(gather.result()) == ["0-1", "1-1"]
