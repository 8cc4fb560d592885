"""The coordinator: what it has told is still so after it was killed at any point."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from verbund.comm.wire import Message
from verbund.errors import ClusterLost, InputError, VerbundError
from verbund.exchange.parameter_server.coordinator import Coordinator
from verbund.exchange.parameter_server.leases import Leases, Stops
from verbund.exchange.parameter_server.plan import Block, Plan, Rule
from verbund.job import Optimizer


def _plan(name: str = "w") -> Plan:
    blocks = tuple(Block(name, (8, 2), "float32", (low, 0), (4, 2)) for low in (0, 4))
    return Plan(blocks, Optimizer(name="sgd"), Rule("asynchronous"))


class _Desk:
    """A coordinator that can be killed: only what lies in its folder goes on."""

    def __init__(self, folder: Path, stops: Stops | None = None, divided: bool = False) -> None:
        self.folder, self.stops, self.divided = folder, stops or Stops(50, (10,)), divided
        self.fatal: list[VerbundError] = []
        self.restart()

    def restart(self) -> None:
        leases = Leases(2, 1, self.divided, 0, self.stops)
        self.coordinator = Coordinator(self.folder, leases, 2, lambda plan: [(0, 1), (1, 0)], {}, self.fatal.append)

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        if kind in ("lease", "done"):
            fields = {"worker": 0, "done": 0, "count": 1, **fields}
        answer = dict(self.coordinator.handle(Message(kind, fields, {})).fields)
        if fields.get("count") == 1 and "tickets" in answer:
            (answer["ticket"],) = answer.pop("tickets")
        return answer

    def enter(self, island: int, generation: int = 1, plan: Plan | None = None) -> dict[str, Any]:
        return self.ask("enter", island=island, generation=generation, plan=(plan or _plan()).record())

    def seat(self, server: int, generation: int = 1) -> dict[str, Any]:
        return self.ask("seat", server=server, generation=generation, address=f"unix:/{server}", recovered=False)


def test_several_tickets_at_once(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.enter(0)
    assert desk.ask("lease", island=0, generation=1, number=0, count=4)["tickets"] == [0, 1, 2, 3]
    desk.restart()
    assert desk.ask("lease", island=0, generation=1, number=2, count=20)["tickets"] == list(range(2, 10))
    desk.restart()
    desk.enter(1)
    desk.ask("done", island=0, generation=1, done=10)
    assert desk.ask("lease", island=1, generation=1, number=0) == {"meet": 10, "reason": None, "judged": {}}


def test_islands_come_and_go(tmp_path: Path) -> None:
    """Over the coordinator's own death too: a new one may push from when it has come, one that is to go ends when it
    has done what it has."""
    desk = _Desk(tmp_path)
    desk.enter(0)
    desk.enter(1)
    assert desk.ask("lease", island=1, generation=1, number=0)["ticket"] == 0
    desk.enter(3)
    assert desk.coordinator._view is not None
    assert desk.coordinator._view.clients == (1, 1, 0, 1)
    desk.restart()
    assert desk.ask("lease", island=3, generation=1, number=0)["ticket"] == 1
    desk.coordinator.want(1)
    desk.coordinator.want(1)
    desk.restart()
    assert desk.ask("lease", island=1, generation=1, number=0)["ticket"] == 0  # it is told again what it has
    assert desk.ask("lease", island=3, generation=1, number=1, done=1) == {"end": "released", "step": 0}
    desk.enter(1, 2)  # it was lost instead of leaving: what it had others do
    assert desk.ask("lease", island=1, generation=2, number=0) == {"end": "released", "step": 0}
    assert desk.ask("lease", island=0, generation=1, number=0)["ticket"] == 0
    desk.coordinator.want(2)
    desk.enter(1, 3)
    assert desk.ask("lease", island=1, generation=3, number=0)["ticket"] == 2
    with pytest.raises(InputError, match="island"):
        desk.enter(4096)


def test_who_leaves_does_not_lead_unless_it_does_already(tmp_path: Path) -> None:
    desk = _Desk(tmp_path, Stops(2, ()))
    for island in (0, 1):
        desk.enter(island)
        assert desk.ask("lease", island=island, generation=1, number=0)["ticket"] == island
    desk.ask("done", island=0, generation=1, done=1)
    meets = desk.ask("lease", island=1, generation=1, number=1, done=1)
    assert meets["meet"] == 2
    desk.coordinator.want(1)
    desk.restart()
    assert desk.ask("lease", island=1, generation=1, number=1) == meets
    desk.enter(1, 2)  # lost, and not asked again: another one leads
    assert desk.ask("lease", island=1, generation=2, number=0) == {"end": "released", "step": 0}
    assert desk.ask("lease", island=0, generation=1, number=1)["meet"] == 2
    desk.ask("settle", island=0, generation=1, step=2, reason=None, judged={})
    assert desk.coordinator.ended == "steps"


def test_where_tickets_are_divided_nobody_comes_or_goes(tmp_path: Path) -> None:
    desk = _Desk(tmp_path, divided=True)
    desk.enter(0)
    desk.enter(1)
    desk.coordinator.want(1)
    assert desk.ask("lease", island=1, generation=1, number=0)["ticket"] == 0
    with pytest.raises(InputError, match="island"):
        desk.enter(2)


def test_a_ticket_is_told_again_to_who_did_not_hear(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.enter(0)
    first = desk.ask("lease", island=0, generation=1, number=0)
    desk.restart()
    assert desk.ask("lease", island=0, generation=1, number=0) == first == {"ticket": 0, "low": 0, "again": []}
    assert desk.ask("lease", island=0, generation=1, number=1)["ticket"] == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("divided", [True, False])
def test_killed_at_random_points(tmp_path: Path, seed: int, divided: bool) -> None:
    """Two islands train to the end while the coordinator is killed again and again."""
    choose = random.Random(seed)
    desk = _Desk(tmp_path, Stops(40, (15,)), divided)
    generation, number = [1, 1], [0, 0]
    desk.enter(0)
    desk.enter(1)
    finished: dict[int, set[int]] = {}
    rests = []
    for _ in range(2000):
        if choose.random() < 0.1:
            desk.restart()
        island = choose.randrange(2)
        if choose.random() < 0.03:
            generation[island] += 1
            number[island] = 0
            desk.enter(island, generation[island])
        who = {"island": island, "generation": generation[island]}
        leases = desk.coordinator._leases
        if leases.ended is None and not leases.resting and leases._available(leases.islands[island]) is None:
            # It would wait for the other one, having said what it has done.
            desk.ask("done", **who, worker=0, done=number[island])
            continue
        answer = desk.ask("lease", **who, number=number[island], done=number[island])
        if "end" in answer:
            break
        if "meet" in answer:
            rests.append(answer["meet"])
            desk.ask("settle", **who, step=answer["meet"], reason=None, judged={"best": answer["meet"]})
            continue
        finished.setdefault(answer["ticket"], set()).add(island)
        number[island] += 1
    assert desk.coordinator.ended == "steps"
    assert sorted(finished) == list(range(40))
    assert rests == [15, 30, 40]
    if divided:
        assert all(by == {0, 1} for by in finished.values())
    desk.restart()
    assert desk.coordinator.ended == "steps"


def test_who_leads_at_a_rest_leads_after_the_coordinators_death(tmp_path: Path) -> None:
    desk = _Desk(tmp_path, Stops(1, ()))
    desk.enter(0)
    desk.enter(1)
    assert desk.ask("lease", island=0, generation=1, number=0)["ticket"] == 0
    desk.ask("done", island=0, generation=1, worker=0, done=1)
    assert desk.ask("lease", island=1, generation=1, number=0)["meet"] == 1
    desk.restart()
    with desk.coordinator._changed:
        assert desk.coordinator._leads(0) is None
        assert desk.coordinator._leads(1) is not None
    desk.enter(1, 2)
    with desk.coordinator._changed:
        assert desk.coordinator._leads(0) is not None


def test_an_older_generation_may_do_nothing(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.enter(0)
    desk.enter(0, 2)
    for kind, fields in {"lease": {"number": 0}, "settle": {"step": 10, "reason": None, "judged": {}}}.items():
        with pytest.raises(ClusterLost, match="taken the place of island 0"):
            desk.ask(kind, island=0, generation=1, **fields)
    with pytest.raises(ClusterLost):
        desk.enter(0, 1)


def test_another_model_is_refused(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.enter(0)
    with pytest.raises(InputError, match="another model"):
        desk.enter(1, plan=_plan("v"))
    desk.restart()
    with pytest.raises(InputError, match="another model"):
        desk.enter(1, plan=_plan("v"))


def test_a_lost_server_makes_a_new_view_that_waiting_ones_get(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.enter(0)
    known = desk.seat(0)["view"]["number"]
    desk.seat(1)
    got: list[Any] = []
    known = desk.ask("watch", known=known)["view"]["number"]
    waiting = threading.Thread(target=lambda: got.append(desk.ask("watch", known=known)))
    waiting.start()
    desk.seat(0, 2)
    waiting.join(5)
    view = got[0]["view"]
    assert view["holders"] == ((1,), (1,))
    desk.restart()
    assert desk.ask("watch", known=known)["view"]["number"] == view["number"]
    desk.ask("joined", server=0, generation=2, blocks=[0, 1])
    assert desk.ask("watch", known=view["number"])["view"]["holders"] == ((1, 0), (1, 0))
    assert not desk.fatal


def test_all_holders_lost_is_told_to_the_run(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.enter(0)
    desk.seat(0)
    desk.seat(1)
    desk.seat(0, 2)
    with pytest.raises(ClusterLost):
        desk.seat(1, 2)
    assert "nobody else has block" in desk.fatal[0].what


def test_a_torn_line_is_as_if_it_had_not_been_told(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.enter(0)
    desk.ask("lease", island=0, generation=1, number=0)
    path = next(tmp_path.glob("*.jsonl"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'["lease", 0')
    desk.restart()
    assert desk.ask("lease", island=0, generation=1, number=1)["ticket"] == 1
    desk.restart()
    assert desk.ask("lease", island=0, generation=1, number=2)["ticket"] == 2
