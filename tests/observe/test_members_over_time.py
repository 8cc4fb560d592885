"""What a summary and a report say of workers that came and went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verbund.observe.journal import read
from verbund.observe.report.membership import membership as section
from verbund.observe.summary import summarise, valid_steps

S = 1_000_000_000


def _journal(folder: Path, role: str, rank: int, generation: int, *lines: dict[str, Any], life: int = 0) -> None:
    head = {"t": "head", "role": role, "rank": rank, "generation": generation, "life": life, "host": "h", "pid": rank}
    head |= {"monotonic": 100 * S, "wall": 0.0, "island": 0}
    (folder / "journal").mkdir(exist_ok=True)
    path = folder / "journal" / f"{role}-{rank}-{generation}-{life}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))


def _era(number: int, at: float, *members: int) -> dict[str, Any]:
    event = {"t": "event", "name": "membership", "at": int((100 + at) * S), "wall": 0.0}
    return event | {"era": number, "workers": len(members), "members": list(members), "joint": number == 0}


def _regrouped(era: int, seconds: float) -> dict[str, Any]:
    return {"t": "event", "name": "regrouped", "at": 101 * S, "wall": 0.0, "era": era, "seconds": seconds}


def _steps(*numbers: int) -> dict[str, Any]:
    return {"t": "steps", "rows": [[n, 1.0 / (n + 1), 4, 4, 0.1] for n in numbers]}


def test_members_over_time_and_what_changes_cost(tmp_path: Path) -> None:
    why = {"t": "event", "name": "replacement", "at": 101 * S, "wall": 0.0, "processes": "worker 0", "why": "killed"}
    _journal(tmp_path, "supervisor", 0, 1, _era(0, 0, 0, 1, 2), _era(1, 2.5, 1, 2), why, _era(2, 4, 1, 2, 0))
    _journal(tmp_path, "worker", 0, 1, _steps(0, 1, 2))
    _journal(tmp_path, "worker", 1, 1, _steps(2, 3, 4, 5), _regrouped(1, 0.25), _regrouped(2, 0.125))
    _journal(tmp_path, "worker", 2, 1, _regrouped(1, 0.5), _regrouped(2, 0.0625))
    summary = summarise(tmp_path, status="done", world=3)
    found = summary["membership"]
    assert found["over_time"] == [[0.0, 3], [2.5, 2], [4.0, 3]]
    assert [era["members"] for era in found["eras"]] == [[0, 1, 2], [1, 2], [1, 2, 0]]
    assert found["replacements"] == [{"processes": "worker 0", "why": "killed"}]
    assert (found["seconds_lost"], found["steps_redone"]) == (0.625, 0)
    # Step 2 is in two journals and was done once.
    assert (summary["steps"], summary["samples"], summary["world"]) == (6, 24, 3)
    assert valid_steps(read(tmp_path / "journal"))[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    page = section(summary)
    assert "changed 2 times" in page
    assert "0.62 s" in page or "0.63 s" in page
    assert "killed" in page


def test_steps_that_a_restart_did_again(tmp_path: Path) -> None:
    start = {"t": "event", "name": "membership", "at": 100 * S, "wall": 0.0, "workers": 2}
    _journal(tmp_path, "supervisor", 0, 1, start)
    _journal(tmp_path, "supervisor", 0, 2, start)
    ended = {"t": "end", "at": 110 * S}
    _journal(tmp_path, "worker", 0, 1, _steps(*range(7)), ended)
    _journal(tmp_path, "worker", 0, 2, _steps(*range(4, 9)), {"t": "spans", "rows": [0, 4, 113 * S, S]})
    found = summarise(tmp_path, status="done", world=2)["membership"]
    assert (found["steps_redone"], found["seconds_lost"]) == (3, 3.0)


def test_a_run_whose_workers_stay(tmp_path: Path) -> None:
    _journal(tmp_path, "supervisor", 0, 1, _era(0, 0, 0, 1))
    _journal(tmp_path, "worker", 0, 1, _steps(0, 1))
    summary = summarise(tmp_path, status="done", world=2)
    assert summary["membership"]["over_time"] == [[0.0, 2]]
    assert section(summary) == ""
    assert section({}) == ""


def test_from_whose_memory_it_went_on(tmp_path: Path) -> None:
    def recovery(how: str, step: int, again: int) -> dict[str, Any]:
        return {"t": "event", "name": "recovery", "at": 103 * S, "wall": 0.0, "how": how, "step": step, "again": again}

    broken = {"t": "event", "name": "recovery", "at": 103 * S, "wall": 0.0, "how": "peers"}
    recoveries = recovery("peers", 3, 0), recovery("mirrors", 2, 2), broken
    _journal(tmp_path, "supervisor", 0, 1, _era(0, 0, 0, 1), _era(1, 2.5, 0, 1), *recoveries)
    _journal(tmp_path, "worker", 0, 1, _steps(0, 1, 2, 3, 2, 3, 4))
    summary = summarise(tmp_path, status="done", world=2)
    found = summary["membership"]
    assert found["recoveries"] == [{"how": "peers", "step": 3, "again": 0}, {"how": "mirrors", "step": 2, "again": 2}]
    assert found["steps_redone"] == 2
    assert (summary["steps"], summary["samples"]) == (5, 20)
    assert "After step 2 training went on from mirrors in memory; steps done again: 2" in section(summary)


def test_what_was_gone_back_from_and_not_done_again_is_left_out(tmp_path: Path) -> None:
    stopped = {"t": "event", "name": "stopped", "at": 104 * S, "wall": 0.0, "status": "interrupted", "steps": 4}
    _journal(tmp_path, "supervisor", 0, 1, _era(0, 0, 0, 1), _era(1, 2.5, 0, 1), stopped)
    _journal(tmp_path, "worker", 0, 1, _steps(0, 1, 2, 3, 4, 5, 2, 3))
    assert valid_steps(read(tmp_path / "journal"))[:, 0].tolist() == [0, 1, 2, 3]
