"""What validations decide is the same for who looked at one himself and for who was told."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import MakeJob
from verbund.stage.judge import Judge


@pytest.mark.parametrize(
    "settings",
    [
        {"train.patience": 2, "data.validation_fraction": 0.2},
        {"train.target": {"metric": "loss", "value": 0.5}, "data.validation_fraction": 0.2},
    ],
)
def test_a_validation_that_is_done_again_counts_once(settings: dict[str, Any], make_job: MakeJob) -> None:
    train = make_job(changes=settings).train
    former = Judge(train, {})
    for step, value in ((5, 1.0), (10, 2.0)):
        assert former.ends({"loss": value}, step) is None
    told = Judge(train, {**former.state(), "judged": former.judged})
    assert told.ends({"loss": 2.0}, 10) is None
    assert told.state() == former.state()
    later = 0.1 if "train.target" in settings else 3.0
    assert told.ends({"loss": later}, 15) == former.ends({"loss": later}, 15) is not None
