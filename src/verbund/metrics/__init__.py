"""Metrics as mergeable state: bit-identical for any number of workers.

`build` makes metrics by name, an `Evaluator` accumulates one worker's evaluation batches, and its `merge`
puts the states of all workers together.
"""

from verbund.metrics.base import Metric, Observed, Value
from verbund.metrics.evaluator import Evaluator, State
from verbund.metrics.registry import NAMES, build

__all__ = ["NAMES", "Evaluator", "Metric", "Observed", "State", "Value", "build"]
