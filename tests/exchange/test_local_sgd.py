"""Local SGD with one step between exchanges is synchronous SGD, and what islands do alone is what one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trained import close
from verbund.run import Run

SGD = {"name": "sgd", "lr": 0.1}
MODEL = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
"""


@pytest.mark.parametrize(
    ("islands", "mesh"),
    [(2, {}), (3, {}), (2, {"data": 2}), (2, {"shard": 2}), (2, {"tensor": 2}), (2, {"pipeline": 2})],
)
def test_one_step_is_all_reduce(islands: int, mesh: dict[str, int], run_job: Callable[..., Run]) -> None:
    changes: dict[str, Any] = {"train.optimizer": SGD, "train.global_batch": 12 * islands, "train.steps": 12}
    reference = run_job(MODEL, changes)
    local = {"strategy.islands": islands, "strategy.mesh": mesh, "strategy.exchange": {"name": "local_sgd", "every": 1}}
    close(run_job(MODEL, changes | local), reference)
    close(run_job(MODEL, changes | {"strategy.islands": islands, "strategy.mesh": mesh}), reference)


def test_outer_sgd_of_rate_one_is_local_sgd(run_job: Callable[..., Run]) -> None:
    changes: dict[str, Any] = {"train.steps": 12, "strategy.islands": 2}
    local = run_job(MODEL, changes | {"strategy.exchange": {"name": "local_sgd", "every": 4}})
    outer = {"name": "diloco", "every": 4, "outer_lr": 1.0, "outer_momentum": 0.0}
    close(run_job(MODEL, changes | {"strategy.exchange": outer}), local, 0.0)
