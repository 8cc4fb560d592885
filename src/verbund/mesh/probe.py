"""A first look at a divided model: does it compute what the whole one does?

A plan that cuts a model wrongly (a fused projection as one, a forward pass with sizes of its own) need not fail: it
trains, to something else. So before the first step some samples go forward and backward, and their loss and the norm of
every gradient are compared with those of the whole model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from verbund.data.batch import Batch
from verbund.errors import InputError, RunFailed, TaskError
from verbund.mesh.replica import Replica

# Far above the rounding of any precision, far below what a wrong plan does.
_LIMITS = {"fp64": 1e-6, "fp32": 0.05, "bf16": 0.3, "fp16": 0.3}
# A part whose gradient is next to nothing (a key's bias, in truth) is held to this share of the whole gradient.
_FLOORS = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
# Parts of each tensor, by rows, so that what is wrong with a query does not hide behind its value.
_PARTS = 12


_FIX = (
    "Look at the plan: `parts` of fused projections, `units` of heads, `+gather` where all outputs are needed. In "
    "forward, sizes must follow from the tensors (chunk, -1), not from constants, and nothing may pass from layer to "
    "layer but by arguments. `verbund verify` compares every tensor"
)


@dataclass(frozen=True)
class Probe:
    """What some samples give.

    Args:
        loss: the sum of the samples' losses.
        norms: of the gradient of each parameter in some parts by rows, in the order of the whole model.
    """

    loss: float
    norms: list[float]

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def probe(replica: Replica, batch: Batch) -> Probe:
    """One pass of a batch, the same on all workers; leaves the replica as it was.

    Args:
        replica: before its first step.
        batch: some samples.
    """
    size = len(batch.ids)
    shares = [size] * replica.mesh.islands
    copies = replica.groups.batch.world
    size = sum(replica.joint(shares))
    with replica.uncompressed():
        sums = replica.gradients(iter([batch]), 1, 0, shares, 0.0, _silent())
    scale = size / copies / (replica.loss_scale.scale if replica.loss_scale else 1.0)
    names = {name: index for index, (name, _) in enumerate(replica.model.named_parameters())}
    squares = torch.zeros(len(names), _PARTS, dtype=torch.float64, device=replica.device)
    for held in replica.divided.trained:
        gradient = held.values.grad
        if not held.primary or gradient is None or not gradient.numel():
            continue
        for box, place in held.spans():
            values = (gradient[place] if held.shape else gradient).double() * scale
            rows = values.square().reshape(box.length[0] if held.shape else 1, -1).sum(1)
            first, count = (box.offset[0], held.shape[0]) if held.shape else (0, 1)
            parts = (torch.arange(len(rows), device=rows.device) + first) * _PARTS // count
            squares[names[held.name]].index_add_(0, parts, rows)
    replica.groups.replica.all_reduce(squares, "the comparison with the whole model")
    for held in replica.divided.held:
        held.values.grad = None
    return Probe(sums.loss / copies, squares.sqrt().flatten().tolist())


def check(replica: Replica, batch: Batch, whole: Probe, precision: str) -> None:
    """Compares a divided replica with the whole model.

    Raises:
        TaskError: naming the parameter whose gradient differs most.
    """
    try:
        mine = probe(replica, batch)
    except (InputError, RunFailed) as error:
        raise TaskError(
            f"divided, the model fails where it does not in one process: {error.what}", where=error.where, fix=_FIX
        ) from error
    limit, floor = _LIMITS[precision], _FLOORS[precision]
    total = math.sqrt(sum(norm**2 for norm in whole.norms))
    names = [name for name, _ in replica.model.named_parameters()]
    worst, at = 0.0, 0
    for index, (found, expected) in enumerate(zip(mine.norms, whole.norms, strict=True)):
        difference = abs(found - expected) / max(expected, floor * total, 1e-30)
        if not difference <= worst:
            worst, at = difference, index
    loss = abs(mine.loss - whole.loss) / max(abs(whole.loss), 1e-30)
    if worst <= limit and loss <= limit:
        return
    what = (
        f"the gradient of `{names[at // _PARTS]}`{_part(at)} has the norm {mine.norms[at]:.3g}, and "
        f"{whole.norms[at]:.3g} in one process"
        if worst > limit
        else f"the loss is {mine.loss:.6g}, and {whole.loss:.6g} in one process"
    )
    raise TaskError(
        f"divided, the model computes something else: {what}",
        where=str(replica.task.file),
        fix=_FIX,
    )


def _part(at: int) -> str:
    return f" (part {at % _PARTS + 1} of {_PARTS} of its rows)"


class _Silent:
    """Takes what a journal takes, and keeps nothing."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_arguments, **_named: None


def _silent() -> Any:
    return _Silent()
