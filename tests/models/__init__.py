"""Small models as task files, each with `raw_job(folder)`: data written there and the job that trains on it.

A test takes one by name:

    job = models.job("gpt", tmp_path, {"strategy.mesh": {"data": 2}})

All of them give the same numbers however the work is divided.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from verbund.job import Job

PLAIN = ("mlp", "convnet", "gpt", "encoder")
TRANSFORMERS = ("llama", "bert")
"""These need the package transformers."""
ALL = PLAIN + TRANSFORMERS


def job(name: str, folder: Path, changes: dict[str, Any] | None = None) -> Job:
    """The job that trains the model `name` for three steps; writes its data to `folder`."""
    raw: dict[str, Any] = import_module(f"models.{name}").raw_job(folder)
    return Job.build(raw, changes or {}, source="job.toml", folder=folder)


def raw_job(task: str, folder: Path, data: dict[str, Any], **train: Any) -> dict[str, Any]:
    """What the models' jobs have in common.

    Args:
        task: the task file.
        folder: where the data lies and the cache goes.
        data: the section `data`.
        train: more of the section `train`.
    """
    return {
        "task": task,
        "name": Path(task).stem,
        "data": {"cache": str(folder / "cache"), **data},
        "train": {
            "global_batch": 13,
            "steps": 3,
            "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
            **train,
        },
        "validate": {"every": "end"},
        "checkpoint": {"every": "end"},
    }
