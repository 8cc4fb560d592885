"""The job file: what it may leave short, and what is said of what it may not have."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from verbund.errors import InputError, JobError, Problem
from verbund.job import Job, parse_changes, parse_strategy

RAW: dict[str, Any] = {"task": "task.py", "train": {"steps": 3}, "data": {"validation": "other.csv"}}


def build(raw: dict[str, Any] | None = None, /, **changes: Any) -> Job:
    return Job.build(raw or RAW, changes, source="job.toml", folder=Path("/nowhere"))


def said(**changes: Any) -> str:
    with pytest.raises(JobError) as caught:
        build(**changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"train.objective": "cross_entropy"}, {"train.objective": {"name": "cross_entropy"}}),
        ({"train.optimizer": "sgd"}, {"train.optimizer": {"name": "sgd"}}),
        ({"train.schedule": "cosine"}, {"train.schedule": {"name": "cosine"}}),
        ({"train.patience": 3}, {"train.patience": {"validations": 3}}),
        ({"train.activation_checkpointing": "blocks.*"}, {"train.activation_checkpointing": ["blocks.*"]}),
        ({"validate.metrics": "accuracy"}, {"validate.metrics": ["accuracy"]}),
        ({"data.image_size": 32}, {"data.image_size": [32, 32]}),
    ],
)
def test_what_may_be_left_short(short: dict[str, Any], long: dict[str, Any]) -> None:
    assert build(**short).resolved() == build(**long).resolved()


def test_changes_stay_the_callers() -> None:
    exchange = {"name": "diloco"}
    assert build(**{"strategy.exchange": exchange, "strategy.exchange.every": 3}).strategy.exchange.every == 3
    assert exchange == {"name": "diloco"}


def test_a_key_below_a_value_that_was_left_short() -> None:
    raw = {**RAW, "train": {"steps": 3, "schedule": "cosine", "optimizer": "sgd", "patience": 2}}
    keys = {"train.schedule.warmup": 7, "train.optimizer.momentum": 0.9, "train.patience.metric": "accuracy"}
    train = build(raw, **keys).train
    assert (train.schedule.name, train.schedule.warmup) == ("cosine", 7)
    assert (train.optimizer.name, train.optimizer.arguments()) == ("sgd", {"momentum": 0.9})
    assert train.patience is not None
    assert (train.patience.validations, train.patience.metric) == (2, "accuracy")
    assert raw["train"]["schedule"] == "cosine", "what was given is left as it was"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train", 5, "arguments, train: must be a table of keys, but is 5."),
        ("train.target", 0.5, 'a table of keys, e.g. `{ metric = "accuracy", value = 0.9 }`, but is 0.5.'),
        ("train.target.metric", "accuracy", "job.toml, train.target.value: is missing; it is a number."),
        ("train.patience", "loss", "train.patience.validations: must be a whole number greater than 0"),
        ("train.patience", True, 'a whole number greater than 0 or a table of keys, e.g. `{ metric = "loss"'),
        ("train.epochs", 2.5, "must be a whole number greater than 0, but is 2.5."),
        ("train.seconds", math.inf, "must be a number greater than 0, but is inf."),
        ("train.optimizer.groups", 1, 'a list of tables, e.g. `[{ match = "*.bias", weight_decay = 0.0 }]`'),
        ("train.optimizer.groups", [{"lr": 1.0}], "train.optimizer.groups.0.match: is missing; it is text or a list"),
        ("train.schedule", {"name": "step"}, "schedule `step` needs `every`"),
        ("data.loaders", 99, "must be a whole number at least 0 and at most 64, but is 99."),
        ("data.image_size", [1], "must be a list of 2 whole numbers greater than 0, e.g. `[32, 32]`, but is [1]."),
        ("data.scale", 255.0, "a table of numbers, e.g. `{ image = 255.0 }`, but is 255.0."),
        ("data.scale", {"image": math.nan}, "a table of numbers, e.g. `{ image = 255.0 }`, but is { image = nan }."),
        ("data.input", ["a", 2], 'must be text or a list of texts, but is ["a", 2].'),
        ("strategy.mesh", 2, "a table of whole numbers, e.g. `{ data = 2 }`, but is 2."),
        ("strategy.mesh.data", "two", 'but is { data = "two" }.'),
        ("strategy.compression", 2.5, "none"),
        ("strategy.compression", {"name": "top_k", "density": 0}, "a number greater than 0 and at most 1, but is 0"),
        ("strategy.compression", {"name": "int8", "rank": 2}, "`rank` belongs to `power_sgd`, not to `int8`"),
        ("strategy", {"mesh": {"shard": 2}, "compression": "top_k"}, "the axis `shard`"),
        ("strategy", {"mesh": {"shard": 2, "data": 2}, "compression": "int8"}, "Use `fp16` or `bf16`"),
        ("task.x", 1, 'arguments, task.x: `task` is "task.py", which has no keys. Set `task` as a whole.'),
        ("train.steps.x", 1, "arguments, train.steps.x: `train.steps` is 3, which has no keys."),
        ("folder", "/", "job.toml, folder: unknown key."),
    ],
)
def test_what_must_be(key: str, value: Any, words: str) -> None:
    assert words in said(**{key: value})


@pytest.mark.parametrize(
    ("key", "typo", "meant"),
    [
        ("train.objective", "cross_entrpy", "cross_entropy"),
        ("train.objective.name", "mean_square_error", "mean_squared_error"),
        ("train.objective", "MSE", "mean_squared_error"),
        ("train.schedule", "cosin", "cosine"),
        ("train.precision", "float16", "fp16"),
        ("train.precision", "bf61", "bf16"),
        ("train.randomness", "sampel", "sample"),
        ("train.batch_norm", "globl", "global"),
        ("validate.every", "epohc", "epoch"),
        ("checkpoint.every", "ned", "end"),
        ("cluster.kind", "locale", "local"),
        ("strategy.exchange", "dilocco", "diloco"),
        ("strategy.exchange", "ps", "parameter_server"),
        ("strategy.exchange.consistency", "synchronous", "bulk_synchronous"),
        ("strategy.exchange.consistency", "bounded", "bounded_staleness"),
        ("strategy.exchange.consistency", "async", "asynchronous"),
        ("strategy.mesh", {"dta": 2}, "data"),
        ("strategy.compression", "powersgd", "power_sgd"),
        ("strategy.compression", "topk", "top_k"),
    ],
)
def test_a_misspelt_choice(key: str, typo: Any, meant: str) -> None:
    assert f"Did you mean `{meant}`?" in said(**{key: typo})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.optimiser", "`optimizer`"),
        ("trian.steps", "`train`"),
        ("steps", "`train.steps`"),
        ("lr", "`train.optimizer.lr`"),
        ("train.every", "`validate.every` or `checkpoint.every`"),
        ("train.batch_size", "`train.global_batch`"),
        ("train.learning_rate", "`train.optimizer.lr`"),
        ("train.workers", "`strategy.mesh`"),
        ("data.metric", "`train.target.metric` or `train.patience.metric`"),
        ("validate.qqq", None),
    ],
)
def test_an_unknown_key(key: str, meant: str | None) -> None:
    hint = f"Did you mean {meant}?" if meant else "Known: batch, every, metrics."
    assert f"{key.partition('.')[0] if key.startswith('trian') else key}: unknown key. {hint}" in said(**{key: 1})


def test_a_compiled_model_that_repeats_what_it_draws() -> None:
    both = {"train.compile": True, "train.activation_checkpointing": True}
    assert 'set `train.randomness = "worker"`' in said(**both)
    assert build(**both, **{"train.randomness": "worker"}).train.compile


def test_where_a_problem_is() -> None:
    raw = {**RAW, "train": {"steps": 0}}
    with pytest.raises(JobError) as caught:
        build(raw, **{"train.epochs": -1, "validate": {"batch": 0}})
    places = [problem.where for problem in caught.value.problems]
    assert places == ["arguments, train.epochs", "job.toml, train.steps", "arguments, validate.batch"]


WRONG: list[Any] = [5, -1, 0, 1.5, math.nan, 10**30, "x", "", True, [], [1], ["a", 2], [{"b": 1}], {}, {"a": 1}]
WRONG += [datetime.date(2026, 1, 1)]


def keys(section: type[BaseModel] = Job, before: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = before + (field.alias or name)
        yield key
        parts = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from keys(part, f"{key}.")


@pytest.mark.parametrize("key", list(keys()))
def test_any_value_at_any_key(key: str) -> None:
    """It is taken, or refused in plain words: never an exception of another kind, never the checker's own terms."""
    for place, value in product((key, f"{key}.x", f"{key}.0.y"), WRONG):
        problems = refused(place, value)
        assert all(problem.where and problem.what for problem in problems)
        text = "\n".join(map(str, problems))
        assert not re.search(r"(?i)input should|valid (a|dict|str|int)|instance of|pydantic|NoneType", text)


def refused(key: str, value: Any) -> list[Problem]:
    try:
        build(**{key: value})
    except JobError as error:
        return error.problems
    return []


@pytest.mark.parametrize("key", ["", ".", "..", "train.", ".train", "a..b", "train.optimizer..lr"])
def test_a_key_that_is_none(key: str) -> None:
    with pytest.raises(InputError, match="is no setting"):
        parse_changes([f"{key}=1"])


def test_compression_in_a_strategy() -> None:
    assert build(**parse_strategy("data=4,compression=int8")).strategy.compression.name == "int8"
    later = build(**{"strategy.compression": "top_k", "strategy.compression.density": 0.1})
    assert later.strategy.compression.density == 0.1
