"""Exported models give the logits of the run in plain torch and transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import models
from conftest import MLP, Command
from verbund import task
from verbund.checkpoint.read import Checkpoint
from verbund.cluster.local import LocalCluster
from verbund.errors import CheckpointError, InputError
from verbund.run import Run
from verbund.stage import exporting, launch
from verbund.stage.export import export

RunJob = Callable[..., Run]


@pytest.fixture
def train(shared_cluster: LocalCluster, tmp_path: Path) -> Callable[..., Run]:
    def run(name: str, changes: dict[str, Any] | None = None) -> Run:
        changes = {"strategy.mesh": {"data": 2}, **(changes or {})}
        return launch.train(models.job(name, tmp_path, changes), tmp_path / "run")

    return run


def logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    model.eval()
    with torch.inference_mode():
        output = model(*inputs.values()) if not hasattr(model, "config") else model(**inputs).logits
    assert isinstance(output, Tensor)
    return output


def trained(run: Run, kind: str = "parameters") -> nn.Module:
    """The run's model, filled tensor by tensor."""
    model = task.load(run.job).model()
    (folder,) = run.checkpoints.glob("step-*")
    with Checkpoint.open(folder) as checkpoint, torch.no_grad():
        for name, parameter in model.named_parameters():
            checkpoint.fill(kind, name, parameter)
        for name in checkpoint.names("buffers"):
            checkpoint.fill("buffers", name, model.get_buffer(name))
    return model


def test_state_dict_with_tied_tensors(train: Callable[..., Run], tmp_path: Path) -> None:
    run = train("gpt")
    result = export(run.path, tmp_path / "out", form="state-dict")
    assert result["files"] == ["model.pt"]
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    model = task.load(run.job).model()
    assert model.load_state_dict(state).missing_keys == []
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(logits(model, tokens=tokens), logits(trained(run), tokens=tokens))


def test_safetensors_have_tied_tensors_once(train: Callable[..., Run], tmp_path: Path) -> None:
    run = train("gpt")
    result = export(run.path, tmp_path / "out")
    assert result["format"] == "safetensors"  # what is no model of transformers
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in state
    assert result["tensors"] == len(state)
    assert result["bytes"] == sum(tensor.nbytes for tensor in state.values())
    for name, parameter in trained(run).named_parameters():
        assert torch.equal(state[name], parameter)


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
@pytest.mark.parametrize("name", models.TRANSFORMERS)
def test_a_hugging_face_folder(name: str, axis: str, train: Callable[..., Run], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = train(name, {"strategy.mesh": {axis: 2}})
    result = export(run.path, tmp_path / "out")
    assert result["format"] == "hf"
    kind = transformers.AutoModelForCausalLM if name == "llama" else transformers.AutoModelForSequenceClassification
    model, found = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(logits(model, input_ids=tokens), logits(trained(run), input_ids=tokens))


def test_what_was_trained_from_a_folder_is_a_folder_again(train: Callable[..., Run], tmp_path: Path) -> None:
    """Export, train from it without a task file, export that: the tokenizer goes along."""
    transformers = pytest.importorskip("transformers")
    first = tmp_path / "first"
    export(train("llama").path, first)
    (first / "tokenizer.json").write_text("{}")
    run = launch.train(models.job("llama", tmp_path, {"task": "hf:first", "train.steps": 1}), tmp_path / "again")
    result = export(run.path, tmp_path / "second")
    assert result["files"] == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == json.loads(
        (first / "config.json").read_text()
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(logits(model, input_ids=tokens), logits(trained(run), input_ids=tokens))
    assert not torch.equal(load_file(first / "model.safetensors")["model.norm.weight"], model.model.norm.weight)


def test_large_models_are_cut_into_files(train: Callable[..., Run], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = train("llama")
    (folder,) = run.checkpoints.glob("step-*")
    out = tmp_path / "out"
    out.mkdir()
    with Checkpoint.open(folder) as checkpoint:
        stored = exporting.stored_tensors(checkpoint, averaged=False)
        exporting.write(run.job, checkpoint, stored, out, "hf", shard_bytes=100_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((out / file).stat().st_size < 110_000 for file in files)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(logits(model, input_ids=tokens), logits(trained(run), input_ids=tokens))


def test_the_moving_average(train: Callable[..., Run], tmp_path: Path) -> None:
    run = train("mlp", {"train.ema": 0.5})
    export(run.path, tmp_path / "weights")
    export(run.path, tmp_path / "average", ema=True)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 12)).astype(np.float32))
    for folder, kind in (("weights", "parameters"), ("average", "ema")):
        model = task.load(run.job).model()
        model.load_state_dict(load_file(tmp_path / folder / "model.safetensors"))
        assert torch.equal(logits(model, x=x), logits(trained(run, kind), x=x))
    with pytest.raises(CheckpointError, match="no moving average"):
        export(train_without(run), tmp_path / "none", ema=True)
    assert not (tmp_path / "none").exists()


def train_without(run: Run) -> Path:
    job = run.job.model_copy(update={"train": run.job.train.model_copy(update={"ema": None})})
    return launch.train(job, run.path.with_name("without")).path


BATCH_NORM = """
import torch
from torch import nn

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        assert float(self[0].weight.detach().sum()) != 0.0  # cannot be built without values

def model():
    return Model()
"""


def test_buffers_and_a_model_that_looks_at_its_values(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(BATCH_NORM)
    export(run.path, tmp_path / "out", form="state-dict")
    model = task.load(run.job).model()
    model.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    x = torch.ones(2, 12)
    assert torch.equal(logits(model, x=x), logits(trained(run), x=x))
    assert int(model.get_buffer("1.num_batches_tracked")) > 0


def test_bad_input(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(MLP)
    with pytest.raises(InputError, match=r"--format: `hff` is no form of a model. Did you mean `hf`"):
        export(run.path, tmp_path / "out", form="hff")
    with pytest.raises(InputError, match=r"gives a Sequential, which is no model of the package transformers"):
        export(run.path, tmp_path / "out", form="hf")
    with pytest.raises(CheckpointError, match="no checkpoint of step 99"):
        export(run.path, tmp_path / "out", step=99)
    with pytest.raises(InputError, match="exists already"):
        export(run.path, run.path)
    (tmp_path / "task.py").write_text(MLP.replace("16, 5", "16, 6"))
    with pytest.raises(CheckpointError, match=r"`2.weight` has shape \[5, 16\] there and \[6, 16\]"):
        export(run.path, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []


def test_command_line(run_job: RunJob, tmp_path: Path, command: Command) -> None:
    run = run_job(MLP)
    (tmp_path / f".out.partial-{os.getpid()}").mkdir()  # of one that was killed: in a container numbers come again
    document = command("export", str(run.path), "--out", "out", "--json").document
    assert document["files"] == ["model.safetensors"]
    assert document["folder"] == str(tmp_path / "out")
    again = command("export", str(run.path), "--out", "out")
    assert again.status == 2
    assert "exists already. Choose a new or empty folder" in again.err
    assert "safetensors of step 5, 4 tensors" in command("export", str(run.path), "--out", "new").out
