"""DP-SGD at the clients: their local steps against plain loops, accounts, budgets, and whole runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import MLP, MakeJob, wait_for
from federation import federation
from stage.federated.test_kills import CHANGES, NAMES
from storm import Federation
from trained import close
from verbund import task as tasks
from verbund.data.prepare import Prepared, prepare
from verbund.data.sets import open_sets
from verbund.errors import InputError, JobError
from verbund.exchange.federated.privacy import Accountant, Event
from verbund.exchange.federated.privacy.example_accounts import ExampleAccounts
from verbund.job import Privacy
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.federated.local import Assignment

RunJob = Callable[..., Run]
DROPOUT = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5))
"""


def settings(**privacy: Any) -> dict[str, Any]:
    return {
        "strategy.exchange": {
            "name": "federated",
            "clients": 4,
            "privacy": {"kind": "examples", "noise": 1.5, "clip": 0.5, **privacy},
        },
        "train.optimizer": {"name": "sgd", "lr": 0.2},
        "train.global_batch": 10,
    }


def data(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    return {"x": random.normal(size=(rows, 12)).astype(np.float32), "y": random.integers(0, 5, rows)}


def clipped_by_hand(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> dict[str, Tensor]:
    """Σ gᵢ · min(1, C / ‖gᵢ‖), one sample after the other (Abadi et al. 2016, algorithm 1)."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row, label in zip(x, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(row[None]), label[None]).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] += p.grad * min(1.0, bound / float(norm))
    return total


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.usefixtures("one_thread")
def test_a_round_is_that_of_a_plain_loop(tmp_path: Path, precision: str) -> None:
    """Parameters after a round, in float64, against samples taken one by one with the very batches and noise."""
    how = {"clients": 1, "local_steps": 4, "privacy": {"kind": "examples", "noise": 0.7, "clip": 0.3}}
    train = {"global_batch": 9, "precision": precision, "micro_batch": 4}
    columns = data(40)
    found = federation(tmp_path, MLP, how, train, **columns)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).double()
    model.load_state_dict({name: values.double() for name, values in found.server.parameters.items()})
    assert found.local.examples is not None
    assert found.local.examples.try_out(found.local.batch(np.arange(3), 0)) is None, "all samples are one computation"
    found.play(1)
    order = found.local.order(Assignment(0, 0, 0, {}), found.parts.of(0))
    sizes = []
    for step in range(4):
        ids = order.step(step)
        sizes.append(len(ids))
        x, y = torch.from_numpy(columns["x"][ids]).double(), torch.from_numpy(columns["y"][ids])
        total = clipped_by_hand(model, x, y, 0.3)
        assert order.privacy is not None
        noisy = order.privacy.noisy(total, order.ticket(step))
        with torch.no_grad():
            for name, values in model.named_parameters():
                values -= 0.1 * noisy[name]
    assert len(set(sizes)) > 1, "Poisson batches differ in size"
    limit = 1e-10 if precision == "fp64" else 2e-5
    for name, values in model.named_parameters():
        torch.testing.assert_close(found.server.parameters[name].double(), values.detach(), rtol=limit, atol=limit)


@pytest.mark.usefixtures("one_thread")
def test_samples_take_turns_where_the_model_draws(tmp_path: Path) -> None:
    """Dropout is keyed by the sample, which vmap does not know: the same sum as of single forward passes."""
    how = {"clients": 1, "privacy": {"kind": "examples", "noise": 1e-9, "clip": 0.3}}
    found = federation(tmp_path, DROPOUT, how, {"global_batch": 9}, **data(40))
    examples, local = found.local.examples, found.local
    assert examples is not None
    assert "would differ" in str(examples.try_out(local.batch(np.arange(3), 0)))
    local.put(found.server.parameters)
    order = local.order(Assignment(0, 0, 0, {}), found.parts.of(0))
    ids, ticket = order.step(0), order.ticket(0)
    assert order.privacy is not None
    examples.step(ids, ticket, local.batch, order.privacy)
    left = {name: p.grad.clone() for name, p in local.replica.model.named_parameters() if p.grad is not None}
    total = {name: torch.zeros_like(values, dtype=torch.float64) for name, values in left.items()}
    for one in range(len(ids)):
        local.replica.model.zero_grad()
        local.replica.losses(local.batch(ids[one : one + 1], ticket)).total.sum().backward()
        single = {name: p.grad.double() for name, p in local.replica.model.named_parameters() if p.grad is not None}
        norm = torch.cat([values.flatten() for values in single.values()]).norm()
        for name, values in single.items():
            total[name] += values * min(1.0, 0.3 / float(norm))
    for name, values in total.items():
        torch.testing.assert_close(left[name].double(), values / 9.0, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("one_thread")
def test_noise_is_there_even_without_samples(tmp_path: Path) -> None:
    """Standard deviation σ C / (q n), for every parameter, whatever the batch; and never the same twice."""
    task = "from torch import nn\n\ndef model():\n    return nn.Linear(12, 4000)\n"
    how = {"clients": 1, "privacy": {"kind": "examples", "noise": 2.0, "clip": 0.1}}
    found = federation(tmp_path, task, how, {"global_batch": 8}, **data(40))
    examples = found.local.examples
    assert examples is not None
    drawn = []
    for secret in ("a", "b"):
        privacy = examples.privacy(found.job.strategy.exchange.privacy, found.job, 40, secret, 0)
        assert examples.step(np.zeros(0, np.int64), 5, found.local.batch, privacy) == (0.0, 0.0)
        drawn.append(torch.cat([p.grad.flatten() for p in found.local.replica.parameters if p.grad is not None]))
    deviation, count = 2.0 * 0.1 / 8.0, len(drawn[0])
    for values in drawn:
        assert float(values.std()) == pytest.approx(deviation, rel=0.02)
        assert abs(float(values.mean())) < 5 * deviation / count**0.5
        fourth = float((values / deviation).double().pow(4).mean())
        assert fourth == pytest.approx(3.0, abs=0.2), "as of a normal distribution"
    assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 5 / count**0.5


def test_what_was_spent_is_told_and_goes_on(run_job: RunJob) -> None:
    """Two workers share the clients; a run that is resumed comes to the same bits and the same ε."""
    how = settings()
    whole = run_job(changes={**how, "train.steps": 4, "strategy.mesh": {"data": 2}})
    part = run_job(changes={**how, "train.steps": 2})
    part = launch.resume(part.path, {"train.steps": 4})
    close(whole, part, 1e-6)
    each = []
    for rows in (50, 51):  # the smaller part has the larger rate, and fewer steps
        accountant = Accountant(1e-5)
        accountant.spend(Event(noise=1.5, rate=10 / rows), 4 * -(-rows // 10))
        each.append(accountant.spent().epsilon)
    for run in (whole, part):
        spent = run.summary["privacy"]
        assert spent["epsilon"] == pytest.approx(max(each), rel=1e-9)
        assert "any one sample of any client" in spent["statement"]
        assert "Poisson sampling" in spent["statement"]
        assert spent["statement"] in "".join(run.headline())
        assert spent["statement"].split(",")[0] in run.report.read_text()


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"accounts": None}, "had no privacy of single samples so far"),
        ({"accounts": {}, "parts": "other"}, "what was told of each would not be counted"),
    ],
)
def test_what_was_told_before_must_be_counted(tmp_path: Path, saved: dict[str, Any], said: str) -> None:
    found = federation(tmp_path, MLP, settings()["strategy.exchange"], {}, **data(40))
    record = {"name": "federated", "rule": "fedavg", "protection": None, **saved}
    with pytest.raises(InputError, match=said):
        found.server.load(SimpleNamespace(state={"exchange": record}, names=lambda kind: []))  # type: ignore[arg-type]


def test_clients_whose_budget_is_spent_train_no_more(run_job: RunJob) -> None:
    """Uneven clients: the few samples of one are spent first; the run ends when all are."""
    who = np.repeat([0, 1], [40, 80])
    random = np.random.default_rng(7)
    x, y = random.normal(size=(120, 12)).astype(np.float32), random.integers(0, 5, 120)

    def after(rounds: int, samples: int) -> float:
        accountant = Accountant(1e-5)
        accountant.spend(Event(noise=1.5, rate=10 / samples), rounds * -(-samples // 10))
        return accountant.spent().epsilon

    assert after(2, 40) > after(3, 80)
    exchange = settings(budget=after(2, 40) + 1e-6)["strategy.exchange"]
    exchange |= {"clients": None, "partition": {"name": "column", "column": "who"}}
    run = run_job(changes={**settings(), "strategy.exchange": exchange, "train.steps": 12}, x=x, y=y, who=who)
    cohorts = [row["clients"] for row in run.summary["rounds"]["table"]]
    assert cohorts[:3] == [2, 2, 1]
    assert run.summary["ended_by"] == "budget"
    assert run.summary["steps"] < 12
    assert any("clients whose budget is spent train no more" in note for note in run.summary["notes"])
    assert after(2, 40) <= run.summary["privacy"]["epsilon"] <= after(2, 40) + 1e-6
    accounts = ExampleAccounts(Privacy(kind="examples", budget=0.01), [(Event(noise=1.0, rate=0.1), 10)])
    with pytest.raises(InputError, match=r"not enough for one round of any client.*of about"):
        accounts.outlook(3, 1.0)


def test_the_worst_of_many_accounts() -> None:
    """Small clients have larger rates and fewer steps: the largest ε is found among all of them."""
    settings = Privacy(kind="examples", noise=1.0)
    rounds = [(Event(noise=1.0, rate=10 / n), -(-n // 10)) for n in (20, 50, 100, 400)]
    accounts = ExampleAccounts(settings, rounds)
    assert accounts.worst().releases == 0
    accounts.spend([0, 1, 2, 3])
    for _ in range(30):
        accounts.spend([3])
    each = []
    for (event, steps), times in zip(rounds, (1, 1, 1, 31), strict=True):
        account = Accountant(settings.delta)
        account.spend(event, steps * times)
        each.append(account.spent().epsilon)
    assert accounts.worst().spent().epsilon == max(each)
    again = ExampleAccounts(settings, rounds)
    again.load(json.loads(json.dumps(accounts.state())))
    assert again.worst().spent() == accounts.worst().spent()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.clip_norm": 1.0}, "leave out `train.clip_norm`"),
        ({"train.objective": {"name": "cross_entropy", "class_weights": [1.0] * 5}}, "leave out `class_weights`"),
        ({"strategy.exchange.rule": "ditto"}, "would have to pay"),
        ({"strategy.exchange.rule": {"name": "fedbuff", "buffer": 2}}, "round by round"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str, make_job: MakeJob) -> None:
    with pytest.raises(JobError, match=said):
        make_job(changes={**settings(), **changes})


def test_a_model_that_mixes_samples_is_refused_before_training(run_job: RunJob) -> None:
    task = "from torch import nn\n\ndef model():\n    return nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 5))\n"
    with pytest.raises(InputError, match="mixes the samples of a batch"):
        run_job(task, settings())


def test_real_clients_keep_account_and_end_by_their_budget(
    tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]
) -> None:
    """One of the clients is killed between; nothing without noise leaves, and no two rounds have the same noise."""
    job = make_job(changes=CHANGES)
    prepared = Prepared(prepare(job.data, folder=Path(job.folder)).train, None)
    rows = len(open_sets(prepared, job, tasks.load(job))[0])
    accountant = Accountant(1e-5)
    event, steps = Event(noise=3.0, rate=16 / rows), -(-rows // 16)
    accountant.spend(event, 2 * steps)
    exact = accountant.spent().epsilon
    privacy = {"kind": "examples", "noise": 3.0, "budget": exact + 1e-6}
    exchange = {**CHANGES["strategy.exchange"], "rule": "fedavg", "privacy": privacy}
    job = make_job(changes={**CHANGES, "train.steps": 5, "strategy.exchange": exchange})
    storm = Federation(tmp_path / "storm", job, nursery, NAMES)
    for who, at in (("server", None), ("south", None), ("north", 12)):
        storm.start(who, at)
    wait_for(lambda: storm.ended("north"), "the end of north", 60.0)
    assert storm.result("north") is None, "it was killed"
    storm.start("north")
    assert storm.finish()["phase"] == "done"
    events = storm.events()
    updates = [event for event in events if event["event"] == "update"]
    assert not any(event["sums"] or "state" in event for event in updates)
    assert [event["why"] for event in events if event["event"] == "ended"] == ["budget"]
    assert len({event["sha256"] for event in updates}) == len(updates)
    assert [event["round"] for event in events if event["event"] == "stepped"] in ([1], [1, 2])
    for name in NAMES:
        state = json.loads(next((storm.folder / name).glob("jobs/*/state.json")).read_text())
        (spent,) = state["spent"]
        assert spent["event"] == event.record()
        assert spent["count"] in (steps, 2 * steps)
        assert max(each["epsilon"] for each in updates if each["client"] == name) <= exact
