"""Which way a metric is better."""

from __future__ import annotations

_SMALLER = ("loss", "mae", "rmse", "mse", "perplexity", "error")


def larger_is_better(name: str) -> bool:
    """Whether a larger value of the metric is the better one; a task's own metrics are judged by their names."""
    return not any(name == word or name.endswith(f"_{word}") for word in _SMALLER)
