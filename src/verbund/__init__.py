"""Verbund: every stage of a PyTorch model's life, distributed.

    import verbund

    job = verbund.Job.read("job.toml")
    run = verbund.train(job)
    print(run.summary["metrics"]["accuracy"]["last"])

Importing this package imports nothing else until it is asked for: the command must be able to take a signal at once.
torch is never imported by the process that supervises a run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verbund.errors import VerbundError
    from verbund.job import Job
    from verbund.run import Run
    from verbund.stage.launch import predict, resume, train, validate
    from verbund.tables import Table

__all__ = ["Job", "Run", "Table", "VerbundError", "predict", "resume", "train", "validate"]
__version__ = "0.1.0"

_PLACES = {
    "Job": "job",
    "Run": "run",
    "Table": "tables",
    "VerbundError": "errors",
    "predict": "stage.launch",
    "resume": "stage.launch",
    "train": "stage.launch",
    "validate": "stage.launch",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"verbund.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'verbund' has no attribute {name!r}")
