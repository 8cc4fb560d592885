"""Export: the model of a checkpoint in a form that other programs read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbund import task as tasks
from verbund.checkpoint import durable
from verbund.checkpoint.manifest import Manifest
from verbund.checkpoint.read import Checkpoint
from verbund.checkpoint.stream import Source, read, size_of, write_files
from verbund.cluster.worker import Worker
from verbund.errors import CheckpointError, InputError, RunFailed
from verbund.interop import huggingface
from verbund.job import Job
from verbund.stage.restore import same_names

SHARD_BYTES = 5_000_000_000
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)


def work(worker: Worker) -> dict[str, Any]:
    """The process of `verbund export`: fills a folder that nobody reads yet."""
    settings = worker.settings
    job = Job.build(settings["job"], {}, source="job.toml", folder=settings["folder"])
    out = Path(settings["out"])
    worker.supervise()
    worker.doing("building the model", 0)
    with _Watched(Manifest.open(Path(settings["checkpoint"]), verify=False), worker) as checkpoint:
        stored = stored_tensors(checkpoint, averaged=settings["ema"])
        try:
            form = write(job, checkpoint, stored, out, settings["form"])
        except OSError as error:
            fix = "Free space there" if durable.full(error) else "Check that the folder may be written to"
            raise RunFailed(durable.reason(error), where=str(out.parent), fix=fix) from None
        return {
            "format": form,
            "step": checkpoint.step,
            "tensors": len(stored),
            "bytes": sum(size_of(checkpoint, source) for source in stored),
            "files": sorted(path.name for path in out.iterdir()),
        }


class _Watched(Checkpoint):
    """Says which tensor is read, so that a long export shows that it goes on."""

    def __init__(self, manifest: Manifest, worker: Worker) -> None:
        super().__init__(manifest)
        self._worker, self._count = worker, 0

    def read(
        self, kind: str, name: str, offset: Sequence[int] | None = None, length: Sequence[int] | None = None
    ) -> Tensor:
        self._count += 1
        self._worker.doing("writing tensor", self._count)
        return super().read(kind, name, offset, length)


def stored_tensors(checkpoint: Checkpoint, *, averaged: bool) -> list[Source]:
    """The model's tensors in a checkpoint by their own names, tied ones once.

    Raises:
        CheckpointError: if averages are wanted and it has none.
    """
    averages = set(checkpoint.names("ema"))
    if averaged and not averages:
        raise CheckpointError(
            "it holds no moving average",
            where=str(checkpoint.manifest.folder),
            fix="Leave out --ema, or train with `train.ema`",
        )
    parameters = checkpoint.names("parameters")
    kinds = ["ema" if averaged and name in averages else "parameters" for name in parameters]
    return [
        *(Source(name, kind, name) for name, kind in zip(parameters, kinds, strict=True)),
        *(Source(name, "buffers", name) for name in checkpoint.names("buffers")),
    ]


def write(
    job: Job,
    checkpoint: Checkpoint,
    stored: Sequence[Source],
    out: Path,
    form: str | None,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Writes the tensors as `form`; None: a Hugging Face folder if the model is one, else safetensors.

    Returns:
        the form.

    Raises:
        InputError: if the model has no such form, or is not the one that was saved.
    """
    if form == "safetensors":  # names and values are in the checkpoint: no code of the task is run
        write_files(checkpoint, stored, out, None)
        return form
    model = _model(job)
    _check(model, checkpoint)
    pretrained = _pretrained(model)
    if form is None:
        form = "hf" if pretrained else "safetensors"
    if form == "hf":
        if not pretrained:
            raise InputError(
                f"`model()` gives a {type(model).__name__}, which is no model of the package transformers",
                where=job.task,
                fix="Use --format state-dict or --format safetensors",
            )
        _write_folder(job, model, checkpoint, stored, out, shard_bytes)
    elif form == "safetensors":
        write_files(checkpoint, stored, out, None)
    else:
        _save(_state_dict(job, model, checkpoint, stored), out / "model.pt")
    return form


def _model(job: Job) -> nn.Module:
    """The task's model, without values where it can be built so: only its names and its config are wanted."""
    if job.task.startswith(tasks.HUGGING_FACE):
        return huggingface.skeleton(job)
    task = tasks.load(job)
    try:
        with torch.device("meta"):
            return task.build()
    except Exception:  # some models look at values while they are built
        return task.build()


def _check(model: nn.Module, checkpoint: Checkpoint) -> None:
    path = checkpoint.manifest.folder
    same_names("parameters", {name for name, _ in model.named_parameters()}, set(checkpoint.names("parameters")), path)
    for name, parameter in model.named_parameters():
        if tuple(parameter.shape) != checkpoint.shape("parameters", name):
            raise CheckpointError(
                f"`{name}` has shape {list(checkpoint.shape('parameters', name))} there and {list(parameter.shape)} in "
                "the task's model",
                where=str(path),
                fix="The task file has changed since",
            )


def _pretrained(model: nn.Module) -> bool:
    import sys

    if "transformers" not in sys.modules:  # then nobody can have built one
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _state_dict(job: Job, model: nn.Module, checkpoint: Checkpoint, stored: Sequence[Source]) -> dict[str, Tensor]:
    """What the model's own `state_dict` has, tied tensors under each of their names."""
    first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    values = {source.name: read(checkpoint, source) for source in stored}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        saved = first.get(id(tensor))
        if saved not in values:
            raise InputError(
                f"`{name}` of the model's state dict is neither parameter nor buffer, so no checkpoint has it",
                where=job.task,
                fix="Use --format safetensors, and load it with strict=False",
            )
        state[name] = values[saved]
    return state


def _save(state: dict[str, Tensor], path: Path) -> None:
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # On a full disk torch stumbles over its own half-written archive, and hides why.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        file.flush()
        os.fsync(file.fileno())


def _write_folder(
    job: Job, model: Any, checkpoint: Checkpoint, stored: Sequence[Source], out: Path, shard_bytes: int
) -> None:
    """config.json, safetensors (with an index if there are several) and tokenizer, as `from_pretrained` wants them."""
    placed = write_files(checkpoint, stored, out, shard_bytes)
    if len(set(placed.values())) > 1:
        total = sum(size_of(checkpoint, source) for source in stored)
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        durable.write_new(out / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = str(next(iter({str(p.dtype) for p in model.parameters()}))).removeprefix("torch.")
    config.__dict__.pop("quantization_config", None)
    config.save_pretrained(out)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(out)
    tokenizer = _tokenizer_folder(job)
    if tokenizer is None:
        return
    for name in _TOKENIZER:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, out / name)


def _tokenizer_folder(job: Job) -> Path | None:
    if job.data.tokenizer == "bytes":
        return None
    if job.data.tokenizer is not None:
        return job.path(job.data.tokenizer).parent
    return huggingface.folder(job) if job.task.startswith(tasks.HUGGING_FACE) else None
