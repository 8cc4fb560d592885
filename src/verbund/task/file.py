"""The task file: it is run, and what it lacks is filled in from what the job names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verbund.errors import TaskError, VerbundError, nearest, text_of
from verbund.job import Job
from verbund.task.defaults import default_inputs, default_targets
from verbund.task.per_sample import as_sums
from verbund.task.task import Columns, Task, in_float64
from verbund.task.text import FUNCTIONS, HUGGING_FACE, check

if TYPE_CHECKING:
    from torch import Tensor

    from verbund.sums import Sums


def load(job: Job, columns: Sequence[str] = ()) -> Task:
    """Runs the task file, or finds the Hugging Face model, and fills in what the job names.

    Args:
        job: names the file.
        columns: those of the data, to name them to who has forgotten to.

    Raises:
        TaskError: if the file cannot be run, has no `model`, or asks for what is not offered.
    """
    task = _loaded(job, columns)
    return in_float64(task) if job.train.precision == "fp64" else task


def _loaded(job: Job, columns: Sequence[str]) -> Task:
    for problem in check(job):
        raise TaskError(problem.what, where=problem.where, fix=problem.fix)
    if job.task.startswith(HUGGING_FACE):
        from verbund.interop import huggingface

        return huggingface.load(job)
    path = job.path(job.task).resolve()
    module = _execute(path)
    for name in FUNCTIONS:
        if hasattr(module, name) and not callable(getattr(module, name)):
            raise TaskError(f"`{name}` is not a function", where=str(path))
    if not hasattr(module, "model"):
        functions = [name for name, value in vars(module).items() if callable(value)]
        hint = nearest("model", functions) if functions else "Write `def model(): return nn.Sequential(...)`"
        raise TaskError("no function `model()`", where=str(path), fix=hint if hint.startswith("Did") else None)
    if hasattr(module, "optimizers"):
        raise TaskError(
            "a task with several optimisers (`optimizers`) is not offered: one step is one global batch, one loss "
            "and one update, which is what keeps every way of dividing it equal",
            where=str(path),
            fix="Express the task as one loss over one set of parameters, or train the models as separate jobs",
        )
    validation = getattr(module, "validation_dataset", None)
    return Task(
        file=path,
        model=_named_errors(module.model, path),
        inputs=getattr(module, "inputs", None) or default_inputs(job, path, columns),
        targets=getattr(module, "targets", None) or default_targets(job, path, columns),
        loss=_loss(module, job, path),
        metrics=_metrics(module, path),
        augment=_augment(module, path),
        dataset=_dataset(module, job, path),
        validation_dataset=_named_errors(validation, path) if validation is not None else None,
        tensor_plan=getattr(module, "tensor_plan", None),
        pipeline_plan=getattr(module, "pipeline_plan", None),
        rows=_rows(module, path),
        couples=bool(getattr(module, "couples", False)),
        own=frozenset(name for name in FUNCTIONS if hasattr(module, name)),
    )


def _execute(path: Path) -> ModuleType:
    name = f"verbund_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError("is not a Python file", where=str(path), fix="A task file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TaskError(
            f"{type(error).__name__} while it was imported: {text_of(error)}", where=_place_of(error, path)
        ) from error
    return module


def _place_of(error: BaseException, path: Path) -> str:
    """The task file, with the innermost line of it that the error came through."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{path}, line {line}" if line else str(path)


def _dataset(module: ModuleType, job: Job, path: Path) -> Callable[[], Any] | None:
    dataset: Callable[[], Any] | None = getattr(module, "dataset", None)
    return _named_errors(dataset, path) if job.data.train is None and dataset is not None else None


def _named_errors(function: Callable[[], Any], path: Path) -> Callable[[], Any]:
    """`function`, whose exceptions say where in the task file they came from."""

    def called() -> Any:
        try:
            return function()
        except (VerbundError, MemoryError):
            raise
        except Exception as error:
            raise TaskError(
                f"{type(error).__name__} in `{function.__name__}()`: {text_of(error)}", where=_place_of(error, path)
            ) from error

    return called


def _augment(module: ModuleType, path: Path) -> Callable[[Columns, Any], Columns] | None:
    own = getattr(module, "augment", None)
    if own is None:
        return None

    def augment(batch: Columns, random: Any) -> Columns:
        result = own(batch, random)
        if not isinstance(result, dict):
            raise TaskError(
                f"`augment` returned a {type(result).__name__}, not a batch",
                where=str(path),
                fix="Return a dict of columns, such as the one that it is given",
            )
        return result

    return augment


def _rows(module: ModuleType, path: Path) -> Callable[[Columns], dict[str, Tensor]] | None:
    own = getattr(module, "rows", None)
    if own is None:
        return None
    import torch

    def rows(batch: Columns) -> dict[str, Tensor]:
        wanted = own(batch)
        if not isinstance(wanted, dict):
            raise TaskError(f"`rows` returned a {type(wanted).__name__}, not a dict", where=str(path), fix=_ROWS)
        for name, ids in wanted.items():
            if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
                kind = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
                raise TaskError(f"`rows` returned {kind} for `{name}`, not whole numbers", where=str(path), fix=_ROWS)
        return wanted

    return rows


_ROWS = "Return a dict from the module of each table to the ids that it will look up, e.g. {'users': batch['user']}"


def _loss(module: ModuleType, job: Job, path: Path) -> Callable[[Any, Any], Sums]:
    own = getattr(module, "loss", None)
    if own is not None:
        return lambda output, targets: as_sums(own(output, targets), "loss", path)
    if job.train.objective is None:
        raise TaskError(
            "no loss: neither `train.objective` in the job nor `loss(output, targets)` here", where=str(path)
        )
    from verbund import objectives

    return objectives.build(job.train.objective)


def _metrics(module: ModuleType, path: Path) -> Callable[[Any, Any], dict[str, Sums]] | None:
    own = getattr(module, "metrics", None)
    if own is None:
        return None

    def measure(output: Any, targets: Any) -> dict[str, Sums]:
        values = own(output, targets)
        if not isinstance(values, dict):
            raise TaskError(f"`metrics` returned a {type(values).__name__}, not a dict", where=str(path))
        return {name: as_sums(value, f"metrics: {name}", path) for name, value in values.items()}

    return measure
