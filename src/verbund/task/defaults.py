"""What a model is called with, and what its output is compared with, where the task file does not say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbund.errors import TaskError, nearest
from verbund.job import Job
from verbund.task.task import Columns

if TYPE_CHECKING:
    from torch import Tensor


def _names(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def default_inputs(job: Job, path: Path, columns: Sequence[str]) -> Callable[[Columns], Any]:
    """What the model is called with, from `data.input`: its columns in float32, side by side."""
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
