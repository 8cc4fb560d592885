"""Metrics that are ratios of counts: accuracy, top-K, precision, recall, F1, the confusion matrix.

With `binary_cross_entropy` a logit above 0 is a 1. One output is a binary task, whose precision, recall and
F1 are those of class 1; several outputs are as many labels, over which they are averaged.
"""

from __future__ import annotations

import numpy as np
import torch

from verbund.errors import InputError
from verbund.metrics.base import Floats, Metric, Observed, Share, Value

_MATRIX_LIMIT = 2048


class _Labelled(Metric):
    """Counts labels: class numbers, or with `binary` a 0 or 1 per output."""

    exact = True

    def __init__(self, binary: bool) -> None:
        self._binary = binary


class Accuracy(_Labelled, Share):
    """Share of positions whose most probable class is the target; binary: of labels that are right."""

    name = "accuracy"

    def measure(self, seen: Observed) -> Floats:
        if self._binary:
            output, labels, _ = seen.binary
            right = (output > 0) == labels
        else:
            right = seen.predicted == seen.classes[1]
        return np.array([float(right.sum()), float(right.numel())])


class TopK(Share):
    """Share of positions whose target is among the `k` most probable classes; of equals the lowest is
    first."""

    exact = True

    def __init__(self, k: int) -> None:
        self.name = f"top_{k}"
        self._k = k

    def measure(self, seen: Observed) -> Floats:
        scores, labels, _ = seen.classes
        classes = scores.shape[1]
        if self._k > classes:
            raise InputError(
                f"`{self.name}` with {classes} classes",
                where="validate.metrics",
                fix=f"K is at most {classes}",
            )
        own = scores.gather(1, labels[:, None])
        before = (scores > own) | ((scores == own) & (torch.arange(classes) < labels[:, None]))
        right = (before.sum(1) < self._k) & ~own.squeeze(1).isnan()
        return np.array([float(right.sum()), float(len(labels))])


class PerClass(_Labelled):
    """Precision, recall or F1 per class and their plain mean (macro) over the classes that occur at all.

    A ratio without a denominator is 0. State: hits, predictions, targets per class, [3 * C].
    """

    def __init__(self, name: str, binary: bool) -> None:
        super().__init__(binary)
        self.name = name

    def measure(self, seen: Observed) -> Floats:
        if self._binary:
            output, labels, _ = seen.binary
            found, wanted = (output > 0).numpy(), labels.numpy()
            counts = [(found & wanted).sum(0), found.sum(0), wanted.sum(0)]
            if output.shape[1] == 1:  # class 0 too
                counts[0] = np.concatenate([(~found & ~wanted).sum(0), counts[0]])
                counts[1] = np.concatenate([(~found).sum(0), counts[1]])
                counts[2] = np.concatenate([(~wanted).sum(0), counts[2]])
            return np.concatenate(counts).astype(np.float64)
        scores, labels, _ = seen.classes
        classes = scores.shape[1]
        truth, predicted = labels.numpy(), seen.predicted.numpy()
        hits = np.bincount(truth[truth == predicted], minlength=classes)
        parts = [hits, np.bincount(predicted, minlength=classes), np.bincount(truth, minlength=classes)]
        return np.concatenate(parts).astype(np.float64)

    def finish(self, total: Floats) -> dict[str, Value]:
        if not total.size:
            return {self.name: float("nan"), f"{self.name}_per_class": []}
        hits, found, wanted = total.reshape(3, -1)
        if self.name == "f1":
            above, below = 2 * hits, found + wanted
        else:
            above, below = hits, found if self.name == "precision" else wanted
        values = np.divide(above, below, out=np.zeros_like(hits), where=below > 0)
        if self._binary and len(values) == 2:
            overall = float(values[1])
        elif self._binary:
            overall = float(values.mean())
        else:
            occurs = (found > 0) | (wanted > 0)
            overall = float(values[occurs].mean()) if occurs.any() else float("nan")
        return {self.name: overall, f"{self.name}_per_class": [float(value) for value in values]}


class ConfusionMatrix(_Labelled):
    """Counts by target (row) and prediction (column), [C, C]; several binary labels: [k, 2, 2]."""

    name = "confusion_matrix"

    def measure(self, seen: Observed) -> Floats:
        if self._binary:
            output, labels, _ = seen.binary
            cell = (2 * labels.long() + (output > 0).long() + 4 * torch.arange(output.shape[1])).numpy()
            return np.bincount(cell.reshape(-1), minlength=4 * output.shape[1]).astype(np.float64)
        scores, labels, _ = seen.classes
        classes = scores.shape[1]
        if classes > _MATRIX_LIMIT:
            raise InputError(
                f"a confusion matrix of {classes} classes; at most {_MATRIX_LIMIT} are kept",
                where="validate.metrics",
                fix="Leave `confusion_matrix` out",
            )
        cell = (classes * labels + seen.predicted).numpy()
        return np.bincount(cell, minlength=classes**2).astype(np.float64)

    def finish(self, total: Floats) -> dict[str, Value]:
        if not total.size:
            return {self.name: []}
        if self._binary:
            tables = total.reshape(-1, 2, 2)
            return {self.name: (tables[0] if len(tables) == 1 else tables).tolist()}
        classes = int(np.sqrt(total.size))
        return {self.name: total.reshape(classes, classes).tolist()}
