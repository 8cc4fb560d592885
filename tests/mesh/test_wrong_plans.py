"""Plans that cut a model wrongly: none of them trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import models
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.job import parse_strategy
from verbund.stage import launch

RIGHT = {
    "blocks.*.attention.qkv": {"cut": "column", "parts": 3, "units": 4},
    "blocks.*.attention.out": {"cut": "row", "units": 4},
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "tokens": "embedding",
    "lm_head": "column+gather",
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fused projections as one": ({"blocks.*.attention.qkv": {"cut": "column", "units": 4}}, "computes something else"),
    "outputs left divided": ({"lm_head": "column"}, "divided, the model fails where it does not in one process"),
    "one of a tied pair": ({"lm_head": None}, "`lm_head.weight` is tied .* `lm_head` is not in the plan"),
    "the other of a tied pair": ({"tokens": None}, "`tokens.weight` is tied .* `tokens` is not in the plan"),
    "a column without its row": (
        {"blocks.*.down": None},
        "cut by the axis `tensor`, the model fails",
    ),
    "a row without its column": ({"blocks.*.up": None}, "cut by the axis `tensor`, the model fails"),
}


def task(folder: Path, plan: dict[str, Any], edit: tuple[str, str] = ("", "")) -> Path:
    """The small GPT with another plan, and perhaps another line."""
    text = (Path(models.__file__).parent / "gpt.py").read_text()
    assert edit[0] in text
    path = folder / "task.py"
    path.write_text(f"{text.replace(*edit) if edit[0] else text}\n\ndef tensor_plan():\n    return {plan!r}\n")
    return path


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_does_not_train(case: str, shared_cluster: LocalCluster, tmp_path: Path) -> None:
    changes, message = WRONG[case]
    plan = {key: value for key, value in {**RIGHT, **changes}.items() if value is not None}
    job = models.job("gpt", tmp_path, {**parse_strategy("tensor=2"), "task": str(task(tmp_path, plan))})
    with pytest.raises(InputError, match=message):
        launch.train(job, tmp_path / "run")


def test_sizes_that_do_not_follow_from_tensors(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    """With its heads as a constant the attention takes halves of heads for heads."""
    edit = ("part.view(batch, length, -1, WIDTH // HEADS)", "part.view(batch, length, HEADS, -1)")
    job = models.job("gpt", tmp_path, {**parse_strategy("tensor=2"), "task": str(task(tmp_path, RIGHT, edit))})
    with pytest.raises(InputError, match=r"computes something else: the gradient of `.*`.* has the norm"):
        launch.train(job, tmp_path / "run")


def test_the_right_plan_trains(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    job = models.job("gpt", tmp_path, {**parse_strategy("tensor=2"), "task": str(task(tmp_path, RIGHT))})
    assert launch.train(job, tmp_path / "run").summary["status"] == "done"
