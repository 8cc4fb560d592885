"""Prediction: each worker computes a run of evaluation batches and writes it to a Parquet part of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbund.cluster.worker import Worker
from verbund.data.samples import ColumnFiles
from verbund.errors import InputError, TaskError
from verbund.exchange.parameter_server.remote import RemoteTables
from verbund.mesh.replica import Replica
from verbund.run import Run
from verbund.stage.island import Island
from verbund.stage.predictions import Column, PartWriter, written_to
from verbund.stage.restore import restore
from verbund.stage.served import live
from verbund.stage.validate import evaluation_batches, evaluation_threads


def work(worker: Worker) -> dict[str, Any]:
    """A worker's part of `verbund predict`."""
    island = Island.join(worker)
    source = worker.settings["source"]
    if not worker.settings["live"]:
        replica = island.replica(worker)
        restore(worker.location(source), replica, weights_only=True)
        return {"samples": _predict(worker, island, replica, source)}
    replica = island.replica(worker, RemoteTables.install)
    worker.doing("reading from the servers", 0)
    reader, close = live.reader(Run.open(Path(source)), island.job.cluster.step_deadline)
    try:
        assert isinstance(replica.tables, RemoteTables)
        reader.take(replica, replica.tables)
        return {"samples": _predict(worker, island, replica, source), "versions": reader.versions}
    finally:
        close()


def _predict(worker: Worker, island: Island, replica: Replica, source: str) -> int:
    """Writes this worker's part; how many samples it has."""
    samples = island.validation_set
    if samples is None:
        raise InputError("there is no data to predict", where=source)
    objective = island.job.train.objective
    names: list[str] | None = None
    if objective is not None and objective.name in _CLASSES:
        names = worker.settings["classes"]
    files = samples.source.files if isinstance(samples.source, ColumnFiles) else None
    count = 0
    part_file = worker.location(worker.settings["parts"][island.mesh.rank])
    with (
        written_to(part_file) as path,
        PartWriter(path) as part,
        evaluation_threads(island),
        replica.evaluation.active(),
    ):
        for index, batch in evaluation_batches(samples, island.job.validate_.batch, island, contiguous=True):
            worker.doing("predicting", index)
            output = replica.evaluation.predict(batch)
            if output is None or batch.phantom:
                continue
            columns: dict[str, Column] = {"sample": batch.ids}
            if files is not None:
                columns["file"] = [files[number] for number in batch.ids.tolist()]
            for name, tensor in columns_of(output, objective.name if objective else None).items():
                if tensor.dim() == 0 or len(tensor) != len(batch.ids):
                    raise TaskError(
                        f"the model gave {list(tensor.shape)} as `{name}` for a batch of {len(batch.ids)} samples",
                        where=str(replica.task.file),
                        fix="Dimension 0 of what it returns must be the sample",
                    )
                values = tensor.cpu().numpy()
                columns[name] = values
                if name == "prediction" and values.ndim == 1 and names is not None:
                    columns["class"] = [names[k] if k < len(names) else None for k in values.tolist()]
            part.write(columns)
            count += len(batch.ids)
    return count


_CLASSES = ("cross_entropy", "binary_cross_entropy")


def columns_of(output: Any, objective: str | None) -> dict[str, Tensor]:
    """A model's output as columns of predictions, dimension 0 being the sample.

    cross_entropy: `prediction`, the class, and `probability` of every class; binary_cross_entropy: `prediction` (0 or
    1) and `probability`; mean_squared_error: `prediction`; next_token: `prediction`, the most likely token after each,
    and its `probability`; own losses: `output` as it is, or the entries of a dict.

    Raises:
        TaskError: if the output is not made of tensors.
    """
    output = getattr(output, "logits", output)
    if isinstance(output, dict):
        output = output.get("logits", output)
    if isinstance(output, dict):
        tensors = {str(name): value for name, value in output.items() if isinstance(value, Tensor)}
        if tensors:
            return {name: _plain(value) for name, value in tensors.items()}
    if not isinstance(output, Tensor):
        raise TaskError(f"the model's output is a {type(output).__name__}, which cannot be written as columns")
    output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if objective == "cross_entropy":
        return {"prediction": output.argmax(1), "probability": _plain(output.softmax(1))}
    if objective == "binary_cross_entropy":
        probability = _squeezed(output.sigmoid())
        return {"prediction": (probability >= 0.5).to(torch.int64), "probability": probability}
    if objective == "next_token":
        best, token = output.max(-1)
        return {"prediction": token, "probability": (best - output.logsumexp(-1)).exp()}
    if objective == "mean_squared_error":
        return {"prediction": _squeezed(output)}
    return {"output": _plain(output)}


def _squeezed(value: Tensor) -> Tensor:
    return value.squeeze(-1) if value.dim() == 2 and value.shape[-1] == 1 else value


def _plain(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
