"""`verbund init`: a job file and a task file to start from."""

from __future__ import annotations

from pathlib import Path

from verbund.errors import InputError

JOB = """# Every key and its default: verbund writes the whole job to RUN/job.toml.
task = "task.py"

[data]
train = "sklearn:digits"      # or a file, folder or glob: Parquet, CSV, JSON lines, npy/npz, images by class, text
validation_fraction = 0.2     # or `validation = "other.parquet"`
input = "image"               # column or columns; the model gets them as float32
target = "label"
scale = { image = 16.0 }      # divisors

[train]
objective = "cross_entropy"   # binary_cross_entropy, mean_squared_error, next_token, or a `loss` in task.py
global_batch = 64             # samples of one step, whatever the number of workers
epochs = 10                   # or steps, seconds, target, patience: whichever comes first
optimizer = { name = "adamw", lr = 3e-3 }

[validate]
metrics = ["accuracy"]

[strategy]
mesh = { data = 1 }           # workers; or `verbund train job.toml --workers 2`
"""

TASK = '''"""The task: an ordinary PyTorch model. What the job file does not name, a function here can say:
inputs(batch), targets(batch), loss(output, targets), metrics(output, targets), augment(batch, random), dataset().
"""

from torch import nn


def model():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )
'''


def scaffold(folder: Path) -> list[Path]:
    """Writes `job.toml` and `task.py` into a new or empty folder.

    Raises:
        InputError: if the folder has something in it already, or cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("exists already and is not empty", where=str(folder), fix="Choose another name")
    files = {folder / "job.toml": JOB, folder / "task.py": TASK}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error}", where=str(folder)) from None
    return list(files)
