"""Resume: the loss curve is that of an uninterrupted run, with the same or another number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MLP, losses
from verbund.errors import CheckpointError, ClusterLost, InputError
from verbund.run import Run
from verbund.stage import launch

RunJob = Callable[..., Run]

DROPOUT = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16,
    5))
"""
SETTINGS: dict[str, Any] = {
    "train.steps": 24,
    "train.group": 8,
    "train.ema": 0.9,
    "train.clip_norm": 1.0,
    "train.schedule": {"name": "cosine", "warmup": 5, "steps": 24},
    "train.optimizer": {"name": "adamw", "lr": 3e-3},
    "data.validation_fraction": 0.2,
}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 3), (4, 2)])
def test_goes_on_as_if_nothing_had_happened(before: int, after: int, run_job: RunJob) -> None:
    whole = run_job(DROPOUT, {**SETTINGS, "strategy.mesh": {"data": 2}})
    cut = run_job(DROPOUT, {**SETTINGS, "train.steps": 11, "strategy.mesh": {"data": before}})
    run = launch.resume(cut.path, {"train.steps": 24, "strategy.mesh": {"data": after}})
    assert [step for step, _ in run.summary["loss"]["curve"]] == list(range(24))
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-5)
    ours, theirs = run.summary["metrics"]["loss"]["last"], whole.summary["metrics"]["loss"]["last"]
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert run.summary["steps"] == 24
    assert run.summary["generations"] == 2
    assert run.summary["world"] == after


@pytest.mark.parametrize(
    ("end", "advice"),
    [
        ({"train.steps": 4}, "`--set train.steps=…`"),
        ({"train.epochs": 1}, "`--set train.epochs=…`"),
        ({"train.seconds": 0.2}, "`--set train.seconds=…`"),
        ({"train.target": {"metric": "loss", "value": 1e9}, "data.validation_fraction": 0.2}, "remove `train.target`"),
    ],
)
def test_a_finished_run_has_nothing_left_to_do(
    end: dict[str, Any], advice: str, run_job: RunJob, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_job(MLP, {"validate.every": 2, **({} if "train.steps" in end else {"train.steps": None}), **end})
    before = run.summary
    saved = checkpoints(run)
    again = launch.resume(run.path, {"strategy.mesh": {"data": 2}}, quiet=False)
    said = capfd.readouterr().err
    assert f"{before['steps']} steps are done" in said
    assert advice in said
    assert "nan" not in said
    assert again.summary == before
    assert checkpoints(again) == saved
    assert again.job.world == 1


def test_less_than_is_done(run_job: RunJob, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_job(MLP, {"train.epochs": 2, "train.steps": None})
    before = run.summary
    for changes in ({"train.epochs": 1}, {"train.steps": 3}):
        assert launch.resume(run.path, changes, quiet=False).summary == before
        said = capfd.readouterr().err
        assert "12 steps are done, more than the" in said
        assert "nothing was trained" in said
    assert run.job.train.epochs == 2


def test_interrupted_at_its_very_end(run_job: RunJob, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_job(MLP, {"train.steps": 4})
    run.write_summary({**run.summary, "status": "interrupted"})
    again = launch.resume(run.path, quiet=False)
    assert (again.summary["status"], again.summary["steps"]) == ("done", 4)
    assert "nan" not in capfd.readouterr().err


def test_another_global_batch_is_refused(run_job: RunJob) -> None:
    run = run_job(MLP, {"train.steps": 4})
    before = run.summary
    with pytest.raises(InputError, match="global batches of 37 samples"):
        launch.resume(run.path, {"train.steps": 8, "train.global_batch": 40})
    assert run.summary == before
    assert Run.open(run.path).job.train.global_batch == 37


def test_other_samples_are_told(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(MLP, {"train.steps": 4})
    data = dict(np.load(tmp_path / "data.npz"))
    data["x"][0] += 1.0
    np.savez(tmp_path / "data.npz", **data)
    resumed = launch.resume(run.path, {"train.steps": 8, "seed": 3})
    notes = resumed.summary["notes"]
    assert any("the training data have changed" in note for note in notes)
    assert any("`seed` was 0 and is 3 now" in note for note in notes)
    again = launch.resume(run.path, {"train.steps": 9})
    assert sum("training data have changed" in event["text"] for event in _events(again, "note")) == 1


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def checkpoints(run: Run) -> list[Path]:
    return sorted(run.checkpoints.glob("step-*"))


@pytest.mark.parametrize("how", ["flipped byte", "missing shard"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(how: str, run_job: RunJob) -> None:
    whole = run_job(MLP, {"train.steps": 12})
    run = run_job(MLP, {"train.steps": 8, "checkpoint.every": 4})
    newest = checkpoints(run)[-1]
    (shard,) = newest.glob("*.safetensors")
    if how == "missing shard":
        shard.unlink()
    else:
        damage(shard)
    resumed = launch.resume(run.path, {"train.steps": 12})
    np.testing.assert_allclose(losses(resumed), losses(whole), rtol=1e-6)
    notes = [event["text"] for event in _events(resumed, "note")]
    assert any(shard.name in note for note in notes)


def test_no_checkpoint_is_whole(run_job: RunJob) -> None:
    run = run_job(MLP, {"train.steps": 4})
    for folder in checkpoints(run):
        for shard in folder.glob("*.safetensors"):
            damage(shard)
    with pytest.raises(CheckpointError) as caught:
        launch.resume(run.path, {"train.steps": 8})
    assert caught.value.exit_status == 2


def test_another_model_is_refused(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(MLP, {"train.steps": 4})
    (tmp_path / "task.py").write_text(MLP.replace("16", "17"))
    with pytest.raises(CheckpointError, match="shape"):
        launch.resume(run.path, {"train.steps": 8})


def test_old_checkpoints_are_pruned(run_job: RunJob) -> None:
    run = run_job(MLP, {"train.steps": 10, "checkpoint.every": 2, "checkpoint.keep": 2})
    assert [folder.name for folder in checkpoints(run)] == ["step-00000008", "step-00000010"]


def test_the_best_checkpoint_stays(run_job: RunJob) -> None:
    changes = {
        "train.steps": 30,
        "checkpoint.every": 5,
        "checkpoint.keep": 1,
        "validate.every": 5,
        "data.validation_fraction": 0.3,
        "train.patience": {"metric": "loss", "validations": 100},
        "train.optimizer": {"name": "adamw", "lr": 0.05},
    }
    run = run_job(MLP, changes)
    curve = run.summary["metrics"]["loss"]["curve"]
    best = min(curve, key=lambda point: point[1])[0]
    assert best < 30, "random labels overfit, so the best validation is not the last"
    assert {f"step-{best:08d}", "step-00000030"} == {folder.name for folder in checkpoints(run)}


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        launch.resume(tmp_path)


def _events(run: Run, name: str) -> list[dict[str, Any]]:
    import json

    lines = [line for path in run.journal.glob("supervisor-*") for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event.get("name") == name]


KILLED = """
import os, pathlib, signal
from torch import nn

class Killed(nn.Module):
    passes = 0

    def forward(self, x):
        self.passes += self.training
        if self.passes == 9 and not (once := pathlib.Path(__file__).with_name("killed")).exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x

def model():
    return nn.Sequential(Killed(), nn.Linear(12, 5))
"""


@pytest.mark.parametrize("strategy", [{"mesh": {"data": 2}}, {"islands": 2, "exchange": "diloco"}], ids=str)
def test_tells_of_all_steps_after_a_kill(strategy: dict[str, Any], run_job: RunJob, tmp_path: Path) -> None:
    """What a killed worker had not written of its journal yet led to the checkpoint that the run goes on from."""
    changes = {"strategy": strategy, "train.steps": 12, "checkpoint.every": 4}
    (tmp_path / "killed").touch()
    whole = run_job(KILLED, changes).summary
    (tmp_path / "killed").unlink()
    with pytest.raises(ClusterLost) as caught:
        run_job(KILLED, changes)
    again = launch.resume(caught.value.run or Path()).summary
    assert again["samples"] == whole["samples"]
    assert len(again["loss"]["curve"]) == 12
