"""Which way a metric is better. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

# fmt: off
_SMALLER = frozenset((
    "loss", "error", "err", "mae", "mse", "rmse", "mape", "msle", "perplexity", "ppl", "nll", "bce", "wer", "cer",
    "divergence", "distance", "deviance", "brier", "fid", "regret", "hinge", "entropy",
))
_LARGER = frozenset((
    "accuracy", "acc", "top", "precision", "recall", "f1", "fbeta", "auc", "auroc", "roc", "ap", "map", "r2", "iou",
    "jaccard", "dice", "bleu", "rouge", "meteor", "ndcg", "mrr", "mcc", "kappa", "specificity", "sensitivity",
    "correlation", "pearson", "spearman", "psnr", "ssim", "reward", "hit", "coverage",
))
# fmt: on


def larger_is_better(name: str) -> bool:
    """Whether a larger value of the metric is better. Known by the words in its name (`top_5`, `val_loss`);
    if those of a loss or error and of a score meet, the last decides; a name of neither kind is taken for a
    score."""
    for word in reversed(re.findall(r"[a-z]+\d*", name.lower())):
        if word in _SMALLER or word.rstrip("0123456789") in _SMALLER:
            return False
        if word in _LARGER or word.rstrip("0123456789") in _LARGER:
            return True
    return True


def best(name: str, values: Iterable[float]) -> float | None:
    """The best of `values`, NaN left out; None if there is none."""
    numbers = [value for value in values if value == value]
    if not numbers:
        return None
    return max(numbers) if larger_is_better(name) else min(numbers)
