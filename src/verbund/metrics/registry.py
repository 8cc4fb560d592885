"""Metrics by name, and which of them fit an objective."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verbund.errors import InputError, nearest
from verbund.job import Objective
from verbund.metrics.base import Gathered, Metric
from verbund.metrics.counts import Accuracy, ConfusionMatrix, PerClass, TopK
from verbund.metrics.means import R2, Loss, MeanAbsoluteError, Perplexity, RootMeanSquaredError
from verbund.metrics.ranking import RocAuc

_CLASSES = ("accuracy", "precision", "recall", "f1", "confusion_matrix", "roc_auc")
_VALUES = ("mae", "rmse", "r2")
_FIT = {
    "cross_entropy": ("loss", *_CLASSES, "top_K", "perplexity"),
    "binary_cross_entropy": ("loss", *_CLASSES),
    "mean_squared_error": ("loss", *_VALUES),
    "next_token": ("loss", "accuracy", "top_K", "perplexity"),
}
NAMES = ("loss", *_CLASSES, "top_K", "perplexity", *_VALUES)
"""All names; the K of `top_K` is a number."""


def build(names: Sequence[str], objective: Objective | None) -> list[Metric | Gathered]:
    """Metrics by name, each once; `loss` is always the first.

    Args:
        names: of `NAMES`, with a number for the K of `top_K`.
        objective: None if the task has a loss of its own; then any metric may be asked for, and whether it
            can read output and targets shows when it does.

    Raises:
        InputError: on an unknown name, or on a metric that does not fit the objective.
    """
    metrics: list[Metric | Gathered] = [Loss()]
    binary = objective is not None and objective.name == "binary_cross_entropy"
    for name in dict.fromkeys(names):
        top = re.fullmatch(r"top_([0-9]+)", name)
        known = "top_K" if top else name
        if known not in NAMES or name == "top_K":
            hint = "Give K, e.g. `top_5`" if name == "top_K" else nearest(name, NAMES)
            raise InputError(f"`{name}` is no metric", where="validate.metrics", fix=hint)
        if objective is not None and known not in _FIT[objective.name]:
            raise InputError(
                f"metric `{name}` does not fit the objective `{objective.name}`",
                where="validate.metrics",
                fix="Those that do: " + ", ".join(_FIT[objective.name]),
            )
        if top and int(top[1]) < 1:
            raise InputError(f"`{name}`: K is at least 1", where="validate.metrics")
        if name != "loss":
            metrics.append(TopK(int(top[1])) if top else _make(name, binary))
    return metrics


def _make(name: str, binary: bool) -> Metric | Gathered:
    match name:
        case "accuracy":
            return Accuracy(binary)
        case "confusion_matrix":
            return ConfusionMatrix(binary)
        case "roc_auc":
            return RocAuc(binary)
        case "perplexity":
            return Perplexity()
        case "mae":
            return MeanAbsoluteError()
        case "rmse":
            return RootMeanSquaredError()
        case "r2":
            return R2()
    return PerClass(name, binary)
