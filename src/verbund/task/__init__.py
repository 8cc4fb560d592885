"""The task: what the user gives. A Python file with plain functions, of which only `model` is required; or a Hugging
Face model (`hf:PATH`, see `verbund.interop.huggingface`).

    model() -> nn.Module
    inputs(batch) -> a tensor, tuple or dict    what the model is called with      default: `data.input`
    targets(batch) -> Any                       what the loss compares with        default: `data.target`
    loss(output, targets) -> Sums | Tensor[B]   per sample, never a mean           default: `train.objective`
    metrics(output, targets) -> dict[str, Sums | Tensor[B]]                        besides those of the job
    augment(batch, random) -> batch             training only, randomness keyed by the sample
    dataset() -> map-style torch Dataset        in place of `data.train`
    validation_dataset() -> Dataset             in place of `data.validation`
    tensor_plan() -> dict                       how the axis `tensor` cuts modules   default: detection
    pipeline_plan() -> list[str]                modules at which stages may begin    default: children of ModuleLists
    rows(batch) -> dict[str, Tensor]            of embedding tables, by module, the ids that a batch will look up: under
                                                a parameter server all are pulled in one request, before the forward
                                                pass; else each table's when it is used
    couples = True                              samples interact in the loss: see `train.group`

`batch` is a dict of column name to tensor, dimension 0 being the sample.
"""

from __future__ import annotations

from verbund.task.defaults import column_of, default_targets
from verbund.task.file import load
from verbund.task.per_sample import as_sums
from verbund.task.task import Columns, Saved, Task, in_float64
from verbund.task.text import FUNCTIONS, HUGGING_FACE, check, functions, needs_transformers

__all__ = [
    "FUNCTIONS",
    "HUGGING_FACE",
    "Columns",
    "Saved",
    "Task",
    "as_sums",
    "check",
    "column_of",
    "default_targets",
    "functions",
    "in_float64",
    "load",
    "needs_transformers",
]
