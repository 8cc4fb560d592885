"""Validation where each client has a model of its own: each on the validation samples that are like the client's."""

from __future__ import annotations

from typing import Any

from verbund import metrics
from verbund.data.batch import Item, read
from verbund.data.samples import Samples
from verbund.exchange.federated.partition import Parts
from verbund.stage.federated.local import LocalTraining
from verbund.stage.federated.simulated_server import SimulatedServer
from verbund.stage.island import Island
from verbund.stage.validate import evaluation_threads, wanted


def evaluate_personal(
    local: LocalTraining, server: SimulatedServer, samples: Samples, parts: Parts, island: Island
) -> dict[str, Any]:
    """The metrics over all samples, each once, by the model of the client that it was given to.

    Args:
        local: has the model.
        server: what is shared, and what clients keep.
        samples: for validation.
        parts: which client has which of them.
        island: the workers that share the clients.
    """
    job, replica = island.job, local.replica
    evaluator = metrics.Evaluator(wanted(job), job.train.objective)
    size, world, rank = job.validate_.batch, island.mesh.world, island.mesh.rank
    number = 0
    with evaluation_threads(island), replica.evaluation.active():
        for client in range(parts.clients):
            own = parts.of(client)
            cuts = range(0, len(own), size)
            if client % world == rank and len(own):
                local.put(local.own_model(server.parameters, server.memories.get(client, {})))
                for place, low in enumerate(cuts):
                    ids = samples.ids(own[low : low + size])
                    batch = read(samples, Item(number + place, ids, training=False), None)
                    evaluated = replica.evaluation.evaluate(batch)
                    assert evaluated is not None, "the mesh does not divide the model"
                    output, targets, sums = evaluated
                    mine = replica.task.metrics(output, targets) if replica.task.metrics else None
                    evaluator.add(number + place, output, targets, sums, ids, mine)
            number += len(cuts)
    states = island.groups.gather(evaluator.state(), "the gathering of metrics")
    return evaluator.merge(states, batches=number, samples=len(samples))
