"""Hugging Face models as tasks: `task = "hf:PATH"`, a folder with config.json and, unless training starts from random
values, safetensors; or `hf:smollm2`, a small language model that a package carries.

The same `Task` as of a Python file comes out; columns and objective say what the model is called with:

    ...ForCausalLM                  `next_token`: `data.input` (default `tokens`), the targets shifted by one
    ...ForMaskedLM                  `next_token`: inputs as below; `data.target` is taken as it is, -100 not counted
    ...ForSequenceClassification    `cross_entropy` and others: inputs as below, `data.target`

Inputs are the columns of `data.input` by their names, a single one as `input_ids`; by default those of `input_ids`,
`attention_mask` and `token_type_ids` that the data have.

Nothing here imports torch or transformers before a model is built. No code of a model's folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbund.data.prepare import cache_of, names_of
from verbund.errors import Problem, TaskError
from verbund.interop import smollm2
from verbund.job import Data, Job
from verbund.task import HUGGING_FACE, Columns, Saved, Task, column_of, default_targets

if TYPE_CHECKING:
    from torch import Tensor, nn

BUNDLED = "hf:smollm2"
_HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def folder(job: Job) -> Path:
    """Where the job's model lies; the bundled one may still have to be converted."""
    if job.task == BUNDLED:
        return smollm2.place(job.path(str(cache_of(job.data))))
    return job.path(str(Path(job.task.removeprefix(HUGGING_FACE)).expanduser()))


def materialise(job: Job, notify: Callable[[str], None]) -> Path:
    """The model's folder, converted now if it is the bundled model and was not yet.

    Raises:
        InputError: if a package is missing or the cache cannot be written.
    """
    if job.task == BUNDLED:
        return smollm2.folder(job.path(str(cache_of(job.data))), notify)
    return folder(job)


def with_tokenizer(job: Job, notify: Callable[[str], None]) -> Data:
    """The job's data, the model's own tokenizer being used where the job names none."""
    if job.data.tokenizer is not None:
        return job.data
    path = materialise(job, notify) / "tokenizer.json"
    return job.data.model_copy(update={"tokenizer": str(path.resolve())}) if path.is_file() else job.data


def check(job: Job) -> list[Problem]:
    """What can be said of the model without importing it."""
    if job.task == BUNDLED:
        return [*smollm2.check(), *_objective(job, "AutoModelForCausalLM")]
    path = folder(job)
    problems = []
    if find_spec("transformers") is None:
        problems.append(Problem("task", f"`{job.task}` needs the package transformers", "pip install 'verbund[text]'"))
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kind = _kind(raw)
    except FileNotFoundError:
        what = f"{path} has no config.json" if path.is_dir() else f"no such folder: {path}"
        fix = "Name a folder with config.json and safetensors, relative to the job file; nothing is downloaded"
        return [*problems, Problem("task", what, fix)]
    except (OSError, ValueError) as error:
        return [*problems, Problem(str(path / "config.json"), str(error))]
    if "quantization_config" in raw:
        problems.append(
            Problem(str(path / "config.json"), "the model is quantised", "Name one with plain values: only these train")
        )
    pickled = [entry.name for entry in sorted(path.glob("*.bin"))]
    if pickled and not _weights(path):
        fix = "Save it with `save_pretrained` as safetensors; for random values take the file away"
        problems.append(Problem(str(path / pickled[0]), "weights are pickled, which is never read", fix))
    return problems + _objective(job, kind)


def _objective(job: Job, kind: str) -> list[Problem]:
    name = job.train.objective.name if job.train.objective else None
    if name is None:
        return [Problem("train.objective", f"`{job.task}` needs one: it has no loss of its own")]
    language = kind != "AutoModelForSequenceClassification"
    if language != (name == "next_token"):
        what = "a language model" if language else "a model that classifies sequences"
        fix = "Use `next_token`" if language else "Use `cross_entropy`, `binary_cross_entropy` or `mean_squared_error`"
        return [Problem("train.objective", f"`{name}` does not fit {what}", fix)]
    return []


def _kind(raw: Any) -> str:
    """The class of transformers that builds what a config describes.

    Raises:
        ValueError: if it is none that can be trained here.
    """
    architectures = raw.get("architectures") if isinstance(raw, dict) else None
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for ending, kind in _HEADS.items():
        if name.endswith(ending):
            return kind
    known = ", ".join(f"...{ending}" for ending in _HEADS)
    said = f"`architectures` is `{name}`" if name else "`architectures` is missing"
    raise ValueError(f"{said}; one of {known} is needed. For any other, write a task file with `model()`")


def _weights(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def load(job: Job) -> Task:
    """The task of a job whose model is a Hugging Face folder; `verbund.task.load` calls it after `check`.

    Raises:
        TaskError: if the model cannot be built.
    """
    from verbund import objectives

    path = materialise(job, lambda _: None)
    kind = _kind(json.loads((path / "config.json").read_text(encoding="utf-8")))
    assert job.train.objective is not None  # `check` saw to it
    causal = kind == "AutoModelForCausalLM"
    return Task(
        file=path,
        model=lambda: _model(path, kind),
        inputs=_causal_inputs(job, path) if causal else _inputs(job, path),
        targets=_targets(job, path, shifted=causal),
        loss=objectives.build(job.train.objective),
        metrics=None,
        augment=None,
        dataset=None,
        validation_dataset=None,
        couples=False,
        own=frozenset(("model", "inputs", "targets")),
        saved=_saved(path, kind),
    )


def _saved(path: Path, kind: str) -> Saved | None:
    """The weights in a folder, tensor by tensor."""
    from safetensors import safe_open

    files: dict[str, Any] = {}
    for file in _weights(path):
        opened: Any = safe_open(file, framework="pt")
        files |= dict.fromkeys(opened.keys(), opened)
    if not files:
        return None
    return Saved(lambda: _bare(path, kind), frozenset(files), lambda name: files[name].get_tensor(name))


def _bare(path: Path, kind: str) -> nn.Module:
    """The model with its constructor's own values."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    config.use_cache = False
    builder: Any = getattr(transformers, kind)
    model: nn.Module = builder.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model


def skeleton(job: Job) -> nn.Module:
    """The model without values, as its own config describes it."""
    import torch

    path = materialise(job, lambda _: None)
    kind = _kind(json.loads((path / "config.json").read_text(encoding="utf-8")))
    with torch.device("meta"):
        return _bare(path, kind)


def _model(path: Path, kind: str) -> nn.Module:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    builder: Any = getattr(transformers, kind)
    wanted: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        if not _weights(path):
            return _bare(path, kind)
        config = transformers.AutoConfig.from_pretrained(path, **local)
        config.use_cache = False
        model: nn.Module
        model, found = builder.from_pretrained(
            path, config=config, use_safetensors=True, output_loading_info=True, **wanted, **local
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TaskError(f"the model cannot be built: {first}", where=str(path)) from error
    missing = sorted(found["missing_keys"])
    if 2 * len(missing) > len(model.state_dict()):  # a new head is what fine-tuning begins with; a new model is not
        raise TaskError(
            f"{len(missing)} tensors of the model are not in its files ({', '.join(missing[:3])})",
            where=str(path),
            fix="Config and weights are of different models; for random values leave the weights out",
        )
    return model


def _causal_inputs(job: Job, path: Path) -> Callable[[Columns], dict[str, Tensor]]:
    tokens = next(iter(names_of(job.data.input)), "tokens")

    def inputs(batch: Columns) -> dict[str, Tensor]:
        called = {"input_ids": column_of(batch, tokens, path)[:, :-1].long()}
        if "attention_mask" in batch:
            called["attention_mask"] = batch["attention_mask"][:, :-1].long()
        return called

    return inputs


def _inputs(job: Job, path: Path) -> Callable[[Columns], dict[str, Tensor]]:
    names = names_of(job.data.input)

    def inputs(batch: Columns) -> dict[str, Tensor]:
        if len(names) == 1:
            return {"input_ids": column_of(batch, names[0], path).long()}
        wanted = names or [name for name in _INPUTS if name in batch] or ["input_ids"]
        return {name: column_of(batch, name, path).long() for name in wanted}

    return inputs


def _targets(job: Job, path: Path, *, shifted: bool) -> Callable[[Columns], Tensor]:
    if not shifted and job.train.objective is not None and job.train.objective.name != "next_token":
        return default_targets(job, path)
    tokens = next(iter(names_of(job.data.input)), "tokens") if shifted else next(iter(names_of(job.data.target)), "")
    if not tokens:
        raise TaskError("a masked language model needs `data.target`", where=str(path))
    ignored = job.train.objective.ignore_index if job.train.objective else -100

    def targets(batch: Columns) -> Tensor:
        value = column_of(batch, tokens, path).long()
        if not shifted:
            return value
        value = value[:, 1:]
        if "attention_mask" in batch:  # what only fills a row up is nothing to learn
            value = value.masked_fill(batch["attention_mask"][:, 1:] == 0, ignored)
        return value

    return targets
