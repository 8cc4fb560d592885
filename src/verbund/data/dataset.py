"""A map-style torch Dataset from the task file as a source of samples."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verbund.data.hashing import key
from verbund.data.samples import Ids, Rows, Source
from verbund.errors import DataError, RunFailed, TaskError, text_of


class DatasetSource(Source):
    """Calls `dataset[i]`; items may be tuples, dicts, arrays, tensors or numbers.

    Before each item of a training batch torch's, numpy's and Python's generators are seeded by (seed, ticket, id),
    so that augmentations that draw from them are the same for any number of workers and loaders.

    Args:
        dataset: the user's, with `__len__` and `__getitem__`.
        names: what the entries of a tuple are called.
        seed: of the job.

    Raises:
        TaskError: if it has no length, or is empty.
    """

    slow = True

    def __init__(self, dataset: Any, names: Sequence[str], seed: int) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TaskError(
                f"a {type(dataset).__name__} is no map-style Dataset",
                where="dataset()",
                fix="It needs __len__ and __getitem__; an iterable has no order that could be divided",
            )
        self.size = len(dataset)
        if self.size == 0:
            raise DataError("the Dataset is empty", where="dataset()")
        self._dataset = dataset
        self._names = list(names)
        self._seed = seed

    def rows(self, ids: Ids, ticket: int | None = None) -> Rows:
        items = []
        states = _states()
        try:
            for number in ids.tolist():
                _seed(key(self._seed, -1 if ticket is None else ticket, number))
                try:
                    items.append(self._named(self._dataset[number], number))
                except (DataError, TaskError):
                    raise
                except Exception as error:
                    raise RunFailed(
                        f"{type(error).__name__} in sample {number}: {text_of(error)}", where="dataset().__getitem__"
                    ) from error
        finally:
            _restore(states)
        for number, item in zip(ids.tolist(), items, strict=True):
            if odd := items[0].keys() ^ item.keys():
                raise TaskError(
                    f"sample {number} and sample {int(ids[0])} have not both `{min(odd)}`",
                    where="dataset().__getitem__",
                    fix="All samples need the same entries",
                )
        return {name: _stacked(name, [item[name] for item in items], ids) for name in items[0]}

    def _named(self, item: Any, number: int) -> dict[str, NDArray[Any]]:
        if isinstance(item, Mapping):
            parts = {str(name): value for name, value in item.items()}
        elif isinstance(item, (tuple, list)):
            names = self._names + [f"column{i}" for i in range(len(self._names), len(item))]
            parts = dict(zip(names, item, strict=False))
        else:
            parts = {self._names[0]: item}
        return {name: _array(name, value, number) for name, value in parts.items()}


def _array(name: str, value: Any, number: int) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TaskError(
            f"`{name}` of sample {number} is a {type(value).__name__}, not numbers",
            where="dataset().__getitem__",
        )
    # A Python number would come as float64; tensors made of it are float32.
    return array.astype(np.float32) if isinstance(value, float) else array


def _stacked(name: str, values: list[NDArray[Any]], ids: Ids) -> NDArray[Any]:
    for number, value in zip(ids.tolist(), values, strict=True):
        if value.shape != values[0].shape:
            raise TaskError(
                f"`{name}` has shape {list(value.shape)} in sample {number} and {list(values[0].shape)} in sample "
                f"{int(ids[0])}",
                where="dataset().__getitem__",
                fix="All samples need one shape: pad or crop them",
            )
    return np.stack(values)


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value & 0x7FFFFFFFFFFFFFFF)  # the CPU's, which is what items are made on
