"""Randomness belongs to the sample.

Every random number that a training step draws is a function of (seed, step, sample id, module name, n-th use within
that module, element index). Dropout, noise and augmentation are therefore the same for any number of workers, any
micro-batch size and any order of the samples.

- `SampleRandomness` keys what a model draws; `WorkerRandomness` leaves torch's own generator alone.
- `BatchRandom` is what a task's `augment(batch, random)` draws from.
"""

from verbund.randomness.batch import BatchRandom
from verbund.randomness.sample import SampleRandomness
from verbund.randomness.worker import WorkerRandomness

__all__ = ["BatchRandom", "SampleRandomness", "WorkerRandomness"]
