"""Simulated federations as whole runs: against plain training, over several workers, interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trained import close, newest, parameters
from verbund.errors import InputError
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]
SGD = {"name": "sgd", "lr": 0.2}
DROPOUT = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5))
"""


def settings(rule: Any = "fedavg", **exchange: Any) -> dict[str, Any]:
    return {
        "strategy.exchange": {"name": "federated", "clients": 8, "rule": rule, **exchange},
        "train.optimizer": SGD,
        "train.global_batch": 10,
    }


def events(run: Run, name: str) -> list[dict[str, Any]]:
    from verbund.observe.journal import read

    return [event for journal in read(run.journal) for event in journal.events if event["name"] == name]


def test_one_local_step_of_all_clients_is_centralised_sgd(run_job: RunJob) -> None:
    """Whole batches and weights by samples: the mean of the clients' steps is the step of all samples (203 here)."""
    how = {"local_steps": 1, "partition": {"name": "dirichlet", "alpha": 0.3}}
    federated = run_job(changes={**settings(**how), "train.global_batch": 203})
    plain = run_job(changes={"train.optimizer": SGD, "train.global_batch": 203})
    close(federated, plain, 1e-6)
    assert federated.summary["loss"]["last"] == pytest.approx(plain.summary["loss"]["last"], rel=1e-5)


@pytest.mark.parametrize("rule", ["fedavg", "scaffold"])
def test_several_workers_divide_the_cohort(rule: str, run_job: RunJob) -> None:
    how = settings(rule, cohort=5, local_epochs=2, partition={"name": "power", "alpha": 1.0})
    alone = run_job(changes={**how, "data.validation_fraction": 0.2})
    three = run_job(changes={**how, "data.validation_fraction": 0.2, "strategy.mesh": {"data": 3}})
    close(alone, three, 1e-6)
    one, other = alone.summary["metrics"]["loss"]["last"], three.summary["metrics"]["loss"]["last"]
    assert one == pytest.approx(other, rel=1e-5)
    rounds = [[(e["cohort"], e["weights"]) for e in events(run, "round")] for run in (alone, three)]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 5


def test_turns_over_several_workers(run_job: RunJob) -> None:
    """Dropout is keyed by the sample, so that it is the same wherever a client is trained."""
    how = settings("fedavgm", cohort=0.5, local_epochs=2)
    alone, two = (run_job(DROPOUT, {**how, "strategy.mesh": {"data": n}}) for n in (1, 2))
    assert any("take turns" in note for note in alone.summary["notes"])
    close(alone, two, 1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        "fedadam",
        "scaffold",
        {"name": "ditto", "proximal": 0.1},
        {"name": "fedbuff", "buffer": 2},
        {"name": "fedper", "personal": ["2.*"]},
        {"name": "fedrep", "personal": ["2.*"]},
    ],
    ids=str,
)
def test_resuming_changes_no_bit(rule: Any, run_job: RunJob) -> None:
    """Parameters, the rule's moments, and what each client keeps go on."""
    how = settings(rule, cohort=5, partition={"name": "dirichlet", "alpha": 0.5})
    whole = run_job(changes={**how, "train.steps": 6})
    part = run_job(changes={**how, "train.steps": 3})
    part = launch.resume(part.path, {"train.steps": 6})
    for name, values in parameters(whole).items():
        assert torch.equal(values, parameters(part)[name]), name
    with newest(whole) as one, newest(part) as other:
        assert one.names("exchange") == other.names("exchange")
        assert one.names("exchange")
        for name in one.names("exchange"):
            assert torch.equal(one.read("exchange", name), other.read("exchange", name)), name
    assert [e["round"] for e in events(part, "round")] == list(range(6))


@pytest.mark.parametrize("rule", ["scaffold", {"name": "fedbuff", "buffer": 2}], ids=str)
def test_what_clients_keep_is_for_the_same_clients_alone(rule: Any, run_job: RunJob) -> None:
    how = settings(rule, cohort=5)
    run = run_job(changes={**how, "train.steps": 3})
    other = {**how["strategy.exchange"], "partition": {"name": "dirichlet", "alpha": 0.5}}
    run = launch.resume(run.path, {"strategy.exchange": other, "train.steps": 6})
    assert any("Clients have other samples than before" in note for note in run.summary["notes"])
    assert run.summary["steps"] == 6
    run = launch.resume(run.path, {"strategy.exchange": {**other, "rule": "fedavg"}, "train.steps": 8})
    assert any("its state, and what clients kept, was dropped" in note for note in run.summary["notes"])


def test_a_run_is_validated_predicted_and_goes_on_otherwise(run_job: RunJob, tmp_path: Any) -> None:
    how = {**settings("fedadam", cohort=4), "data.validation_fraction": 0.2, "train.epochs": 2, "train.steps": None}
    run = run_job(changes={**how, "validate.every": "epoch"})
    assert run.summary["steps"] == 4  # an epoch is two rounds of half of the clients
    assert [step for step, _ in run.summary["metrics"]["loss"]["curve"]] == [2, 4]
    again = launch.validate(run.path, workers=2)
    assert again["metrics"]["loss"] == run.summary["metrics"]["loss"]["last"]
    assert launch.predict(run.path, str(tmp_path / "data.npz")).is_file()
    plain = launch.resume(run.path, {"strategy.exchange": "all_reduce", "train.epochs": None, "train.steps": 6})
    assert any("state of the exchange `federated` was dropped" in note for note in plain.summary["notes"])


def test_personal_models_are_validated_on_samples_like_their_clients(run_job: RunJob) -> None:
    """Two kinds of clients that call the same things by opposite names: no single model fits both, two heads do."""
    random = np.random.default_rng(0)
    x = random.normal(size=(800, 12)).astype(np.float32)
    who = random.integers(0, 8, 800)
    y = np.where(who % 2 == 0, x[:, 0] > 0, x[:, 0] <= 0).astype(np.int64)
    how = settings(clients=None, local_epochs=2, partition={"name": "column", "column": "who"})
    how |= {"data.validation_fraction": 0.25, "train.steps": 6}
    found = {}
    for rule in ("fedavg", {"name": "fedper", "personal": ["2.*"]}, {"name": "ditto", "proximal": 0.01}):
        exchange = {**how["strategy.exchange"], "rule": rule}
        run = run_job(changes={**how, "strategy.exchange": exchange}, x=x, y=y, who=who)
        found[str(rule)] = run.summary["metrics"]["accuracy"]["last"]
        if "fedper" in str(rule):
            two = run_job(
                changes={**how, "strategy.exchange": exchange, "strategy.mesh": {"data": 2}}, x=x, y=y, who=who
            )
            assert two.summary["metrics"]["accuracy"]["last"] == pytest.approx(found[str(rule)], abs=0.011)
    averaged, *personal = found.values()
    assert averaged < 0.65
    assert min(personal) > 0.85


def test_scaffold_finds_the_optimum_where_averaging_does_not(run_job: RunJob) -> None:
    """Least squares with one value a client, in float64: client i has Σ (aᵢ w − bᵢ)², and the optimum is known."""
    task = "from torch import nn\n\ndef model():\n    return nn.Linear(1, 1, bias=False)\n"
    a = np.repeat(np.array([0.3, 1.0, 2.0, 0.6]), 5)
    b = np.repeat(np.array([3.0, -1.0, 0.5, 2.0]), 5)
    data = {"x": a[:, None], "y": b, "who": np.repeat(np.arange(4), 5)}
    optimum = float((a * b).sum() / (a * a).sum())
    found = {}
    for rule in ("fedavg", "scaffold"):
        how = {
            **settings(rule, clients=4, local_steps=8, partition={"name": "column", "column": "who"}),
            "train.objective": "mean_squared_error",
            "train.optimizer": {"name": "sgd", "lr": 0.05},
            "train.precision": "fp64",
            "train.steps": 250,
            "train.global_batch": 5,
        }
        (weight,) = parameters(run_job(task, how, **data)).values()
        found[rule] = abs(float(weight) - optimum)
    assert found["scaffold"] < 1e-7
    assert found["fedavg"] > 0.05


def test_the_journal_tells_of_every_round(run_job: RunJob) -> None:
    run = run_job(changes=settings(cohort=3, rule={"name": "fedavg", "max_weight": 20.0}))
    rounds = events(run, "round")
    assert [e["round"] for e in rounds] == list(range(5))
    count = sum(p.numel() for p in parameters(run).values())
    for event in rounds:
        assert event["clients"] == 3
        assert len(event["cohort"]) == 3
        assert event["bytes"] == {"down": 3 * 4 * count, "up": 3 * 4 * count}
        assert max(event["weights"]) == 20.0  # of about 25 samples
        assert 0 < event["agreement"] <= 1
        assert 0 < event["norm"]["mean"] <= event["norm"]["max"]
    told = run.summary["rounds"]
    assert told["count"] == len(told["table"]) == 5
    assert told["bytes"] == {"down": 5 * 3 * 4 * count, "up": 5 * 3 * 4 * count}
    taken = [client for event in rounds for client in event["cohort"]]
    assert told["participation"]["per_client"] == {str(c): taken.count(c) for c in sorted(set(taken))}
    assert sum(times * clients for times, clients in told["participation"]["histogram"]) == 15
    assert "5 rounds, 3 clients in the last one" in (run.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": None}, "how many clients"),
        ({"clients": 400}, "too few for 400 clients"),
        ({"partition": {"name": "column", "column": "z"}, "clients": None}, "no column `z`"),
        ({"rule": {"name": "fedper", "personal": ["nope.*"]}}, "matches no parameter"),
        ({"rule": {"name": "fedper", "personal": ["*"]}}, "no parameter is left"),
        ({"rule": "fedbn"}, "no normalisation layer"),
        ({"partition": {"name": "column", "column": "y"}, "clients": None, "cohort": 6}, "more than the 5 clients"),
        ({"partition": {"name": "column", "column": "y"}, "clients": None, "rule": "bulyan"}, "needs 7 updates"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(
    changes: dict[str, Any], said: str, run_job: RunJob, tmp_path: Path
) -> None:
    how = settings(**{k: v for k, v in changes.items() if k != "rule"}, rule=changes.get("rule", "fedavg"))
    with pytest.raises(InputError, match=said):
        run_job(changes=how)
    assert not list(tmp_path.glob("run-*"))


def test_a_step_of_one_sample_and_too_many_workers_are_told(run_job: RunJob, tmp_path: Path) -> None:
    norm = DROPOUT.replace("nn.Dropout(0.5)", "nn.BatchNorm1d(16)")
    with pytest.raises(InputError, match="has 29 samples, so that one step of 7 has a single one left"):
        run_job(norm, {**settings(clients=7), "train.global_batch": 7})
    with pytest.raises(InputError, match="3 workers cannot share 2 clients"):
        run_job(changes={**settings(cohort=2), "strategy.mesh": {"data": 3}})
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.optimizer": "adamw", "strategy.exchange.rule": "scaffold"}, "reckons with steps of SGD"),
        ({"train.optimizer": {**SGD, "momentum": 0.9}, "strategy.exchange.rule": "scaffold"}, "needs plain SGD"),
        ({"strategy.islands": 2}, "clients are the islands"),
        ({"strategy.mesh": {"tensor": 2}}, "not `tensor`"),
        ({"train.ema": 0.9}, "train.ema"),
        ({"train.precision": "fp16"}, "fp16"),
        ({"strategy.exchange.cohort": 9}, "more than the 8 clients"),
        ({"strategy.exchange.rule": {"name": "bulyan", "faulty": 2}}, "needs 11 updates"),
        ({"strategy.exchange.local_steps": 2, "strategy.exchange.local_epochs": 2}, "not both"),
        ({"strategy.exchange.rule": {"name": "fedavg", "buffer": 3}}, "`buffer` is for fedbuff"),
        ({"strategy.exchange.every": 3}, "not `federated`"),
        ({"strategy.exchange.rule": "median", "strategy.exchange.secure": {}}, "protects means of differences"),
        ({"strategy.exchange.rule": "fedbuff", "strategy.exchange.secure": {}}, "protects means of differences"),
        ({"strategy.exchange.rule": {"refuse_beyond": 3.0}, "strategy.exchange.secure": {}}, "which `secure` hides"),
        ({"strategy.exchange.rule": "krum", "strategy.exchange.privacy": "central"}, "protects means of differences"),
        ({"strategy.exchange.privacy": "central"}, "all clients count the same"),
        ({"strategy.exchange.privacy": "distributed"}, "needs secure aggregation"),
        ({"strategy.exchange.secure": {"threshold": 0.3}}, "greater than 0.5"),
    ],
)
def test_what_excludes_what(changes: dict[str, Any], said: str, make_job: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=said):
        make_job(changes={**settings(), **changes})
