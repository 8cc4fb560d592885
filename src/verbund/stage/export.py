"""Export as its caller sees it: choose a checkpoint, have a process write the model, let the folder appear whole."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from verbund import task
from verbund.checkpoint import durable
from verbund.cluster.process import ProcessSpec
from verbund.errors import InputError, JobError, nearest
from verbund.job import Job
from verbund.run import Run
from verbund.stage import before, launch
from verbund.stage.processes import supervised

FORMS = ("hf", "state-dict", "safetensors")


def export(
    directory: Path | str,
    out: Path | str,
    *,
    form: str | None = None,
    step: int | None = None,
    ema: bool = False,
) -> dict[str, Any]:
    """Writes the model of a checkpoint in a form that other programs read.

    Args:
        directory: the run.
        out: a folder, which must not exist or be empty; it appears whole or not at all.
        form: `hf`, `state-dict` or `safetensors`; default: `hf` for a model of transformers, else `safetensors`.
        step: the checkpoint; default: the newest.
        ema: the moving average in place of the weights.

    Returns:
        `folder`, `format`, `step`, `tensors`, `bytes`, `files`.

    Raises:
        InputError: if the model has no such form, the run is none, or `out` cannot be written.
    """
    if form is not None and form not in FORMS:
        raise InputError(f"`{form}` is no form of a model", where="--format", fix=nearest(form, FORMS))
    run = Run.open(Path(directory))
    target = Path(os.path.abspath(out))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("exists already", where=str(target), fix="Choose a new or empty folder")
    job = run.job
    if problems := task.check(job):
        raise JobError(problems)
    source = launch.chosen(run, step)
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")  # process numbers come again
    settings = {
        "job": job.resolved(),
        "folder": job.folder,
        "checkpoint": str(source),
        "out": str(partial),
        "form": form,
        "ema": ema,
    }
    try:
        partial.mkdir(parents=True)
        with before.cluster_of(_here(job)) as cluster:
            spec = ProcessSpec("worker", 0, 1, "verbund.stage.exporting:work", settings=settings)
            (result,) = supervised(cluster, job, [spec])
        partial.rename(target)  # over an empty folder, if there is one
    except OSError as error:
        raise InputError(durable.reason(error), where=str(target), fix="Choose another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"folder": str(target), **result}


def _here(job: Job) -> Job:
    """The job on this machine alone, whatever hosts it has been trained on."""
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"kind": "local"})})
