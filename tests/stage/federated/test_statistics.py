"""Statistics of columns: exact against pooled data, protected as owners want, and told once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MakeJob, wait_for
from stage.federated.test_kills import CHANGES, NAMES
from storm import Federation
from verbund.data.prepare import prepare
from verbund.errors import DataError, InputError, JobError
from verbund.exchange.federated.policy import Policy
from verbund.exchange.federated.privacy import Accountant, Event
from verbund.exchange.federated.statistics import RELEASES, noise_of, noisy, summed, withheld
from verbund.job.federated_statistics import ColumnStatistics
from verbund.observe.report.statistics import statistics as section
from verbund.observe.statistics import combined
from verbund.stage.federated.requests import statistics_of
from verbund.stage.federated.statistics import answer

AGE = ColumnStatistics(low=0.0, high=100.0, bins=50)


def owners() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    sizes, means = (400, 900, 60), (30.0, 60.0, 95.0)
    return [random.normal(mean, 15.0, size) for mean, size in zip(means, sizes, strict=True)]


def test_without_noise_it_is_what_pooled_data_have() -> None:
    parts = owners()
    parts[1][:7] = np.nan
    told = {f"owner {i}": summed(np.array_split(each, 3), AGE, bounded=False) for i, each in enumerate(parts)}
    found = combined(told, AGE.low, AGE.high)
    pooled = np.concatenate(parts)
    pooled = pooled[np.isfinite(pooled)]
    assert found["count"] == len(pooled)
    assert found["mean"] == pytest.approx(pooled.mean(), rel=1e-12)
    assert found["deviation"] == pytest.approx(pooled.std(), rel=1e-10)
    inside, _ = np.histogram(pooled, 50, (0.0, 100.0))
    assert found["bins"] == [(pooled < 0).sum(), *inside, (pooled > 100).sum()]
    for share, value in found["quantiles"].items():
        exact = float(np.clip(np.quantile(pooled, float(share)), 0.0, 100.0))
        assert value == pytest.approx(exact, abs=2.0), "to the width of a bin"
    shares = [np.array(each["bins"]) / sum(each["bins"]) for each in told.values()]
    whole = np.array(found["bins"]) / len(pooled)
    for own, each in zip(shares, found["clients"].values(), strict=True):
        assert each["distance"] == pytest.approx(0.5 * np.abs(own - whole).sum())
    assert found["clients"]["owner 2"]["distance"] > 0.5


def test_a_variance_far_from_zero_is_exact() -> None:
    """Sums of squares are of the distances from the middle: nothing cancels out."""
    column = ColumnStatistics(low=1e8, high=1e8 + 10, bins=5)
    values = 1e8 + np.random.default_rng(1).uniform(0, 10, 5000)
    found = combined({"a": summed([values], column, bounded=False)}, column.low, column.high)
    assert found["deviation"] == pytest.approx(values.std(), rel=1e-9)


def test_few_samples_are_not_told() -> None:
    told = {"count": 120, "sum": 1.0, "squares": 2.0, "bins": [0, 4, 50, 36, 30, 0]}
    assert withheld({**told, "count": 9}, 10) is None
    found = withheld(told, 10)
    assert found is not None
    assert found["bins"] == [0, None, 50, 36, None, 0], "one bin alone would follow from the count"
    assert withheld({**told, "bins": [0, 12, 42, 36, 30, 0]}, 10) == {**told, "bins": [0, 12, 42, 36, 30, 0]}
    both = withheld({**told, "bins": [0, 6, 48, 36, 23, 7]}, 10)
    assert both is not None
    assert both["bins"] == [0, None, 48, 36, 23, None], "13 together cannot be told apart"


def test_noise_costs_what_it_says_and_has_its_size() -> None:
    noise = noise_of(2.0, 1e-5, columns=3)
    accountant = Accountant(1e-5)
    accountant.spend(Event(noise=noise), RELEASES * 3)
    assert 1.9 < accountant.spent().rdp <= 2.0
    values = np.array([-50.0, *np.full(99, 75.0), 400.0])
    bounded = summed([values], AGE, bounded=True)
    assert bounded["sum"] == pytest.approx(-50 + 99 * 25 + 50), "values beyond count as the nearer end"
    drawn = [noisy(bounded, AGE, noise) for _ in range(400)]
    spread = {key: np.std([each[key] for each in drawn]) for key in ("count", "sum", "squares")}
    assert spread["count"] == pytest.approx(noise, rel=0.15)
    assert spread["sum"] == pytest.approx(50 * noise, rel=0.15)
    assert spread["squares"] == pytest.approx(2500 * noise, rel=0.15)
    bins = np.array([each["bins"] for each in drawn]) - np.array(bounded["bins"])
    assert bins.std() == pytest.approx(noise, rel=0.05)
    assert np.mean([each["count"] for each in drawn]) == pytest.approx(101, abs=5 * noise / 20)


def asked(make_job: MakeJob, **columns: Any) -> Any:
    exchange = {**CHANGES["strategy.exchange"], "statistics": columns}
    return make_job(changes={**CHANGES, "strategy.exchange": exchange})


def test_owners_permit_which_and_how(make_job: MakeJob) -> None:
    job = asked(make_job, y={"low": 0.0, "high": 5.0, "bins": 5})
    table = prepare(job.data, folder=Path(job.folder)).train
    assert table is not None
    y = np.load(job.path("data.npz"))["y"]
    for may in ([], ["x"]):
        assert answer(job, Path(table), Policy(statistics=may)) == {"declined": "policy, statistics"}
    told = answer(job, Path(table), Policy(statistics=["y"]))["columns"]["y"]
    assert (told["count"], told["sum"]) == (203, pytest.approx(float((y - 2.5).sum())))
    few = answer(job, Path(table), Policy(statistics=["*"], statistics_minimum=204))
    assert few["columns"] == {"y": None}
    loud = answer(job, Path(table), Policy(statistics=["*"], statistics_epsilon=1.0))
    assert loud["noise"] > 1
    assert loud["columns"]["y"]["count"] != 203
    for name, said in (("x", "not a column of single numbers"), ("z", "is not there")):
        with pytest.raises(DataError, match=said):
            answer(asked(make_job, **{name: {}}), Path(table), Policy(statistics=["*"]))
    with pytest.raises(JobError, match="must be below"):
        asked(make_job, y={"low": 5.0, "high": 5.0})


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {"columns": {}},
        {"columns": {"y": {"count": 1, "sum": 1.0, "squares": 1.0}}},
        {"columns": {"y": {"count": 1, "sum": 1.0, "squares": float("nan"), "bins": [1, 2, 3]}}},
        {"columns": {"y": {"count": 1, "sum": 1.0, "squares": 1.0, "bins": [1, 2]}}},
        {"columns": {"y": {"count": 1, "sum": 1.0, "squares": 1.0, "bins": [1, "2", 3]}}},
        {"columns": {"y": None}, "noise": "loud"},
    ],
    ids=str,
)
def test_what_clients_say_is_checked(wrong: Any) -> None:
    with pytest.raises(InputError):
        statistics_of({"answer": wrong}, {"y": 1})


def test_real_clients_are_asked_once(tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]) -> None:
    """One owner adds noise and is killed, one permits nothing; training goes on with both."""
    job = asked(make_job, y={"low": 0.0, "high": 5.0, "bins": 5})
    storm = Federation(tmp_path / "storm", job, nursery, NAMES)
    storm.policies["north"] = {"tasks": ["*"], "statistics": ["y"], "statistics_epsilon": 3.0}
    for who, at in (("server", None), ("south", None), ("north", 9)):
        storm.start(who, at)
    wait_for(lambda: storm.ended("north"), "the end of north", 60.0)
    if storm.result("north") is None:
        storm.start("north")
    assert storm.finish()["phase"] == "done"
    events = storm.events()
    answers = {event["client"]: event["answer"] for event in events if event["event"] == "statistics"}
    assert sum(event["event"] == "statistics" for event in events) == 2
    assert answers["south"] == {"declined": "policy, statistics"}
    kept = json.loads(next((storm.folder / "north").glob("jobs/*/state.json")).read_text())
    assert kept["statistics"] == answers["north"], "noise is drawn once"
    assert answers["north"]["columns"]["y"]["count"] == pytest.approx(203, abs=40)


def test_the_report_says_how_clients_differ() -> None:
    told = {f"owner {i}": summed([each], AGE, bounded=False) for i, each in enumerate(owners())}
    found = {"columns": {"age": combined(told, 0.0, 100.0), "size": None}, "declined": {"<b>": "policy, statistics"}}
    html = section({"statistics": {**found, "noise": True}})
    for part in ("age (quantiles", "owner 2", "size: nothing was told", "&lt;b&gt; told nothing", "added noise"):
        assert part in html
    assert not section({})
