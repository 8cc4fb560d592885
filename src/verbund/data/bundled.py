"""The data sets that come with scikit-learn, by name (extra `sklearn`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verbund.data.columns import Chunk
from verbund.data.table import Rows
from verbund.errors import DataError, nearest

NAMES = ("digits", "iris", "wine", "breast_cancer", "diabetes")


class BundledTable:
    """`digits`: `image` [8, 8] of 0 to 16 as float32, and `label`. The others: `features` [k], each feature as a column
    of its own, and `label` (classes, int64) or, for `diabetes`, `target` (float32).

    Raises:
        DataError: if there is no such set, or scikit-learn is not installed.
    """

    def __init__(self, name: str, key: str = "data.train") -> None:
        if name not in NAMES:
            raise DataError(f"scikit-learn has no bundled set `{name}`", where=key, fix=nearest(name, NAMES))
        self.files = [f"sklearn:{name}"]
        self._name = name
        self._key = key

    def batches(self) -> Iterator[tuple[int, int, Rows]]:
        try:
            from sklearn import datasets
        except ImportError:
            raise DataError(
                "scikit-learn is not installed", where=self._key, fix="pip install 'verbund[sklearn]'"
            ) from None

        bunch = getattr(datasets, f"load_{self._name}")()
        rows: Rows = {}
        if self._name == "digits":
            rows["image"] = Chunk(bunch.images.astype(np.float32), "number")
        else:
            features = bunch.data.astype(np.float32)
            rows["features"] = Chunk(features, "number")
            for index, name in enumerate(bunch.feature_names):
                rows[str(name)] = Chunk(features[:, index], "number")
        if self._name == "diabetes":
            rows["target"] = Chunk(bunch.target.astype(np.float32), "number")
        else:
            rows["label"] = Chunk(bunch.target.astype(np.int64), "number")
        yield 0, len(bunch.target), rows
