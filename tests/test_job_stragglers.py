"""`strategy.stragglers`: what goes with what, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verbund.errors import JobError
from verbund.job import Job, parse_strategy

RAW: dict[str, Any] = {"task": "task.py", "train": {"steps": 3}, "data": {"train": "data.csv"}}


def build(changes: dict[str, Any]) -> Job:
    return Job.build(RAW, changes, source="job.toml", folder=Path("/nowhere"))


def test_by_name_or_with_its_settings() -> None:
    short = build({"strategy.stragglers": "rebalance"}).strategy.stragglers
    assert (short.name, short.every, short.rebalances) == ("rebalance", 10, True)
    job = build(parse_strategy("data=4,stragglers=rebalance,stragglers.every=20"))
    assert (job.strategy.mesh, job.strategy.stragglers.every) == ({"data": 4}, 20)
    assert not build({}).strategy.stragglers.rebalances


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy.stragglers": "backup"}, "a step cannot go on without them"),
        ({"strategy.stragglers": "backup"}, 'name = "parameter_server", backup = 1'),
        ({"strategy.stragglers": "rebalence"}, "Did you mean `rebalance`?"),
        ({"strategy.stragglers": {"name": "rebalance", "every": 1}}, "at least 2"),
        ({"strategy.stragglers": {"every": 5}}, 'is for `name = "rebalance"`'),
        ({"strategy.exchange": "parameter_server"}, '`consistency = "asynchronous"`'),
        ({"strategy.exchange": "local_sgd", "strategy.islands": 2}, "no axis `data` or `shard`"),
        ({"strategy.exchange": {"name": "federated", "clients": 3}}, "clients of a federation"),
        ({"train.batch_norm": "global", "train.micro_batch": 4}, "leave out `train.micro_batch`"),
    ],
)
def test_what_does_not_go(changes: dict[str, Any], words: str) -> None:
    if "strategy.stragglers" not in changes:
        changes = {"strategy.stragglers": "rebalance", **changes}
    with pytest.raises(JobError) as caught:
        build(changes)
    assert words in str(caught.value)


def test_islands_that_train_alone_balance_inside() -> None:
    changes = {"strategy.exchange": "local_sgd", "strategy.islands": 2, "strategy.mesh": {"data": 2}}
    assert build({"strategy.stragglers": "rebalance", **changes}).strategy.stragglers.rebalances
