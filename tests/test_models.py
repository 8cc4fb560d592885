"""The models that other tests divide train as they are in a single process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import models
from conftest import losses
from verbund.cluster.local import LocalCluster
from verbund.stage import launch


@pytest.mark.parametrize("name", models.ALL)
def test_trains_alone_and_divided(name: str, shared_cluster: LocalCluster, tmp_path: Path) -> None:
    if name in models.TRANSFORMERS:
        pytest.importorskip("transformers")
    changes = {"data.validation_fraction": 0.2}
    alone = launch.train(models.job(name, tmp_path, changes), tmp_path / "alone")
    assert len(losses(alone)) == 3
    divided = launch.train(models.job(name, tmp_path, {**changes, "strategy.mesh": {"data": 2}}), tmp_path / "divided")
    np.testing.assert_allclose(losses(divided), losses(alone), rtol=1e-5)
