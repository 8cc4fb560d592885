"""What can be said of a simulation before it starts, once the model and the partition are known."""

from __future__ import annotations

import numpy as np

from verbund.errors import InputError
from verbund.exchange.federated.client_side import ClientSide
from verbund.exchange.federated.compressed import UpdateCompression
from verbund.exchange.federated.partition import Parts
from verbund.job import Exchange, Job
from verbund.job.federated import PERSONAL, too_few
from verbund.mesh.changing_buffers import changing
from verbund.mesh.replica import Replica
from verbund.observe.memory import available_bytes

_WHERE = "strategy.exchange"


def examine(job: Job, replica: Replica, parts: Parts) -> list[str]:
    """Checks the rule, the model and the partition together.

    Args:
        job: the job.
        replica: of the whole model.
        parts: whose samples are whose.

    Returns:
        notes for the user.

    Raises:
        InputError: naming what would fail in the training.
    """
    exchange = job.strategy.exchange
    buffers = [buffer.name for buffer in changing(replica.model) if buffer.get().is_floating_point()]
    side = ClientSide(exchange.rule, replica.model, list(replica.names), buffers)
    if exchange.privacy.kind == "examples":
        from verbund.stage.federated.example_steps import check  # packages that not everybody has

        check(replica)
    cohort = exchange.cohort_size(parts.clients)
    if cohort > parts.clients:
        raise InputError(f"a cohort of {cohort} is more than the {parts.clients} clients", where=f"{_WHERE}.cohort")
    if lack := too_few(exchange.rule, exchange.rule.buffer or cohort):
        raise InputError(lack, where=f"{_WHERE}.rule", fix="Use a larger cohort, or a smaller `faulty`")
    if job.world > cohort:
        raise InputError(
            f"{job.world} workers cannot share {cohort} client{'s' if cohort > 1 else ''} of a round",
            where="strategy.mesh",
            fix="Use fewer workers or a larger cohort",
        )
    batch, sizes = job.train.global_batch, parts.sizes
    if replica.statistics and (single := np.flatnonzero(sizes % batch == 1)).size:
        raise InputError(
            f"client {single[0]} has {sizes[single[0]]} samples, so that one step of {batch} has a single one left, "
            "which has no batch statistics",
            where="train.global_batch",
            fix="Choose another one, or another partition",
        )
    low, high = int(sizes.min()), int(sizes.max())
    _check_memory(exchange, replica, parts.clients)
    notes = [f"{parts.clients} clients with {low} to {high} samples each, {cohort} of them in a round"]
    if exchange.rule.name in PERSONAL and side.personal:
        few = ", ".join(f"`{name}`" for name in side.personal[:3]) + (", …" if len(side.personal) > 3 else "")
        notes.append(f"{few} stay with the clients: the checkpoints' model has their first values")
    return notes


def _check_memory(exchange: Exchange, replica: Replica, clients: int) -> None:
    """Whether what all simulated clients keep of compressed updates has room in memory.

    Raises:
        InputError: if not.
    """
    if exchange.compression.name == "none" or (room := available_bytes()) is None:
        return
    named = dict(zip(replica.names, replica.parameters, strict=True))
    kept = clients * UpdateCompression(exchange, [], 0).kept_bytes(named)
    if kept > room / 2:
        raise InputError(
            f"what {clients} clients keep of their updates takes {kept / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free",
            where=f"{_WHERE}.error_feedback",
            fix="Set it to false, or simulate fewer clients",
        )
