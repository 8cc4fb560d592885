"""Objectives: losses by name, as undivided sums per sample.

`total.sum() / weight.sum()` of an objective is what the function of the same name in `torch.nn.functional`
gives with `reduction="mean"`: class weights and ignored positions are in the denominator exactly as they are
there. The division is done once, over the whole global batch, by whoever adds the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verbund.errors import DataError, InputError, TaskError
from verbund.job import Objective
from verbund.sums import Sums

Loss = Callable[[Any, Any], Sums]

_REDUCED = frozenset((torch.float16, torch.bfloat16))


def build(objective: Objective) -> Loss:
    """The loss that `objective` names, as a function of `(output, targets)`.

    What it accepts, with B samples, C classes, k values a sample, T tokens and V words:

    - `cross_entropy`: output [B, C] or [B, C, d1, ...]; targets are class numbers [B] or [B, d1, ...], or
      probabilities of the output's shape. The weight counts positions that are not ignored, times the weight
      of their class.
    - `binary_cross_entropy`: output (logits) and targets [B], [B, 1] or [B, k]; the weight is k.
    - `mean_squared_error`: output and targets [B], [B, 1] or [B, k, ...]; the weight is the number of values.
    - `next_token`: output [B, T, V], or an object or mapping with such `logits`; targets are tokens [B, T],
      already shifted by one. The weight is the number of counted tokens.

    Raises:
        InputError: if a setting does not apply to this objective. The function itself raises `TaskError` on
            shapes that do not fit and `DataError` on binary targets outside 0 to 1.
    """
    name = objective.name
    classes = name in ("cross_entropy", "next_token")
    if not classes and objective.label_smoothing:
        raise InputError(
            f"label smoothing is not defined for `{name}`",
            where="train.objective.label_smoothing",
            fix="Leave it out, or use `cross_entropy`",
        )
    if not classes and objective.class_weights is not None:
        raise InputError(
            f"class weights are not defined for `{name}`",
            where="train.objective.class_weights",
            fix="Leave them out, or use `cross_entropy`",
        )
    if objective.class_weights is not None and (
        not objective.class_weights or not all(0 <= weight < float("inf") for weight in objective.class_weights)
    ):
        raise InputError("class weights must be finite and not negative", where="train.objective.class_weights")
    if name == "cross_entropy":
        return _CrossEntropy(objective)
    if name == "next_token":
        return _NextToken(objective)
    return _binary_cross_entropy if name == "binary_cross_entropy" else _mean_squared_error


def default_metrics(objective: Objective | None) -> list[str]:
    """Names of the metrics that are computed when a job names none; `loss` is always there besides."""
    if objective is None:
        return []
    return {
        "cross_entropy": ["accuracy"],
        "binary_cross_entropy": ["accuracy"],
        "mean_squared_error": ["mae", "rmse"],
        "next_token": ["accuracy", "perplexity"],
    }[objective.name]


def logits(output: Any) -> Tensor:
    """The tensor in a model's output: itself, or its `logits` as Hugging Face models name them.

    Raises:
        TaskError: if there is none.
    """
    if isinstance(output, Tensor):
        return output
    inner = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(inner, Tensor):
        raise TaskError(
            f"the model returned a `{type(output).__name__}`, not a tensor or an object with `logits`",
            where="model()",
            fix="Return the logits, or give the task its own `loss`",
        )
    return inner


def paired(output: Tensor, targets: Tensor, objective: str) -> tuple[Tensor, Tensor]:
    """Output and targets of one shape, where [B] and [B, 1] count as the same.

    Raises:
        TaskError: if they differ otherwise; nothing is ever broadcast.
    """
    if output.shape == targets.shape:
        return output, targets
    if output.ndim == 2 and targets.ndim == 1 and output.shape[1] == 1 and len(output) == len(targets):
        return output.squeeze(1), targets
    if output.ndim == 1 and targets.ndim == 2 and targets.shape[1] == 1 and len(output) == len(targets):
        return output, targets.squeeze(1)
    raise _misfit(objective, output, targets, "output and targets both [B], [B, 1] or [B, k]")


def check_targets(objective: Objective, targets: Any, output: Any, ids: Sequence[int] | Tensor | None) -> str | None:
    """Looks for a target that explains a failed or non-finite loss.

    For use after a failure, or on a first batch: it is not fast.

    Args:
        objective: the loss.
        targets: as given to the loss.
        output: the model's output, or None if there was none; without it classes have no upper bound.
        ids: the sample ids of the batch, [B].

    Returns:
        What is wrong with the first bad target, with its sample's id; None if all are good.
    """
    if not isinstance(targets, Tensor) or targets.ndim == 0:
        return None
    found = targets.detach().cpu()
    whole = not (found.is_floating_point() or found.is_complex())
    try:
        scores: Tensor | None = logits(output)
    except TaskError:
        scores = None
    if objective.name == "next_token" or (objective.name == "cross_entropy" and whole):
        if scores is None:
            classes = len(objective.class_weights) if objective.class_weights else None
        elif objective.name == "next_token":
            classes = scores.shape[-1]
        else:
            classes = scores.shape[1] if scores.ndim > 1 else None
        bad = found < 0 if classes is None else (found < 0) | (found >= classes)
        bad &= found != objective.ignore_index
        known = (
            "classes begin at 0" if classes is None else f"the model has {classes} outputs, classes 0 to {classes - 1}"
        )
        expected = f"{known}; {objective.ignore_index} is ignored"
    else:
        bad = ~found.isfinite()
        expected = "a finite number is needed"
        if objective.name != "mean_squared_error":
            bad |= (found < 0) | (found > 1)
            expected = "a value from 0 to 1 is needed"
    rows = bad.reshape(len(found), -1)
    if not rows.any():
        return None
    row = int(rows.any(1).nonzero()[0])
    value = found.reshape(len(found), -1)[row, int(rows[row].nonzero()[0])].item()
    sample = f"sample {int(ids[row])}" if ids is not None else f"sample {row} of the batch"
    return f"the target of {sample} is {value}; {expected}"


class _CrossEntropy:
    """`cross_entropy`. Class weights are kept once per device and dtype."""

    def __init__(self, objective: Objective) -> None:
        self._smoothing = objective.label_smoothing
        self._ignore = objective.ignore_index
        self._class_weights = objective.class_weights
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, output: Any, targets: Any) -> Sums:
        output = logits(output)
        if output.dtype in _REDUCED:
            output = output.float()
        shape = output.shape
        if len(shape) < 2 or not isinstance(targets, Tensor):
            raise self._misfit(output, targets)
        whole = not targets.is_floating_point()
        if targets.shape == shape and (not whole or shape[1] > 1):
            return self._probabilities(output, targets)
        if whole and targets.ndim == 2 and len(shape) == 2 and targets.shape[1] == 1:
            targets = targets.squeeze(1)
        if targets.shape[0] != shape[0] or targets.shape[1:] != shape[2:]:
            raise self._misfit(output, targets)
        if not whole:
            raise TaskError(
                f"targets {list(targets.shape)} of type {targets.dtype} are class numbers for an output "
                f"{list(shape)}, but are no integers",
                where="targets",
                fix="Give an integer column as the target, or `mean_squared_error` as the objective",
            )
        if targets.dtype != torch.int64:
            targets = targets.long()
        return self.classes(output, targets)

    def classes(self, output: Tensor, targets: Tensor) -> Sums:
        """Output [B, C, ...] and class numbers [B, ...], checked."""
        weights = self._weights(output)
        total = F.cross_entropy(
            output,
            targets,
            weights,
            ignore_index=self._ignore,
            reduction="none",
            label_smoothing=self._smoothing,
        )
        counted = targets.ne(self._ignore)
        weight = counted.to(total.dtype)
        if weights is not None:  # an ignored target may be no class at all (-100), so class 0 stands in for it
            weight = weight * weights[targets.where(counted, 0)]
        if total.ndim > 1:
            total, weight = total.flatten(1).sum(1), weight.flatten(1).sum(1)
        return Sums(total, weight)

    def _probabilities(self, output: Tensor, targets: Tensor) -> Sums:
        total = F.cross_entropy(
            output,
            targets.to(output.dtype),
            self._weights(output),
            reduction="none",
            label_smoothing=self._smoothing,
        )
        if total.ndim == 1:
            return Sums(total, total.new_ones(total.shape))
        total = total.flatten(1)
        return Sums(total.sum(1), total.new_full((len(total),), total.shape[1]))

    def _weights(self, output: Tensor) -> Tensor | None:
        if self._class_weights is None:
            return None
        if len(self._class_weights) != output.shape[1]:
            raise InputError(
                f"{len(self._class_weights)} class weights for {output.shape[1]} classes",
                where="train.objective.class_weights",
                fix=f"The model's output is {list(output.shape)}: give {output.shape[1]} weights",
            )
        if type(output) is not Tensor:  # a fake or other special tensor: nothing of it may outlive the call
            return output.new_tensor(self._class_weights)
        key = (output.device, output.dtype)
        if key not in self._placed:
            with torch.inference_mode(False):  # or validation's first call would spoil it for training
                self._placed[key] = torch.tensor(self._class_weights, device=key[0], dtype=key[1])
        return self._placed[key]

    def _misfit(self, output: Tensor, targets: Any) -> TaskError:
        return _misfit(
            "cross_entropy",
            output,
            targets,
            "output [B, C] with targets [B] (class numbers) or [B, C] (probabilities), "
            "or output [B, C, d1, ...] with targets [B, d1, ...]",
        )


class _NextToken:
    """`next_token`: cross-entropy over the words at every position."""

    def __init__(self, objective: Objective) -> None:
        self._cross_entropy = _CrossEntropy(objective)

    def __call__(self, output: Any, targets: Any) -> Sums:
        output = logits(output)
        if output.ndim != 3 or not isinstance(targets, Tensor) or targets.shape != output.shape[:2]:
            raise _misfit("next_token", output, targets, "output [B, T, V] with targets [B, T]")
        if targets.is_floating_point():
            raise TaskError(
                f"targets of type {targets.dtype} are no tokens", where="targets", fix="Give integer tokens"
            )
        if output.dtype in _REDUCED:
            output = output.float()
        samples, length, words = output.shape
        # Rows of words are far faster than the layout [B, V, T] that torch wants for positions.
        flat = self._cross_entropy.classes(output.reshape(-1, words), targets.reshape(-1).long())
        return Sums(flat.total.view(samples, length).sum(1), flat.weight.view(samples, length).sum(1))


def _binary_cross_entropy(output: Any, targets: Any) -> Sums:
    output, targets = _values("binary_cross_entropy", output, targets)
    # Torch takes any number here and gives a loss without a lower bound: labels of 1 and 2, or -1 and
    # 1, would train to nonsense. Elsewhere than on the CPU the check would make the host wait.
    if type(targets) is Tensor and targets.device.type == "cpu" and targets.numel():
        low, high = torch.aminmax(targets.detach())
        if not (float(low) >= 0.0 and float(high) <= 1.0):
            raise DataError(
                f"targets of `binary_cross_entropy` lie between 0 and 1, these between {low:g} and {high:g}",
                where="targets",
                fix="Encode the two classes as 0 and 1",
            )
    return _per_sample(F.binary_cross_entropy_with_logits(output, targets, reduction="none"))


def _mean_squared_error(output: Any, targets: Any) -> Sums:
    output, targets = _values("mean_squared_error", output, targets)
    return _per_sample(F.mse_loss(output, targets, reduction="none"))


def _values(name: str, output: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Output and targets of one shape and one floating-point type, at least one dimension."""
    output = logits(output)
    if not isinstance(targets, Tensor) or output.ndim == 0:
        raise _misfit(name, output, targets, "output and targets both [B], [B, 1] or [B, k]")
    output, targets = paired(output, targets, name)
    if output.dtype in _REDUCED:
        output = output.float()
    return output, targets if targets.dtype == output.dtype else targets.to(output.dtype)


def _per_sample(elements: Tensor) -> Sums:
    if elements.ndim == 1:
        return Sums(elements, elements.new_ones(elements.shape))
    elements = elements.flatten(1)
    return Sums(elements.sum(1), elements.new_full((len(elements),), elements.shape[1]))


def _misfit(objective: str, output: Tensor, targets: Any, expected: str) -> TaskError:
    seen = f"targets {list(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
    return TaskError(
        f"`{objective}` cannot compare an output {list(output.shape)} with {seen}",
        where="model()",
        fix=f"Expected: {expected}",
    )
