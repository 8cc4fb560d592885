"""The same losses, gradients and parameters under every mesh, tensor by tensor, against a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import models
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.job import parse_strategy
from verbund.stage.verify import verify

PAIRS = [
    ("mlp", "shard=2"),
    ("mlp", "tensor=2,pipeline=2"),
    ("mlp", "data=2,shard=2,tensor=2"),
    ("mlp", "pipeline=3"),
    ("convnet", "data=2,shard=2"),
    ("convnet", "shard=3"),
    ("convnet", "pipeline=2"),
    ("gpt", "shard=4"),
    ("gpt", "tensor=2"),
    ("gpt", "tensor=3"),
    ("gpt", "pipeline=4"),
    ("gpt", "data=2,tensor=2,pipeline=2"),
    ("gpt", "shard=2,tensor=2,pipeline=2"),
    ("gpt_sequence", "tensor=2"),
    ("gpt_sequence", "tensor=2,pipeline=2"),
    ("encoder", "tensor=2"),
    ("encoder", "tensor=4"),
    ("encoder", "shard=2,pipeline=2"),
    ("encoder", "data=2,pipeline=3"),
    ("llama", "tensor=2,pipeline=2"),
    ("llama", "data=2,shard=2"),
    ("llama", "shard=2,pipeline=2"),
    ("llama", "pipeline=4"),
    ("bert", "tensor=2,shard=2"),
    ("bert", "pipeline=2"),
    ("bert", "data=2,tensor=4"),
]
SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt", "pipeline=2,schedule=gpipe", {}),
    ("gpt", "pipeline=2,schedule=interleaved", {}),
    ("gpt", "pipeline=2,schedule=zero_bubble", {}),
    ("gpt", "pipeline=2,shard=2,schedule=interleaved_zero_bubble", {}),
    ("gpt", "pipeline=2,balance=memory", {}),
    ("encoder", "shard=2,zero=1", {"train.micro_batch": 2}),
    ("encoder", "shard=3,zero=2", {"train.micro_batch": 2}),
    ("encoder", "shard=2,zero=3", {"train.micro_batch": 2, "train.activation_checkpointing": True}),
    ("encoder", "pipeline=2,data=2", {"train.activation_checkpointing": True, "train.clip_norm": 0.01}),
    ("encoder", "tensor=2,pipeline=2", {"train.activation_checkpointing": True, "train.clip_norm": 0.01}),
    ("gpt", "tensor=2,shard=2", {"train.clip_norm": 0.01, "train.ema": 0.9}),
    ("mlp", "shard=4", {"train.global_batch": 3}),  # a worker without samples
    ("mlp", "pipeline=2,data=2", {"train.global_batch": 1}),
]


def check(name: str, mesh: str, changes: dict[str, Any], folder: Path) -> None:
    found = verify(models.job(name, folder, {**parse_strategy(mesh), **changes}), steps=2)
    assert found["passed"], (found["differences"], found["missing"])
    assert found["losses"][0][0] != found["losses"][0][1]


@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_equals_a_single_process(name: str, mesh: str, shared_cluster: LocalCluster, tmp_path: Path) -> None:
    if name in models.TRANSFORMERS:
        pytest.importorskip("transformers")
    check(name, mesh, {}, tmp_path)


@pytest.mark.parametrize(("name", "mesh", "changes"), SETTINGS)
def test_equals_a_single_process_with(
    name: str, mesh: str, changes: dict[str, Any], shared_cluster: LocalCluster, tmp_path: Path
) -> None:
    check(name, mesh, changes, tmp_path)


def test_a_difference_is_found(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    """What `verify` is for: another seed on one side is another start and other samples."""
    from verbund.stage import verify as module

    original = module._plain

    def other(job: Any, steps: int, strategy: str | None) -> Any:
        made = original(job, steps, strategy)
        return made if strategy is None else made.model_copy(update={"seed": 1})

    module._plain = other
    try:
        found = verify(models.job("mlp", tmp_path, parse_strategy("data=2")), steps=1)
    finally:
        module._plain = original
    assert not found["passed"]
    assert found["differences"]["parameters"]["tensor"] is not None


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("convnet", "tensor=2", "no layer of this model is known to be divisible"),
        ("gpt", "tensor=5", "has 4 units along dimension 0, which cannot be divided among 5 workers.*Use tensor=4"),
        ("mlp", "pipeline=8", "3 layers.*8 stages are wanted.*Use at most 3 stages"),
    ],
)
def test_refusals_name_the_module_and_what_works(
    name: str, mesh: str, message: str, shared_cluster: LocalCluster, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        verify(models.job(name, tmp_path, parse_strategy(mesh)), steps=1)
