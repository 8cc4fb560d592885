"""A client's processes: an island that trains and evaluates on what only its owner has."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from verbund import metrics
from verbund.checkpoint import durable
from verbund.cluster.worker import Worker
from verbund.exchange.federated.client_side import PERSONAL
from verbund.exchange.federated.content import Content
from verbund.stage.federated import evaluation
from verbund.stage.federated.files import AUX, DIFFERENCE, SHARED, TOLD, packed, unpacked
from verbund.stage.federated.local import Assignment, LocalTraining
from verbund.stage.federated.orders import Order, obey
from verbund.stage.island import Island, augmentation
from verbund.stage.validate import evaluation_batches, evaluation_threads, wanted

if TYPE_CHECKING:
    from verbund.stage.federated.encoding import Encoding

_KEPT = "kept"


def work(worker: Worker) -> dict[str, Any]:
    """A worker's life: joins the island, and does what its client's command orders."""
    island = Island.join(worker)
    replica = island.replica(worker)
    total = island.job.train.steps
    local = LocalTraining(replica, island.job, island.train_set, augmentation(island.job, island.task), total)
    obey(worker, Training(island, local, Path(worker.settings["content"])).do)
    return {}


class Training:
    """Does orders with files by their hashes.

    Args:
        island: this worker's place, and the data.
        local: the model and how it is trained.
        content: the folder with versions and updates.
    """

    def __init__(self, island: Island, local: LocalTraining, content: Path) -> None:
        self._island, self._local, self._content = island, local, Content(content)

    def do(self, order: Order) -> dict[str, Any]:
        """Does an order: train, encode, evaluate, model."""
        if order["order"] == "encode":
            return self._encoded(order)
        memory: dict[str, Tensor] = {}
        if order.get("memory"):
            (memory,) = unpacked(Path(order["memory"]), _KEPT)
        shared, told = unpacked(self._content.path(order["sha256"]), SHARED, TOLD)
        state = self._evaluate(shared, memory) if order["evaluate"] else None
        if order["order"] == "evaluate":
            return {"state": state}
        if order["order"] == "model":
            if not self._island.mesh.rank:
                save_file({**shared, **self._own(memory)}, order["path"])
            return {}
        island = self._island
        positions = np.arange(len(island.train_set), dtype=np.int64)
        assignment = Assignment(order["client"], order["round"], order["version"], shared, told)
        privacy = island.job.strategy.exchange.privacy
        noisy = account = None
        if privacy.kind == "local":
            from verbund.exchange.federated.privacy import Accountant, LocalPrivacy  # packages that not everybody has

            noisy = LocalPrivacy(privacy)
            account = Accountant(privacy.delta, privacy.budget, noisy.protects)
            account.load([{"event": noisy.event.record(), "count": order["released"] - 1}])
            if not account.affords(noisy.event):
                return {"spent": account.statement()}
            account.spend(noisy.event)
        update, kept = self._local.train(assignment, positions, memory)
        if island.mesh.rank:
            return {}
        encoding = None
        if island.job.strategy.exchange.secure is not None:
            encoding = self._encoding(order, order["members"])
            update = encoding.checked(update)
        if noisy is not None:  # the losses, which have no noise, stay here
            update = replace(update, difference=noisy.protected(update.difference, order["round"]), metrics={})
        digest = self._content.put(packed(difference=update.difference, aux=update.aux))
        path = Path(order["keep"])
        if kept:
            durable.replace(path, packed(kept=kept))
        facts = {
            "sha256": digest,
            "bytes": os.path.getsize(self._content.path(digest)),
            "version": update.base_version,
            "weight": update.weight if island.job.strategy.exchange.rule.by_samples else 1.0,
            "local_steps": update.local_steps,
            "sums": {name: [float(total), float(weight)] for name, (total, weight) in update.metrics.items()},
        }
        if encoding is not None:  # what the server hears of this update alone is what it counts
            counts = {"samples": update.weight, "weight": float(encoding.weight(update.weight))}
            facts |= {**counts, "token": secrets.token_hex(32), "local_steps": 0, "bytes": 0, "sums": {}}
        if account is not None:
            facts["epsilon"] = account.spent().epsilon
        return {"facts": facts if state is None else {**facts, "state": state}, "kept": bool(kept)}

    def _encoding(self, order: Order, clients: int) -> Encoding:
        from verbund.stage.federated.encoding import Encoding  # packages that not everybody has

        exchange = self._island.job.strategy.exchange
        return Encoding(exchange, self._local.shared(), order["round"], clients, order.get("clip"))

    def _encoded(self, order: Order) -> dict[str, Any]:
        """The whole numbers of an update, with this client's share of the noise, in a file."""
        from verbund.stage.federated.encoding import encoded

        if self._island.mesh.rank:
            return {}
        encoding = self._encoding(order, order["clients"])
        if (spent := encoding.beyond_budget(order["released"])) is not None:
            return {"spent": spent}
        difference, _ = unpacked(self._content.path(order["sha256"]), DIFFERENCE, AUX)
        content, facts = encoded(encoding, difference, order["samples"])
        return {**facts, "sha256": self._content.put(content)}

    def _own(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this client has for itself in place of what is shared, or besides."""
        own = {name.removeprefix(PERSONAL): values for name, values in memory.items() if name.startswith(PERSONAL)}
        return {name: own[name] for name in self._local.side.personal if name in own}

    def _evaluate(self, shared: Mapping[str, Tensor], memory: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """This client's sums over its validation part, with what it has for itself in the model."""
        island, replica = self._island, self._local.replica
        samples = island.validation_set
        if samples is None:
            return None
        self._local.put({**shared, **self._own(memory)})
        evaluator = metrics.Evaluator(wanted(island.job), island.job.train.objective)
        with evaluation_threads(island), replica.evaluation.active():
            for index, batch in evaluation_batches(samples, island.job.validate_.batch, island):
                evaluated = replica.evaluation.evaluate(batch)
                if evaluated is None or batch.phantom:
                    continue
                output, targets, sums = evaluated
                own_metrics = replica.task.metrics(output, targets) if replica.task.metrics else None
                evaluator.add(index, output, targets, sums, batch.ids, own_metrics)
        return evaluation.summed(island.job, island.groups.gather(evaluator.state(), "the gathering of metrics"))
