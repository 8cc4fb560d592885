"""Filling a replica from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verbund.checkpoint.read import Checkpoint
from verbund.comm.files import Location
from verbund.errors import CheckpointError
from verbund.exchange.local_steps import LocalSteps
from verbund.mesh import compression
from verbund.mesh.replica import Replica


def restore(
    path: Location, replica: Replica, weights_only: bool = False, elsewhere: Sequence[str] = ()
) -> dict[str, Any]:
    """Fills the replica's parameters and buffers, and for training its optimiser and moving average.

    Args:
        path: a checkpoint that the supervising process has verified.
        replica: what is filled.
        weights_only: for validation and prediction: the moving average, if there is one, becomes the parameters.
        elsewhere: names of parameters that others hold.

    Returns:
        the training's state as it was saved: step, samples, ….

    Raises:
        CheckpointError: if the model has other tensors or shapes than the checkpoint.
    """
    checkpoint = Checkpoint.open(path, verify=False)
    averaged = set(checkpoint.names("ema")) if weights_only else set()
    with torch.no_grad():
        for kind in ("parameters", "buffers"):
            held = list(replica.pieces(kind))
            model = replica.state.all_names(kind) | (set(elsewhere) if kind == "parameters" else set())
            same_names(kind, model, set(checkpoint.names(kind)), path)
            for piece in held:
                name = piece.name
                source = "ema" if kind == "parameters" and name in averaged else kind
                if checkpoint.shape(source, name) != piece.shape:
                    raise CheckpointError(
                        f"`{name}` has shape {list(checkpoint.shape(source, name))} there and {list(piece.shape)} in "
                        "the task's model",
                        where=str(path),
                        fix="The task file has changed since",
                    )
                checkpoint.fill(source, name, piece.values, piece.offset)
    state = checkpoint.state
    if weights_only:
        return state
    replica.state.load_optimizer(checkpoint)
    if replica.ema is not None:
        saved = set(checkpoint.names("ema"))
        with torch.no_grad():
            for piece in replica.pieces("ema"):
                # A run that keeps an average only from now on starts it at the weights.
                checkpoint.fill("ema" if piece.name in saved else "parameters", piece.name, piece.values, piece.offset)
    if replica.loss_scale is not None and state.get("loss_scale"):
        replica.loss_scale.load(state["loss_scale"])
    return state


def restore_exchange(path: Location, replica: Replica, exchange: LocalSteps | None) -> list[str]:
    """Gives an exchange, and the compression of gradients, what the checkpoint has of their state, after `restore`.

    Returns:
        what does not go on as if there had been no break, in sentences.
    """
    checkpoint = Checkpoint.open(path, verify=False)
    note = compression.load(checkpoint, replica.compression)
    notes = [note] if note else []
    if exchange is not None:
        return notes + exchange.load(checkpoint)
    record = checkpoint.state.get("exchange")
    return notes + ([f"The state of the exchange `{record['name']}` was dropped"] if record else [])


def same_names(kind: str, model: set[str], saved: set[str], path: Location) -> None:
    """Checks that a model and a checkpoint have the same tensors of this kind.

    Raises:
        CheckpointError: naming those that only one of them has.
    """
    missing, unknown = sorted(model - saved), sorted(saved - model)
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"{len(missing)} {kind} of the model are not in it ({', '.join(missing[:3])})")
        if unknown:
            parts.append(f"{len(unknown)} of its {kind} are not in the model ({', '.join(unknown[:3])})")
        raise CheckpointError("; ".join(parts), where=str(path), fix="The task file has changed since")
