"""Verbund: every stage of a PyTorch model's life, distributed.

    import verbund

    job = verbund.Job.read("job.toml")
    run = verbund.train(job)
    print(run.summary["metrics"]["accuracy"]["last"])

Importing this package does not import torch: the process that supervises a run never needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verbund.errors import VerbundError
from verbund.job import Job

if TYPE_CHECKING:
    from verbund.run import Run
    from verbund.stage.launch import predict, resume, train, validate

__all__ = ["Job", "Run", "VerbundError", "predict", "resume", "train", "validate"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Run":
        from verbund.run import Run

        return Run
    if name in ("predict", "resume", "train", "validate"):
        from verbund.stage import launch

        return getattr(launch, name)
    raise AttributeError(f"module 'verbund' has no attribute {name!r}")
