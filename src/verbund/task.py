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

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verbund.errors import Problem, TaskError, VerbundError, nearest, text_of
from verbund.job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn

    from verbund.sums import Sums

Columns = dict[str, Any]
HUGGING_FACE = "hf:"
FUNCTIONS = (
    "model",
    "inputs",
    "targets",
    "loss",
    "metrics",
    "augment",
    "dataset",
    "validation_dataset",
    "tensor_plan",
    "pipeline_plan",
    "rows",
)


@dataclass(frozen=True)
class Saved:
    """A model whose values lie in files, so that each worker can read its part alone."""

    bare: Callable[[], nn.Module]
    """Builds the model as if there were no files."""
    names: frozenset[str]
    """The parameters and buffers that are in the files."""
    read: Callable[[str], Tensor]
    """One of them."""


@dataclass(frozen=True)
class Task:
    """The user's functions, with the job's names filled in where the file has none."""

    file: Path
    model: Callable[[], nn.Module]
    inputs: Callable[[Columns], Any]
    targets: Callable[[Columns], Any]
    loss: Callable[[Any, Any], Sums]
    metrics: Callable[[Any, Any], dict[str, Sums]] | None
    augment: Callable[[Columns, Any], Columns] | None
    dataset: Callable[[], Any] | None
    validation_dataset: Callable[[], Any] | None
    couples: bool
    own: frozenset[str]
    """Which of the functions the file itself has."""
    tensor_plan: Callable[[], dict[str, Any]] | None = None
    pipeline_plan: Callable[[], list[str]] | None = None
    rows: Callable[[Columns], dict[str, Tensor]] | None = None
    saved: Saved | None = None
    """Where `model` reads its values from files."""

    def build(self) -> nn.Module:
        """Calls the user's `model()`.

        Raises:
            TaskError: if it does not return a module with parameters.
        """
        from torch import nn

        model = self.model()
        if not isinstance(model, nn.Module):
            raise TaskError(f"`model()` returned a {type(model).__name__}, not an nn.Module", where=str(self.file))
        if not any(True for _ in model.parameters()):
            raise TaskError("`model()` returned a module without parameters", where=str(self.file))
        return model


def check(job: Job) -> list[Problem]:
    """What can be said of the task without importing it."""
    if job.task.startswith(HUGGING_FACE):
        from verbund.interop import huggingface

        return huggingface.check(job)
    if job.task.startswith("keras:"):
        return [Problem("task", f"`{job.task}` is not available in this version", "Name a Python file with `model()`")]
    path = job.path(job.task)
    if not path.is_file():
        return [Problem("task", f"no such file: {path}", "The path is relative to the job file")]
    try:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    except SyntaxError as error:
        return [Problem(f"{path}, line {error.lineno}", f"syntax error: {error.msg}")]
    except (OSError, ValueError) as error:
        return [Problem(str(path), f"cannot be read: {error}")]
    return []


def needs_transformers(job: Job) -> bool:
    """Whether the task's model is one of the package transformers, as far as the text tells."""
    if find_spec("transformers") is None:
        return False
    if job.task.startswith(HUGGING_FACE):
        return True
    try:
        tree = ast.parse(job.path(job.task).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    return any(name.split(".")[0] == "transformers" for name in imported)


def functions(job: Job) -> frozenset[str]:
    """Which of `FUNCTIONS` the task file has, read off its text without running it; all where it imports `*`."""
    if job.task.startswith(HUGGING_FACE):
        return frozenset(("model",))
    try:
        tree = ast.parse(job.path(job.task).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    names = set(_bound(tree))
    return frozenset(FUNCTIONS) if "*" in names else frozenset(name for name in FUNCTIONS if name in names)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that running a module binds; what its functions and classes bind inside is not among them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.alias):
            yield child.asname or child.name
        elif not isinstance(child, (ast.AsyncFunctionDef, ast.Lambda)):
            yield from _bound(child)


def in_float64(task: Task) -> Task:
    """The same task with the model's weights, its inputs and the targets in float64, where they are floating-point."""
    import torch
    from torch.utils._pytree import tree_map

    saved = task.saved
    if saved is not None:
        bare = saved.bare
        saved = replace(saved, bare=lambda: bare().double())

    def doubled(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return replace(
        task,
        model=lambda: task.model().double(),
        saved=saved,
        inputs=lambda batch: tree_map(doubled, task.inputs(batch)),
        targets=lambda batch: tree_map(doubled, task.targets(batch)),
    )


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
        inputs=getattr(module, "inputs", None) or _default_inputs(job, path, columns),
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


def _names(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _default_inputs(job: Job, path: Path, columns: Sequence[str]) -> Callable[[Columns], Any]:
    import torch

    objective = job.train.objective
    if objective is not None and objective.name == "next_token":
        column = next(iter(_names(job.data.input)), "tokens")
        return lambda batch: column_of(batch, column, path)[:, :-1].long()
    names = _names(job.data.input)
    if not names and job.data.train is None:
        names = ["input"]
    if not names:
        raise TaskError(
            "no input: neither `data.input` in the job nor `inputs(batch)` here",
            where=str(path),
            fix=_one_of(columns, "input"),
        )
    scales = job.data.scale

    def cast(batch: Columns, name: str) -> Tensor:
        value = column_of(batch, name, path)
        scale = scales.get(name, 1.0)
        numbers = value.to(torch.float32)
        numbers = numbers.unsqueeze(-1) if numbers.dim() == 1 else numbers
        if scale == 1.0:
            return numbers
        return numbers.div_(scale) if value.dtype != torch.float32 else numbers / scale

    if len(names) == 1:
        (only,) = names
        return lambda batch: cast(batch, only)

    def concatenated(batch: Columns) -> Tensor:
        parts = [cast(batch, name) for name in names]
        if any(part.shape[:-1] != parts[0].shape[:-1] for part in parts):
            shapes = ", ".join(f"{name} {list(part.shape[1:])}" for name, part in zip(names, parts, strict=True))
            raise TaskError(f"inputs of different shapes cannot be concatenated: {shapes}", where=str(path))
        return torch.cat(parts, dim=-1)

    return concatenated


def default_targets(job: Job, path: Path, columns: Sequence[str] = ()) -> Callable[[Columns], Any]:
    """What the loss compares with, from `data.target` and the objective."""
    import torch

    objective = job.train.objective
    name = objective.name if objective is not None else None
    if name == "next_token":
        column = next(iter(_names(job.data.input)), "tokens")
        return lambda batch: column_of(batch, column, path)[:, 1:].long()
    names = _names(job.data.target)
    if not names and job.data.train is None:
        names = ["target"]
    if not names:
        if objective is None:
            return lambda batch: batch
        raise TaskError(
            "no target: neither `data.target` in the job nor `targets(batch)` here",
            where=str(path),
            fix=_one_of(columns, "target"),
        )

    def cast(value: Tensor) -> Tensor:
        if name == "cross_entropy":
            return value if value.is_floating_point() and value.dim() > 1 else value.long()
        if name is not None or value.is_floating_point():
            return value.to(torch.float32)
        return value

    if len(names) == 1:
        (only,) = names
        return lambda batch: cast(column_of(batch, only, path))

    def stacked(batch: Columns) -> Tensor:
        parts = [cast(column_of(batch, column, path)) for column in names]
        return torch.cat([part.unsqueeze(-1) if part.dim() == 1 else part for part in parts], dim=-1)

    return stacked


def _one_of(columns: Sequence[str], key: str) -> str | None:
    if not columns:
        return None
    some = ", ".join(f"`{name}`" for name in columns[:8]) + (", …" if len(columns) > 8 else "")
    return f"The data has {some}: name one or more as `{key}` in [data]"


def column_of(batch: Columns, name: str, path: Path) -> Tensor:
    """A column of a batch.

    Raises:
        TaskError: if there is none of that name.
    """
    try:
        value: Tensor = batch[name]
    except KeyError:
        raise TaskError(f"the data has no column `{name}`", where=str(path), fix=nearest(name, list(batch))) from None
    return value


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


def as_sums(value: Any, what: str, path: Path) -> Sums:
    """What a user's function returned as `Sums`: they themselves, (total, weight), or one value per sample.

    Raises:
        TaskError: for a mean or anything else that is not per sample.
    """
    import torch

    from verbund.sums import Sums

    if isinstance(value, tuple) and len(value) == 2:
        value = Sums(*value)
    if isinstance(value, torch.Tensor):
        value = Sums(value, torch.ones_like(value, requires_grad=False))
    if not isinstance(value, Sums):
        raise TaskError(f"`{what}` returned a {type(value).__name__}", where=str(path), fix=PER_SAMPLE)
    if value.total.dim() != 1 or value.weight.shape != value.total.shape:
        shapes = f"total {list(value.total.shape)}, weight {list(value.weight.shape)}"
        raise TaskError(f"`{what}` returned {shapes}, not one value per sample", where=str(path), fix=PER_SAMPLE)
    return value


PER_SAMPLE = (
    "Return one value per sample, shape [B] (e.g. reduction='none'), or verbund.sums.Sums(total, weight): "
    "never a mean, so that sums over any division of the batch are exact"
)
