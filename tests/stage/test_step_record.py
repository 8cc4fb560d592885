"""What is known of the last steps passes from worker to worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verbund.stage.step_record import Row, StepRecord


def _record(rank: int, journaled: list[Row]) -> StepRecord:
    island: Any = SimpleNamespace(mesh=SimpleNamespace(rank=rank))
    journal: Any = SimpleNamespace(step=lambda *row: journaled.append(row))
    nobody: Any = None
    return StepRecord(nobody, island, journal, nobody, None, keeps=True, samples=0)


def test_one_who_has_just_come_knows_what_another_has_told_it() -> None:
    """It may be whom all others ask when the next one is lost."""
    rows: list[Row] = [(step, float(step), 1.0, 8, 0.1) for step in range(10)]
    new, first = _record(2, []), list[Row]()
    new.again({"recent": rows}, 9)  # somebody has done one step more than the new one has got
    _record(0, first).again({"recent": new.recent}, 9)
    assert first == rows[:9]
