"""`rows(batch)` of a task file: all tables in one request."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MakeJob
from verbund import task as tasks
from verbund.data.loader import Batch
from verbund.errors import TaskError
from verbund.exchange.parameter_server.pulled import Rows
from verbund.exchange.parameter_server.remote import RemoteTables
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica

TASK = """
from torch import nn
from verbund import Table

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = Table(50, 4), Table(60, 4, seed=1)
        self.head = nn.Linear(4, 5)
    def forward(self, user, item):
        return self.head(self.users(user) * self.items(item))

def model():
    return Model()

def inputs(batch):
    return batch["x"], batch["y"]
"""
ROWS = """
def rows(batch):
    return {"users": batch["x"], "items": batch["y"]}
"""
BATCH = Batch(0, np.arange(3), {"x": torch.tensor([7, 7, 3]), "y": torch.tensor([4, 0, 1])})


class Asked:
    """Passes on, and counts."""

    def __init__(self, rows: Rows) -> None:
        self.count = 0
        self._rows = rows

    def pull(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.count += 1
        return self._rows.pull(wanted)


def replica_of(task: str, make_job: MakeJob) -> tuple[Replica, Asked]:
    job = make_job(task)
    made = Replica(tasks.load(job), job, Mesh(), Groups.alone(torch.device("cpu")))
    remote = RemoteTables.install(made.model)
    remote.rows = asked = Asked(remote.rows)
    made.tables = remote
    return made, asked


@pytest.mark.parametrize(("text", "requests"), [("", 2), (ROWS, 1)], ids=["each when it is used", "all at once"])
def test_requests_of_a_pass(text: str, requests: int, make_job: MakeJob) -> None:
    replica, asked = replica_of(TASK + text, make_job)
    replica._forward.loss(BATCH, 0).total.sum().backward()
    assert asked.count == requests
    assert isinstance(replica.tables, RemoteTables)
    assert replica.tables.gradients()["users.weight"][0].tolist() == [3, 7]
    replica.tables.clear()
    for number in (2, 3):
        with replica.evaluation.active():
            replica.evaluation.evaluate(BATCH)
        assert asked.count == number * requests
        replica.evaluation.predict(BATCH)
        asked.count = number * requests


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[batch['x']]", "`rows` returned a list, not a dict"),
        ("{'users': batch['x'].float()}", "`rows` returned torch.float32 for `users`, not whole numbers"),
        ("{'users': [1, 2]}", "`rows` returned list for `users`"),
        ("{'user': batch['x']}", "names `user`, which is no table of the model.*Did you mean `users`"),
    ],
)
def test_what_is_no_rows(returned: str, message: str, make_job: MakeJob) -> None:
    replica, _ = replica_of(f"{TASK}\ndef rows(batch):\n    return {returned}\n", make_job)
    with pytest.raises(TaskError, match=message):
        replica._forward.loss(BATCH, 0)


def test_a_table_beyond_all_memory(make_job: MakeJob) -> None:
    job = make_job(TASK.replace("Table(50, 4)", "Table(10**13, 4)"))
    replica = Replica(tasks.load(job), job, Mesh(), Groups.alone(torch.device("cpu")), take_tables=RemoteTables.install)
    assert isinstance(replica.tables, RemoteTables)
    assert [table.shape[0] for table in replica.tables.tables] == [10**13, 60]
    assert not any(parameter.is_meta for parameter in replica.model.parameters())
    ids = torch.tensor([10**13 - 1, 5])
    found = replica.model(ids, torch.tensor([3, 4]))
    assert found.shape == (2, 5)
