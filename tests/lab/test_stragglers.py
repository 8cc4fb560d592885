"""A slow worker in a run over several hosts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import MLP, MakeJob, losses
from lab import Lab, missing
from lab.runs import train, write
from slow_task import shares, task_of
from verbund.run import Run
from verbund.stage import launch

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")


def test_shares_go_by_speed_between_hosts(make_job: MakeJob, tmp_path: Path, shared_cluster: object) -> None:
    changes = {"train.steps": 40, "train.global_batch": 97}
    alone = launch.train(make_job(task_of(MLP, -1), changes), tmp_path / "alone")
    balanced = {"strategy.mesh": {"data": 4}, "strategy.stragglers": {"name": "rebalance", "every": 5}}
    with Lab(hosts=2, rate="100mbit") as lab:
        write(lab, make_job, tmp_path, {**changes, **balanced}, task_of(MLP, 3))
        done = train(lab, tmp_path)
        assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "run")
    np.testing.assert_allclose(losses(run), losses(alone), rtol=2e-5)
    decided = shares(run.path)
    assert decided[-1][-1] < 97 / 4
    found = run.summary["stragglers"]
    assert found["workers"][3]["slower"] > 2
    assert found["found"][0]["rank"] == 3
