"""The rounds of federated runs, from invented journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verbund.observe.events import Journal
from verbund.observe.journal import read
from verbund.observe.report.rounds import rounds
from verbund.observe.rounds import measure


def write(folder: Path, generation: int, first: int, count: int, **fields: Any) -> None:
    journal = Journal(folder / "journal", "worker", 0, generation)
    for number in range(first, first + count):
        event = {
            "round": number,
            "clients": 2,
            "cohort": [number % 3, 3],
            "weights": [4.0, 9.0],
            "refused": {},
            "loss": float(generation),
            "norm": {"mean": 1.0, "max": 2.0},
            "agreement": 0.5,
            "bytes": {"down": 100, "up": 50},
        }
        journal.event("round", **{**event, **fields})
    journal.close()


def test_what_a_later_generation_did_again_counts_once(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 8)
    write(tmp_path, 2, 5, 2)
    found = measure(read(tmp_path / "journal"))
    assert found is not None
    assert found["count"] == 7
    assert [row["loss"] for row in found["table"]] == [1.0] * 5 + [2.0] * 2
    assert found["bytes"] == {"down": 700, "up": 350}
    assert found["participation"]["per_client"] == {"0": 3, "1": 2, "2": 2, "3": 7}
    assert found["participation"]["histogram"] == [[2, 2], [3, 1], [7, 1]]


def test_refusals_are_told_with_their_reason_and_escaped(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 3, refused={"3": "<b>no</b> numbers"})
    found = measure(read(tmp_path / "journal"))
    assert found is not None
    assert found["refused"] == {"3": {"times": 3, "reason": "<b>no</b> numbers"}}
    page = rounds({"rounds": found})
    assert "client 3 was refused 3 times" in page
    assert "<b>no" not in page


def test_cohorts_too_large_to_list(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 3, cohort=None, weights=None, clients=5000)
    found = measure(read(tmp_path / "journal"))
    assert found is not None
    assert found["participation"] == {"clients": None, "histogram": None, "per_client": None}
    assert "5000 clients" in rounds({"rounds": found})


def test_other_runs_have_no_rounds(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "worker", 0, 1).close()
    assert measure(read(tmp_path / "journal")) is None
    assert rounds({"rounds": None}) == rounds({}) == ""
