"""What a server asks of its clients: the job and the task file, as they travel and as a client has them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund.checkpoint import durable
from verbund.errors import InputError, TaskError
from verbund.job import Job
from verbund.plain_json import text as json_text

_FILE = "task.py"
_TASK_LIMIT = 4 << 20
_SECTIONS = ("name", "seed", "train", "validate")
_OF_DATA = ("validation_fraction", "input", "target", "scale", "sequence", "tokenizer", "image_size", "window")
"""What of `data` does not say where something lies."""


@dataclass(frozen=True)
class Offer:
    """A job without whatever is a site's own: where data lie, processes, folders.

    Args:
        job: plain values of the job.
        task: the text of the task file; None where the task is `hf:smollm2`, which a package carries.
    """

    job: dict[str, Any]
    task: str | None

    @staticmethod
    def of(job: Job) -> Offer:
        """What a job asks of clients.

        Raises:
            InputError: if it cannot be done where only the task file is.
        """
        whole = job.resolved()
        if not job.strategy.exchange.federated:
            fix = 'Set `strategy.exchange = "federated"`'
            raise InputError(f"the exchange is `{job.strategy.exchange.name}`", where="job, strategy.exchange", fix=fix)
        asked = job.strategy.exchange
        privacy = asked.privacy
        unavailable = {
            "privacy.kind": privacy.kind not in ("none", "central", "local", "distributed"),
            "privacy.sampling": privacy.sampling != "fixed",
        }
        for key, wanted in unavailable.items():
            if wanted:
                fix = "Leave it out, or simulate with `verbund train`"
                what = "is set to what is not available with real clients"
                raise InputError(what, where=f"job, strategy.exchange.{key}", fix=fix)
        if job.train.steps is None:
            raise InputError("the number of rounds is missing", where="job, train.steps", fix="Give `train.steps`")
        if job.data.tokenizer not in (None, "bytes"):
            raise InputError("is a file that clients do not have", where="job, data.tokenizer", fix="Use `bytes`")
        exchange = {key: value for key, value in whole["strategy"]["exchange"].items() if key != "partition"}
        kept = {key: whole[key] for key in _SECTIONS if key in whole}
        kept["data"] = {key: value for key, value in whole["data"].items() if key in _OF_DATA}
        kept["strategy"] = {"exchange": exchange}
        if job.task == "hf:smollm2":
            return Offer({**kept, "task": job.task}, None)
        if job.task.startswith("hf:"):
            fix = "Use a task file whose `model()` builds it, or `hf:smollm2`"
            raise InputError("is a folder that clients do not have", where="job, task", fix=fix)
        path = job.path(job.task)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"cannot be read: {error}", where=str(path)) from None
        if len(text) > _TASK_LIMIT:
            raise TaskError(f"has more than {_TASK_LIMIT} characters", where=str(path))
        return Offer({**kept, "task": _FILE}, text)

    @property
    def task_digest(self) -> str:
        """SHA-256 of the task file, which policies name; of a packaged task, of its name."""
        return hashlib.sha256((self.task if self.task is not None else self.job["task"]).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """SHA-256 of the whole."""
        return hashlib.sha256(json_text(self.record()).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"job": self.job, "task": self.task}

    @staticmethod
    def from_record(record: dict[str, Any]) -> Offer:
        """What `record` described; it came from somebody else.

        Raises:
            InputError: if it is no offer.
        """
        job, task = record.get("job"), record.get("task")
        if not isinstance(job, dict) or not (task is None or isinstance(task, str)):
            raise InputError("what the server sent is no job")
        if job.get("task") != (_FILE if task is not None else "hf:smollm2"):
            raise InputError("what the server sent names another task than the one that it sent")
        if not set(job) <= {*_SECTIONS, "task", "data", "strategy"} or not isinstance(job.get("data"), dict):
            raise InputError("what the server sent has settings that are this side's own")
        if not set(job["data"]) <= set(_OF_DATA) or set(job.get("strategy", {})) != {"exchange"}:
            raise InputError("what the server sent has settings that are this side's own")
        return Offer(job, task)

    def write(self, folder: Path) -> Path | None:
        """Writes the task file, so that it can be read before it runs; where it is."""
        if self.task is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _FILE
        durable.replace(path, self.task.encode())
        return path

    def job_at(self, folder: Path, data: str, workers: int) -> Job:
        """The job as a client does it.

        Args:
            folder: where the task file was written to.
            data: the client's own samples.
            workers: of its island.

        Raises:
            JobError: if it is none; versions may differ.
        """
        source = data if data.startswith("sklearn:") else os.path.abspath(data)
        local = {**self.job, "data": {**self.job["data"], "train": source}}
        local["strategy"] = {**self.job["strategy"], "mesh": {"data": workers}}
        return Job.build(local, {}, source="the server's job", folder=folder)

    def facts(self, job: Job, task_at: Path | None) -> dict[str, Any]:
        """What policies look at; see `Policy.job_problems`."""
        exchange = job.strategy.exchange
        return {
            "task": self.task_digest,
            "task_at": str(task_at or job.task),
            "secure": exchange.secure is not None,
            "epsilon": exchange.privacy.budget if exchange.privacy.kind != "none" else None,
            "delta": exchange.privacy.delta if exchange.privacy.kind != "none" else None,
            "weighted": exchange.rule.by_samples,
        }
