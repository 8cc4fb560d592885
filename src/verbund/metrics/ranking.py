"""The area under the ROC curve, exact: every score is gathered."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.metrics.base import Gathered, Observed, Value


class RocAuc(Gathered):
    """Binary: the probability that a positive scores above a negative, ties a half (Mann and Whitney, 1947).

    Several classes: one against the rest, by the logarithm of its probability; several labels: each by
    itself. The value is the plain mean over the classes of which there are positives and negatives, NaN if
    there is none. Scores are held in float32.
    """

    name = "roc_auc"

    def __init__(self, binary: bool) -> None:
        self._binary = binary

    def gather(self, seen: Observed) -> dict[str, NDArray[Any]]:
        if self._binary:
            output, positive, rows = seen.binary
            return {
                "ids": seen.sample_ids(rows),
                "scores": output.float().numpy(),
                "labels": positive.numpy().astype(np.int8),
            }
        scores, classes, rows = seen.classes
        return {
            "ids": seen.sample_ids(rows),
            "scores": scores.float().log_softmax(1).numpy(),
            "labels": classes.numpy().astype(np.int32)[:, None],
        }

    def finish(self, gathered: dict[str, NDArray[Any]]) -> dict[str, Value]:
        if not gathered:
            return {self.name: float("nan")}
        scores, labels = gathered["scores"], gathered["labels"]
        columns = range(scores.shape[1])
        areas = [area(scores[:, c], labels[:, c] if self._binary else labels[:, 0] == c) for c in columns]
        known = [value for value in areas if not np.isnan(value)]
        values: dict[str, Value] = {self.name: float(np.mean(known)) if known else float("nan")}
        if len(areas) > 1:
            values[f"{self.name}_per_class"] = areas
        return values


def area(scores: NDArray[Any], positive: NDArray[Any]) -> float:
    """The area under the ROC curve of `scores` [N] for `positive` [N]; NaN if it is not defined.

    Counted in whole numbers, so that the order of the samples cannot matter.
    """
    positive = positive.astype(bool)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives or np.isnan(scores).any():
        return float("nan")
    _, level = np.unique(scores, return_inverse=True)
    above = np.bincount(level, weights=positive).astype(np.int64)
    below = np.bincount(level, weights=~positive).astype(np.int64)
    lower = np.cumsum(below) - below
    twice_won = int((above * (2 * lower + below)).sum())
    return twice_won / (2 * positives * negatives)
