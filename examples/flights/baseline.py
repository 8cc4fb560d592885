"""What wide and deep learning has to beat: logistic regression on the same features, by scikit-learn.

    python baseline.py [--data data] [--inverse-penalty 0.01 0.03]

Categories are one-hot, pairs of airports among them, beside the logarithm of the distance. Of several strengths of
regularisation the one is reported that does best on the validation set, which is in the baseline's favour.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from flights import SIZES
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score


def features(path: Path) -> tuple[csr_matrix, np.ndarray]:
    """The features of all flights in a file, and which of them were late."""
    table = pq.read_table(path)
    starts = np.cumsum([0, *SIZES.values()])
    places = [table[name].to_numpy() + start for name, start in zip(SIZES, starts, strict=False)]
    columns = np.stack([*places, np.full(len(table), starts[-1])], 1)
    values = np.ones(columns.shape, np.float32)
    values[:, -1] = np.log(table["distance"].to_numpy()) - 6.3
    ends = np.arange(0, columns.size + 1, columns.shape[1])
    matrix = csr_matrix((values.ravel(), columns.ravel(), ends), shape=(len(table), starts[-1] + 1))
    return matrix, table["late"].to_numpy()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="what prepare.py has made")
    parser.add_argument("--inverse-penalty", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1])
    options = parser.parse_args(arguments)
    x, y = features(options.data / "train.parquet")
    x_validation, y_validation = features(options.data / "validation.parquet")
    found = {}
    for strength in options.inverse_penalty:
        fitted = LogisticRegression(C=strength, max_iter=500).fit(x, y)
        found[strength] = float(roc_auc_score(y_validation, fitted.decision_function(x_validation)))
    best = max(found, key=found.__getitem__)
    print(json.dumps({"roc_auc": found[best], "inverse_penalty": best, "tried": found}))


if __name__ == "__main__":
    main()
