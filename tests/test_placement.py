"""Which worker runs on which host, and what a job must say of several hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from verbund.errors import JobError
from verbund.job import Job
from verbund.placement import place


@pytest.mark.parametrize(
    ("world", "islands", "hosts", "slots", "expected"),
    [
        (4, 1, 2, None, [0, 0, 1, 1]),
        (5, 1, 2, None, [0, 0, 0, 1, 1]),
        (2, 1, 4, None, [0, 1]),
        (6, 3, 2, None, [0, 0, 0, 0, 1, 1]),
        (4, 2, 4, None, [0, 1, 2, 3]),
        (4, 1, 2, 4, [0, 0, 0, 0]),
        (4, 1, 2, 3, [0, 0, 0, 1]),
        (4, 2, 2, 3, [0, 0, 1, 1]),
        (4, 2, 3, [3, 1, 2], [0, 0, 2, 2]),
        (4, 2, 2, [3, 1], [0, 0, 0, 1]),
        (4, 1, 2, 1, None),
    ],
)
def test_workers_fill_hosts_in_order_and_islands_stay_whole(
    world: int, islands: int, hosts: int, slots: Any, expected: list[int] | None
) -> None:
    assert place(world, islands, hosts, slots) == expected


HOSTS = ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"hosts": []}, "kind `hosts` needs `hosts`"),
        ({"hosts": ["a", "a"]}, "names a more than once"),
        ({"hosts": ["-oProxyCommand=x"]}, "not beginning with `-`"),
        ({"hosts": HOSTS, "slots": [1]}, "1 numbers for 2 hosts"),
        ({"hosts": HOSTS, "slots": 0}, "must be a whole number greater than 0"),
        ({"hosts": HOSTS, "command": "ssh {name}"}, "the host's name is `{host}`"),
        ({"hosts": HOSTS, "command": "ssh 'x"}, "No closing quotation"),
        ({"hosts": HOSTS, "command": " "}, "is empty"),
        ({"hosts": HOSTS, "trusted_network": "10.0.0.1/24"}, "no network such as"),
        ({"hosts": [*HOSTS, "10.0.1.1"], "trusted_network": "10.0.0.0/24"}, "10.0.1.1 does not lie in"),
        ({"hosts": HOSTS}, 'without encryption .* name it, e.g. `cluster.trusted_network =.*"diloco"`, "local_sgd" or'),
        ({"hosts": HOSTS, "slots": [1, 2]}, "too little room for 4 workers on 2 hosts"),
    ],
)
def test_wrong_hosts_are_told(cluster: dict[str, Any], message: str) -> None:
    raw = {
        "task": "task.py",
        "train": {"steps": 1, "objective": "cross_entropy"},
        "strategy": {"mesh": {"data": 4}},
        "cluster": {"kind": "hosts", **cluster},
    }
    with pytest.raises(JobError) as caught:
        Job.build(raw, {}, source="job.toml", folder=Path())
    assert re.search(message, str(caught.value)), caught.value


def test_workers_on_one_host_need_no_trusted_network() -> None:
    raw = {
        "task": "task.py",
        "train": {"steps": 1, "objective": "cross_entropy"},
        "strategy": {"mesh": {"data": 4}},
        "cluster": {"kind": "hosts", "hosts": HOSTS, "slots": 4},
    }
    job = Job.build(raw, {}, source="job.toml", folder=Path())
    assert job.neighbours == 4
    spread = {"cluster.slots": [1, 3], "cluster.trusted_network": "10.0.0.0/24"}
    assert Job.build(raw, spread, source="job.toml", folder=Path()).neighbours == 3
    here = {"cluster.kind": "local"}
    assert Job.build(raw, here, source="job.toml", folder=Path()).neighbours == 4


@pytest.mark.parametrize("exchange", ["local_sgd", "diloco"])
def test_islands_that_train_alone_need_no_trusted_network(exchange: str) -> None:
    raw = {
        "task": "task.py",
        "train": {"steps": 1, "objective": "cross_entropy"},
        "strategy": {"mesh": {"data": 2}, "islands": 2, "exchange": exchange},
        "cluster": {"kind": "hosts", "hosts": HOSTS},
    }

    def build(changes: dict[str, Any]) -> Job:
        return Job.build(raw, changes, source="job.toml", folder=Path())

    assert build({}).islands_apart
    assert not build({"cluster.slots": 4}).islands_apart
    assert not build({"cluster.trusted_network": "10.0.0.0/24"}).islands_apart
    assert not build({"cluster.kind": "local"}).islands_apart
    with pytest.raises(JobError, match=r"an island of 2 would lie on several: .* `cluster.slots` have room for 2"):
        build({"cluster.slots": [1, 3]})
    with pytest.raises(JobError, match="without encryption"):
        build({"strategy.exchange": "all_reduce"})
