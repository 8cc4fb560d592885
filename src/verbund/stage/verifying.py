"""The workers' side of `verbund verify`: some steps under a strategy, every gradient and parameter saved; and the
comparison of two such."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verbund import checkpoint
from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.checkpoint.write import write_part
from verbund.cluster.worker import Worker
from verbund.comm.files import Location
from verbund.data.loader import Item, Loader
from verbund.mesh.replica import Replica
from verbund.observe.events import Journal
from verbund.stage.island import Island, augmentation
from verbund.stage.saving import shared
from verbund.stage.tickets import Tickets

# A tensor whose gradient is (nearly) zero by nature, as a key's bias, is held to the size of the others.
_FLOOR = 1e-3


def work(worker: Worker) -> dict[str, Any]:
    """Trains some steps and saves, after each, what is to be compared.

    Returns:
        `losses`: of every step; `records`: what was written, per step.
    """
    island = Island.join(worker)
    job = island.job
    folder = worker.location(worker.settings["folder_out"])
    journal = Journal(folder / "journal", "worker", island.mesh.rank, worker.spec.generation)
    worker.at_end.append(journal.close)
    replica = island.replica(worker)
    tickets = Tickets(island.train_set, job, island.mesh, replica.division.unit)
    steps = int(worker.settings["steps"])

    def items() -> Any:
        for step in range(steps):
            ids = island.train_set.ids(tickets.positions(step))
            for low, high, phantom in replica.plan(tickets.sizes(step), step):
                yield Item(step, np.ascontiguousarray(ids[low:high]), phantom=phantom)

    loader = Loader(island.train_set, items(), transform=augmentation(job, island.task))
    batches = iter(loader)
    losses: list[float] = []
    records = [_write(folder, 0, replica, ("parameters", "buffers"))]
    try:
        for step in range(steps):
            sizes = tickets.sizes(step)
            sums = replica.gradients(batches, len(replica.plan(sizes, step)), step, sizes, 0.0, journal)
            losses.append(sums.loss / sums.weight if sums.weight else math.nan)
            scale = sum(sizes) / sums.weight if sums.weight else 0.0
            gradients = [_scaled(piece, scale) for piece in replica.pieces("gradients")]
            replica.update(step, sizes, sums, steps)
            kinds = ("parameters", "buffers")
            records.append(_write(folder, step + 1, replica, kinds, gradients))
    finally:
        loader.close()
    return {
        "losses": losses,
        "records": records,
        "fused": _fused(replica),
        "tensor_bytes": replica.held_bytes(),
    }


def _scaled(piece: Piece, scale: float) -> Piece:
    values = piece.values * scale
    return Piece(piece.kind, piece.name, piece.shape, values.dtype, piece.offset, piece.length, values, piece.owner)


def _write(
    folder: Location, step: int, replica: Replica, kinds: tuple[str, ...], more: list[Piece] | None = None
) -> dict[str, Any]:
    pieces = [piece for kind in kinds for piece in replica.pieces(kind)] + (more or [])
    mesh = replica.mesh
    mine = shared(pieces, mesh.place("islands", "data"), mesh.islands * mesh.data)
    return write_part(checkpoint.partial_folder(folder, step), mesh.rank, mine)


def _fused(replica: Replica) -> dict[str, list[int]]:
    """Tensors that hold several matrices one after the other along dimension 0: their sizes."""
    found = {
        held.name: list(held.tensor_cut.sections)
        for held in replica.divided.held
        if held.tensor_cut is not None and held.tensor_cut.dim == 0 and len(held.tensor_cut.sections) > 1
    }
    for path, module in replica.model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            for name in ("in_proj_weight", "in_proj_bias"):
                found[f"{path}.{name}" if path else name] = [module.embed_dim] * 3
    return found


def compare(worker: Worker) -> dict[str, Any]:
    """Compares what two strategies saved, tensor by tensor.

    Returns:
        `gradients` and `parameters`: the largest difference, with the tensor's name and the step; `missing`: names
        that only one side has.
    """
    worker.supervise()
    worker.doing("comparing", 0)
    saved = [{step: worker.location(path) for step, path in paths} for paths in worker.settings["saved"]]
    fused = worker.settings["fused"]
    worst: dict[str, dict[str, Any]] = {
        kind: {"difference": 0.0, "tensor": None, "step": None}
        for kind in ("gradients", "parameters", "buffers")
        if kind in worker.settings["kinds"]
    }
    missing: list[str] = []
    start = Checkpoint.open(saved[1][0])
    for step in sorted(saved[0]):
        sides = [Checkpoint.open(paths[step]) for paths in saved]
        for kind, worst_of in worst.items():
            names = [set(side.names(kind)) for side in sides]
            missing += [f"{kind} {name} (step {step})" for name in sorted(names[0] ^ names[1])]
            common = sorted(names[0] & names[1])
            scale = _global_rms(sides[1], start, kind, common) if step else 1.0
            for name in common:
                a, b = (side.read(kind, name).double() for side in sides)
                moved = b if kind == "gradients" or not step else b - start.read(kind, name).double()
                # What is added to a parameter is rounded to its last digit, in every step.
                epsilon = _epsilon(sides[1].dtype(kind, name)) if kind != "gradients" else 0.0
                rounding = epsilon * step * b.abs()
                difference = _difference(a, b, moved, scale, rounding, fused.get(name))
                if not difference <= worst_of["difference"]:  # not a number counts as the worst
                    worst_of.update(difference=difference, tensor=name, step=step)
    return {"worst": worst, "missing": missing}


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _global_rms(side: Checkpoint, start: Checkpoint, kind: str, names: list[str]) -> float:
    """Root mean square of a whole gradient or update."""
    squares, count = 0.0, 0
    for name in names:
        value = side.read(kind, name).double()
        if kind != "gradients":
            value = value - start.read(kind, name).double()
        squares += float((value**2).sum())
        count += value.numel()
    return math.sqrt(squares / count) if count else 0.0


def _difference(a: Tensor, b: Tensor, moved: Tensor, scale: float, rounding: Tensor, parts: list[int] | None) -> float:
    """max(|a − b| − rounding) ÷ max(RMS of what moved, a thousandth of the global RMS), per part of a fused tensor."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    distance = ((a - b).abs() - rounding).clamp_(min=0.0)
    sections = list(parts) if parts and a.dim() and sum(parts) == a.shape[0] else [a.shape[0] if a.dim() else 1]
    found, at = 0.0, 0
    for length in sections:
        most = float((distance[at : at + length] if a.dim() else distance).max())
        rms = float(((moved[at : at + length] if a.dim() else moved) ** 2).mean().sqrt())
        at += length
        if not math.isfinite(most):
            return math.inf
        if most:
            found = max(found, most / max(rms, _FLOOR * scale, 1e-30))
    return found
