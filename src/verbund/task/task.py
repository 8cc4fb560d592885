"""What a task is to the rest of the package: the user's functions, and the job's where the user has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbund.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from verbund.sums import Sums

Columns = dict[str, Any]


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
