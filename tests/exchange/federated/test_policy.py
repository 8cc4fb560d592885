"""What an owner permits."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from verbund.errors import JobError
from verbund.exchange.federated.policy import Policy

TASK = "a" * 64
FACTS: dict[str, Any] = {
    "task": TASK,
    "task_at": "jobs/task.py",
    "secure": False,
    "epsilon": None,
    "delta": None,
    "weighted": True,
}


@pytest.mark.parametrize(
    ("policy", "facts", "keys"),
    [
        ({}, {}, ["policy, tasks"]),  # nothing is permitted that was not read
        ({"tasks": ["*"]}, {}, []),
        ({"tasks": [TASK]}, {}, []),
        ({"tasks": ["b" * 64]}, {}, ["policy, tasks"]),
        ({"tasks": ["*"], "secure_aggregation": True}, {}, ["policy, secure_aggregation"]),
        ({"tasks": ["*"], "secure_aggregation": True}, {"secure": True}, []),
        ({"tasks": ["*"], "epsilon": 2.0}, {}, ["policy, epsilon"]),
        ({"tasks": ["*"], "epsilon": 2.0}, {"epsilon": 3.0, "delta": 1e-5}, ["policy, epsilon"]),
        ({"tasks": ["*"], "epsilon": 2.0}, {"epsilon": 2.0, "delta": 1e-3}, ["policy, epsilon"]),
        ({"tasks": ["*"], "epsilon": 2.0}, {"epsilon": 2.0, "delta": 1e-5}, []),
        ({"tasks": ["*"], "sample_counts": False}, {}, ["policy, sample_counts"]),
        ({"tasks": ["*"], "sample_counts": False}, {"weighted": False}, []),
        ({"sample_counts": False}, {}, ["policy, tasks", "policy, sample_counts"]),
    ],
)
def test_jobs(policy: dict[str, Any], facts: dict[str, Any], keys: list[str]) -> None:
    assert [problem.where for problem in Policy(**policy).job_problems({**FACTS, **facts})] == keys


@pytest.mark.parametrize(
    ("policy", "cohort", "rounds", "clock", "where"),
    [
        ({}, 1, 0, "12:00", "policy, minimum_cohort"),
        ({}, 2, 0, "12:00", None),
        ({"minimum_cohort": 10}, 9, 0, "12:00", "policy, minimum_cohort"),
        ({"rounds": 3}, 2, 2, "12:00", None),
        ({"rounds": 3}, 2, 3, "12:00", "policy, rounds"),
        ({"hours": ["20:00-06:00"]}, 2, 0, "12:00", "policy, hours"),
        ({"hours": ["20:00-06:00"]}, 2, 0, "20:00", None),
        ({"hours": ["20:00-06:00"]}, 2, 0, "05:59", None),
        ({"hours": ["20:00-06:00"]}, 2, 0, "06:00", "policy, hours"),
        ({"hours": ["08:00-09:00", "11:30-24:00"]}, 2, 0, "23:59", None),
        ({"hours": ["08:00-09:00", "11:30-24:00"]}, 2, 0, "10:00", "policy, hours"),
    ],
)
def test_rounds(policy: dict[str, Any], cohort: int, rounds: int, clock: str, where: str | None) -> None:
    now = datetime.fromisoformat(f"2026-01-01T{clock}")
    problem = Policy(**policy).round_problem(cohort, rounds, now)
    assert (problem.where if problem else None) == where


def test_a_wrong_policy_is_told_whole(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('tasks = ["abc"]\nhours = ["late"]\nminimum_chort = 3\nepsilon = -1.0\n')
    with pytest.raises(JobError) as caught:
        Policy.read(path)
    text = str(caught.value)
    for part in ("4 problems", "`abc`", "`late`", "minimum_cohort", "epsilon", str(path)):
        assert part in text
    with pytest.raises(JobError, match="cannot be read"):
        Policy.read(tmp_path / "none.toml")
    path.write_text("tasks = ")
    with pytest.raises(JobError, match="cannot be read"):
        Policy.read(path)


KEYS = {"north": "a" * 64, "south": "b" * 64, "village": "c" * 64}


@pytest.mark.parametrize(
    ("policy", "known", "where"),
    [
        ({}, {}, None),
        ({}, {"north": "a" * 64}, None),
        ({}, {"north": "d" * 64}, "policy, peers"),
        ({"peers": KEYS}, {"north": "d" * 64}, None),  # the owners know better than what was seen first
        ({"peers": {**KEYS, "south": "d" * 64}}, {}, "policy, peers"),
        ({"peers": {"north": "a" * 64, "south": "b" * 64}}, {}, "policy, peers"),
        ({"minimum_cohort": 4}, {}, "policy, minimum_cohort"),
        ({"minimum_neighbours": 3}, {}, "policy, minimum_neighbours"),
    ],
)
def test_secure_rounds(policy: dict[str, Any], known: dict[str, str], where: str | None) -> None:
    problem = Policy(**policy).secure_problem(KEYS, known, 2)
    assert (problem.where if problem else None) == where


def test_a_public_key_that_is_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('[peers]\nnorth = "abc"\n')
    with pytest.raises(JobError, match="no public key"):
        Policy.read(path)
