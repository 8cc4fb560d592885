"""The data sets that come with scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from verbund.data.columns import Chunk
from verbund.data.tables import Rows
from verbund.errors import DataError, nearest

NAMES = ("breast_cancer", "diabetes", "digits", "iris", "wine")


def read_bundled(name: str) -> Iterator[Rows]:
    """One of scikit-learn's bundled sets.

    digits has `image` (float32 [8, 8], 0 … 16) and `label`; the others have `features` (float32 [k]), each feature by
    its name, and `label` (a class) or, for diabetes, `target` (a number).

    Raises:
        DataError: for another name, or where scikit-learn is not installed.
    """
    if name not in NAMES:
        raise DataError(f"scikit-learn has no bundled set `{name}`", where="data.train", fix=nearest(name, NAMES))
    try:
        from sklearn import datasets
    except ImportError:
        raise DataError(
            "scikit-learn is not installed", where="data.train", fix="pip install 'verbund[sklearn]'"
        ) from None
    bunch: Any = getattr(datasets, f"load_{name}")()
    target = np.asarray(bunch.target)
    columns: dict[str, Any] = {}
    if name == "digits":
        columns["image"] = np.asarray(bunch.images, np.float32)
    else:
        columns["features"] = np.asarray(bunch.data, np.float32)
        for index, feature in enumerate(bunch.feature_names):
            columns[str(feature)] = np.asarray(bunch.data[:, index], np.float32)
    if name == "diabetes":
        columns["target"] = target.astype(np.float32)
    else:
        columns["label"] = target.astype(np.int64)
    yield {column: Chunk(np.ascontiguousarray(values), "number") for column, values in columns.items()}
