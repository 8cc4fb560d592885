"""Metrics that are means of floats: loss, perplexity, MAE, RMSE, R²."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F

from verbund.metrics.base import Floats, Metric, Observed, Share, Value, float64, ratio


class Loss(Share):
    """The objective itself, divided by its global weight."""

    name = "loss"

    def measure(self, seen: Observed) -> Floats:
        total, weight = seen.loss
        return np.array([total.sum(), weight.sum()])


class Perplexity(Metric):
    """The exponential of the mean negative log-likelihood, without label smoothing and class weights."""

    name = "perplexity"

    def measure(self, seen: Observed) -> Floats:
        objective = seen.objective
        plain = objective is not None and not objective.label_smoothing and not objective.class_weights
        if plain:  # the loss is the likelihood already
            total, weight = seen.loss
            return np.array([total.sum(), weight.sum()])
        scores, labels, _ = seen.classes
        likelihood = F.cross_entropy(scores.float(), labels, reduction="none")
        return np.array([float64(likelihood).sum(), len(labels)])

    def finish(self, total: Floats) -> dict[str, Value]:
        with np.errstate(over="ignore"):
            return {self.name: float(np.exp(ratio(*total))) if total.size else float("nan")}


class MeanAbsoluteError(Share):
    """Mean of |output - target| over all values."""

    name = "mae"

    def measure(self, seen: Observed) -> Floats:
        output, targets = (tensor.numpy() for tensor in seen.values)
        return np.array([np.abs(output - targets).sum(), output.size])


class RootMeanSquaredError(Metric):
    """Square root of the mean of (output - target)² over all values."""

    name = "rmse"

    def measure(self, seen: Observed) -> Floats:
        output, targets = (tensor.numpy() for tensor in seen.values)
        return np.array([np.square(output - targets).sum(), output.size])

    def finish(self, total: Floats) -> dict[str, Value]:
        return {self.name: float(np.sqrt(ratio(*total))) if total.size else float("nan")}


class R2(Metric):
    """1 - (residual sum of squares) / (sum of squares about the mean), averaged over the outputs.

    The state is [count, then mean, squares about it, residual squares per output]; batches are put together
    by the pairwise update of Chan, Golub and LeVeque (1979), since the difference of two large sums would
    lose the digits of targets that lie far from 0. Constant targets give 1 if they are met exactly, else 0,
    as in scikit-learn; fewer than two samples give NaN.
    """

    name = "r2"

    def measure(self, seen: Observed) -> Floats:
        output, targets = (tensor.numpy() for tensor in seen.values)
        outputs = targets.shape[1]
        if not len(targets):
            return np.zeros(1 + 3 * outputs)
        mean = targets.mean(0)
        about = np.square(targets - mean).sum(0)
        residual = np.square(output - targets).sum(0)
        return np.concatenate([[len(targets)], mean, about, residual])

    def combine(self, rows: Floats) -> Floats:
        count = 0.0
        mean, about, residual = np.zeros((3, (rows.shape[1] - 1) // 3))
        for row in rows:
            if not row[0]:
                continue
            more_mean, more_about, more_residual = row[1:].reshape(3, -1)
            both = count + row[0]
            apart = more_mean - mean
            about = about + more_about + np.square(apart) * (count * row[0] / both)
            mean = mean + apart * (row[0] / both)
            residual = residual + more_residual
            count = both
        return np.concatenate([[count], mean, about, residual])

    def finish(self, total: Floats) -> dict[str, Value]:
        if not total.size or total[0] < 2:
            return {self.name: float("nan")}
        _, about, residual = total[1:].reshape(3, -1)
        constant = about == 0
        share = residual / np.where(constant, 1.0, about)
        scores = np.where(constant, np.where(residual == 0, 1.0, 0.0), 1.0 - share)
        return {self.name: float(scores.mean())}
