"""What a run has trained, from its newest checkpoint."""

from __future__ import annotations

import torch

from verbund import checkpoint
from verbund.checkpoint.read import Checkpoint
from verbund.run import Run


def newest(run: Run) -> Checkpoint:
    """The checkpoint that the run names as its newest."""
    found = checkpoint.latest(run.checkpoints)
    assert found is not None
    return Checkpoint.open(found)


def parameters(run: Run) -> dict[str, torch.Tensor]:
    with newest(run) as saved:
        return {name: saved.read("parameters", name) for name in saved.names("parameters")}


def close(a: Run, b: Run, limit: float = 1e-6) -> None:
    """Both runs have the same parameters."""
    one, other = parameters(a), parameters(b)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=limit, atol=limit, msg=lambda m, n=name: f"{n}: {m}")
