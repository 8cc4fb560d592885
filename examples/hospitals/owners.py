"""Divides sklearn's breast cancer data unevenly among three hospitals, a folder for each: `python owners.py FOLDER`."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_breast_cancer

POLICY = """# What this hospital permits: all keys are in docs/federated.md.
tasks = ["{task}"]       # SHA-256 of the task file that may run here
minimum_cohort = 3       # the mean of fewer would tell too much of one
rounds = 100
"""


def divide(folder: Path, task: str) -> list[Path]:
    """Writes NAME/patients.parquet and NAME/policy.toml for each owner.

    North sees mostly malignant cases, south mostly benign ones, and the village has few of either.
    """
    data = load_breast_cancer()
    malignant = np.flatnonzero(data.target == 0)
    benign = np.flatnonzero(data.target == 1)
    shares = {
        "north": np.concatenate([malignant[:150], benign[:20]]),
        "south": np.concatenate([malignant[150:170], benign[20:300]]),
        "village": np.concatenate([malignant[170:190], benign[300:330]]),
        "public": np.concatenate([malignant[190:], benign[330:]]),
    }
    written = []
    for name, rows in shares.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        measures = data.data[rows].astype(np.float32)
        table = pa.table(
            {
                "measures": pa.FixedSizeListArray.from_arrays(measures.reshape(-1), measures.shape[1]),
                "malignant": (data.target[rows] == 0).astype(np.int64),
            }
        )
        pq.write_table(table, place / "patients.parquet")
        (place / "policy.toml").write_text(POLICY.format(task=task))
        written.append(place / "patients.parquet")
    return written


if __name__ == "__main__":
    import hashlib

    task = hashlib.sha256((Path(__file__).parent / "task.py").read_bytes()).hexdigest()
    for path in divide(Path(sys.argv[1]), task):
        print(path)
