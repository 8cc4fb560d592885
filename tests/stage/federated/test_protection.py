"""Simulated federations with privacy and secure aggregation, as whole runs."""

from __future__ import annotations

import html
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exchange.federated.secure.rounds import Federation, Play
from trained import close
from verbund.errors import InputError, JobError
from verbund.exchange.federated.privacy import Accountant, Event
from verbund.exchange.federated.protection import Protection
from verbund.exchange.federated.secure.fixed_point import FixedPoint
from verbund.job import Exchange
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.federated import packages

RunJob = Callable[..., Run]
UNIFORM = {"name": "fedavg", "weights": "uniform"}


def settings(**exchange: Any) -> dict[str, Any]:
    return {
        "strategy.exchange": {"name": "federated", "clients": 8, "local_steps": 2, "rule": UNIFORM, **exchange},
        "train.optimizer": {"name": "sgd", "lr": 0.2},
        "train.global_batch": 10,
    }


def test_secure_aggregation_changes_nothing_but_the_last_bits(run_job: RunJob) -> None:
    plain = run_job(changes=settings())
    secure = run_job(changes=settings(secure={"bits": 24}))
    close(plain, secure, 1e-6)
    two = run_job(changes={**settings(secure={"bits": 24}), "strategy.mesh": {"data": 2}})
    close(secure, two, 1e-6)


def test_weights_are_capped_whole_numbers(run_job: RunJob) -> None:
    how = {"rule": "fedavg", "partition": {"name": "power", "alpha": 1.0}}
    plain = run_job(changes=settings(**how))
    secure = run_job(changes=settings(**how, secure={"bits": 24, "max_weight": 1000}))
    close(plain, secure, 1e-6)


def test_the_simulation_adds_up_what_the_protocol_adds_up() -> None:
    exchange = Exchange.model_validate({"name": "federated", "clients": 6, "secure": {"bits": 12, "max_weight": 9}})
    protection = Protection(exchange, {"a": (4, 5), "b": (7,)}, 6, None, seed=0)
    random = torch.Generator().manual_seed(1)
    sums = protection.begin(0, range(6))
    federation = Federation(6, 27, {"bits": 12, "max_weight": 9})
    fixed, vectors, weights = FixedPoint(12, 1.0), {}, {}
    for client, name in enumerate(federation.names):
        update = {"a": torch.rand(4, 5, generator=random) - 0.5, "b": torch.rand(7, generator=random) - 0.5}
        sums.add(client, update, client + 4.0)
        vectors[name] = fixed.round(protection.layout.join(update))
        weights[name] = client + 4
    found = sums.close()
    result = Play(federation, vectors, weights).run()
    mean = protection.layout.split(result.mean(fixed))
    assert found.weight == result.weight
    for name, values in mean.items():
        np.testing.assert_array_equal(found.mean(name).numpy(), torch.from_numpy(values.copy()).numpy())


@pytest.mark.parametrize(
    "protection",
    [
        {"privacy": {"kind": "central", "noise": 0.8, "adaptive": True, "clip": 0.1}},
        {"privacy": {"kind": "central", "noise": 0.8, "sampling": "poisson"}, "cohort": 4},
        {"privacy": {"kind": "local", "noise": 5.0, "clip": 0.1}, "cohort": 4},
        {"privacy": {"kind": "distributed", "noise": 0.8, "clip": 0.5}, "secure": {}},
        {"privacy": {"kind": "central", "noise": 0.8, "clip": 0.5}, "secure": {}},
    ],
    ids=["adaptive", "poisson", "local", "distributed", "central and secure"],
)
def test_what_was_spent_is_told_and_goes_on(protection: dict[str, Any], run_job: RunJob) -> None:
    """Over two workers, and in a run that is resumed: the same bits, and the same ε."""
    how = settings(**protection)
    whole = run_job(changes={**how, "train.steps": 4, "strategy.mesh": {"data": 2}})
    spent = whole.summary["privacy"]
    assert 0 < spent["epsilon"] < 100
    assert spent["releases"] == 4 or protection["privacy"]["kind"] == "local"
    assert ("Poisson sampling at rate 0.5" in spent["statement"]) == ("sampling" in protection["privacy"])
    assert sum(spent["statement"] in line for line in whole.headline()) == 1
    assert spent["statement"] in html.unescape(whole.report.read_text())
    if "sampling" not in protection["privacy"] and "secure" not in protection:
        part = run_job(changes={**how, "train.steps": 2})
        part = launch.resume(part.path, {"train.steps": 4})
        close(whole, part, 1e-6)
        assert spent == part.summary["privacy"]


def test_the_budget_ends_a_run(run_job: RunJob) -> None:
    accountant = Accountant(1e-5)
    accountant.spend(Event(noise=2.0), 3)
    budget = accountant.spent().epsilon + 1e-6
    run = run_job(changes=settings(privacy={"kind": "central", "noise": 2.0, "budget": budget}))
    assert run.summary["steps"] == 3
    assert run.summary["status"] == "done"
    assert run.summary["ended_by"] == "budget"
    (outlook,) = (note for note in run.summary["notes"] if "is enough for 3 of 5 rounds" in note)
    enough = float(outlook.partition("noise` of about ")[2].split()[0])
    assert enough == pytest.approx(2.0 * (5 / 3) ** 0.5, rel=0.1)
    assert run.summary["privacy"]["epsilon"] <= budget
    assert launch.resume(run.path).summary["steps"] == 3
    more = launch.resume(run.path, {"strategy.exchange.privacy.budget": 2 * budget})
    assert (more.summary["steps"], more.summary["privacy"]["releases"]) == (5, 5)


def test_a_budget_for_nothing_is_an_error(run_job: RunJob) -> None:
    with pytest.raises(InputError, match=r"enough for 0 of 5 rounds. .privacy.noise. of about") as caught:
        run_job(changes=settings(privacy={"kind": "central", "budget": 0.1}))
    assert caught.value.exit_status == 2


def test_a_value_out_of_range_names_client_and_parameter(run_job: RunJob) -> None:
    with pytest.raises(Exception, match=r"client \d, .*beyond 1e-06") as caught:
        run_job(changes=settings(secure={"range": 1e-6}))
    assert "secure.range" in str(caught.value)


def test_another_privacy_does_not_go_on_from_what_was_spent(run_job: RunJob) -> None:
    run = run_job(changes={**settings(privacy={"kind": "central"}), "train.steps": 1})
    with pytest.raises(Exception, match="had the privacy `central` and now has `local`"):
        launch.resume(run.path, {"strategy.exchange.privacy.kind": "local", "train.steps": 2})


def test_missing_packages_are_named(make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(changes=settings(secure={}))
    packages.check(job)
    found = importlib.util.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "cryptography" else found(name))
    with pytest.raises(InputError, match=r"needs cryptography, which is not installed.*verbund\[federated\]"):
        packages.check(job)
    packages.check(make_job(changes=settings()))


def test_without_protection_nobody_needs_its_packages(tmp_path: Path) -> None:
    modules = "simulate, aggregate, island, client, serve"
    code = f"import sys; from verbund.stage.federated import {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"cryptography", "dp_accounting", "scipy"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        ({"rule": "scaffold", "secure": {}}, "`scaffold` needs more"),
        ({"cohort": 2, "secure": {}}, "cohort of 2 is less than `secure.minimum`"),
        ({"privacy": "distributed"}, "needs secure aggregation"),
        ({"privacy": {"kind": "central", "sampling": "poisson"}, "secure": {}}, "would tell who came"),
        ({"rule": "fedavg", "privacy": "local"}, "all clients count the same"),
        ({"rule": "fedavg", "secure": {}}, "or raise it to the most samples"),
        ({"rule": {**UNIFORM, "clip_norm": 3.0}, "privacy": "central"}, "give `privacy.clip`"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    exchange: dict[str, Any], said: str, make_job: Callable[..., Any]
) -> None:
    with pytest.raises(JobError, match=said):
        make_job(changes=settings(**exchange))
