"""The server's process with torch and the task: first parameters, updates, steps, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verbund import task as tasks
from verbund.checkpoint.piece import Piece
from verbund.checkpoint.write import write_part
from verbund.cluster.worker import Worker
from verbund.errors import InputError
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.rule import Rule, SumRule
from verbund.exchange.federated.rules import build
from verbund.exchange.federated.screening import Refused, Screening, norm
from verbund.exchange.federated.update import Update
from verbund.job import Job, Strategy
from verbund.mesh import device
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.stage.federated import evaluation
from verbund.stage.federated.conversation import number_of
from verbund.stage.federated.files import AUX, DIFFERENCE, SHARED, TOLD, packed, unpacked
from verbund.stage.federated.local import LocalTraining
from verbund.stage.federated.orders import Order, obey

if TYPE_CHECKING:
    from verbund.exchange.federated.protection import Protection

_RULE = "rule"


def work(worker: Worker) -> dict[str, Any]:
    """The life of the process."""
    worker.supervise()
    settings = worker.settings
    job = Job.build(settings["job"], {}, source="job.toml", folder=settings["folder"])
    place = device.choose(0, 1)
    device.use_threads(job.cluster.threads, 1)
    alone = job.model_copy(update={"strategy": Strategy(exchange=job.strategy.exchange)})
    replica = Replica(tasks.load(alone), alone, Mesh(), Groups.alone(place), worker.doing)
    aggregator = Aggregator(job, replica, Path(settings["content"]), int(settings["clients"]))
    obey(worker, aggregator.do)
    return {}


class Aggregator:
    """Does orders with files by their hashes; keeps nothing between two steps but what is on disk.

    Args:
        job: the rule.
        replica: the model, in one process.
        content: the folder with updates and versions.
        clients: how many there are in all.
    """

    def __init__(self, job: Job, replica: Replica, content: Path, clients: int) -> None:
        self._job, self._replica, self._clients = job, replica, clients
        self._updates, self._versions = Content(content / "updates"), Content(content / "versions")
        self._local = LocalTraining(replica, job, _NoSamples(), None, job.train.steps)  # type: ignore[arg-type]
        self._first = self._local.shared()
        self._seen: tuple[str, dict[str, Tensor], dict[str, Tensor]] | None = None

    def do(self, order: Order) -> dict[str, Any]:
        """Does an order: initial, load, screen, terms, step, metrics, save."""
        match order["order"]:
            case "initial":
                rule = self._rule(self._first)
                return {**self._written(self._first, rule), **self._spent(self._protection(None))}
            case "load":
                self._rule(self._version(order["sha256"])[0], order["rule"])
                return self._spent(self._protection(order["privacy"]))
            case "terms":
                return self._terms(order)
            case "screen":
                return self._screened(order)
            case "step":
                return self._step(order)
            case "metrics":
                return {"metrics": evaluation.merged(self._job, order["states"])}
            case "save":
                return {"part": self._save(order["sha256"], Path(order["folder"]))}
        raise ValueError(f"`{order['order']}` is no order")

    def _version(self, digest: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is shared in a version, and what the rule tells besides."""
        if self._seen is None or self._seen[0] != digest:
            shared, told = unpacked(self._versions.path(digest), SHARED, TOLD)
            if {name: v.shape for name, v in shared.items()} != {name: v.shape for name, v in self._first.items()}:
                fix = "Give the task as it was when the run began"
                raise InputError("this is another model's version", where=digest, fix=fix)
            self._seen = digest, shared, told
        return self._seen[1], self._seen[2]

    def _rule(self, parameters: dict[str, Tensor], state: str | None = None) -> Rule:
        rule = build(self._job.strategy.exchange.rule, self._clients, parameters, self._local.side.plain)
        if state is not None:
            (kept,) = unpacked(self._versions.path(state), _RULE)
            if kept:
                rule.load(kept)
        return rule

    def _written(self, parameters: dict[str, Tensor], rule: Rule) -> dict[str, str]:
        version = packed(shared=parameters, told=rule.told())
        return {"sha256": self._versions.put(version), "rule": self._versions.put(packed(rule=rule.state()))}

    def _update(self, facts: dict[str, Any], screening: Screening) -> Update:
        difference, aux = unpacked(self._updates.path(facts["sha256"]), DIFFERENCE, AUX)
        sums = {name: (float(total), float(weight)) for name, (total, weight) in facts["sums"].items()}
        update = Update(difference, facts["weight"], facts["base_version"], facts["local_steps"], aux, sums)
        return screening.checked(update)

    def _screened(self, order: Order) -> dict[str, Any]:
        parameters, told = self._version(order["sha256"])
        screening = Screening(self._job.strategy.exchange.rule, parameters, told)
        try:
            self._update(order["update"], screening)
        except (Refused, InputError) as refused:
            return {"refused": refused.what if isinstance(refused, InputError) else str(refused)}
        return {}

    def _terms(self, order: Order) -> dict[str, Any]:
        """Length and headroom of a secure round of so many clients, and whether the privacy budget is enough for it."""
        protection = self._protection(order["privacy"])
        assert protection is not None
        if not protection.affords(range(order["clients"])):
            return {"enough": False}
        terms = protection.begin(order["round"], range(order["clients"])).terms  # what it spends is not kept
        clip = None if protection.central is None else protection.central.clip
        return {"enough": True, "length": terms.length, "headroom": terms.headroom, "clip": clip}

    def _summed(self, order: Order) -> dict[str, Any]:
        """The rule's step with the sum that secure aggregation has come to; nothing is known of single updates."""
        summed = order["sum"]
        parameters, _ = self._version(order["sha256"])
        rule, protection = self._rule(parameters, order["rule"]), self._protection(order["privacy"])
        assert isinstance(rule, SumRule)
        assert protection is not None
        sums = protection.begin(order["round"], range(summed["cohort"]))
        integers = np.frombuffer(self._updates.path(summed["sha256"]).read_bytes(), "<i8")
        sums.take(integers, summed["weight"], len(summed["clients"]))
        after = rule.apply(parameters, sums.close())
        change = {name: values.double() - parameters[name].double() for name, values in after.items()}
        states = {facts["client"]: facts["state"] for facts in order["updates"] if "state" in facts}
        return {
            **self._written(after, rule),
            **self._spent(protection),
            "loss": None,
            "weight": summed["weight"] if self._job.strategy.exchange.rule.by_samples else 0.0,
            "norm": {"mean": None, "max": None, "step": norm(change)},
            "agreement": None,
            "metrics": evaluation.merged(self._job, states),
        }

    def _step(self, order: Order) -> dict[str, Any]:
        """The rule's step with a round's updates, in the order of the clients' names."""
        if "sum" in order:
            return self._summed(order)
        parameters, told = self._version(order["sha256"])
        screening = Screening(self._job.strategy.exchange.rule, parameters, told)
        rule = self._rule(parameters, order["rule"])
        told_of = sorted(order["updates"], key=lambda facts: str(facts["client"]))
        refused: dict[str, str] = {}
        updates: list[Update] = []
        for facts in told_of:
            try:
                updates.append(self._update(facts, screening))
            except Refused as why:
                refused[facts["client"]] = str(why)
        if not refused:
            outliers = screening.outliers([norm(update.difference) for update in updates])
            refused = {told_of[place]["client"]: why for place, why in outliers.items()}
        if refused:
            return {"refused": refused}
        protection = self._protection(order["privacy"])
        if protection is not None:
            after = self._protected(protection, order, rule, parameters, updates)
        else:
            after = rule.step(parameters, updates)
        norms = [norm(update.difference) for update in updates]
        weights = [update.weight for update in updates]
        typical = math.fsum(w * n for w, n in zip(weights, norms, strict=True)) / math.fsum(weights)
        mean = {
            name: sum((u.weight * u.difference[name].double() for u in updates), torch.zeros(())) / math.fsum(weights)
            for name in updates[0].difference
        }
        total = math.fsum(update.metrics["loss"][0] for update in updates if "loss" in update.metrics)
        weight = math.fsum(update.metrics["loss"][1] for update in updates if "loss" in update.metrics)
        states = {facts["client"]: facts["state"] for facts in told_of if "state" in facts}
        return {
            **self._written(after, rule),
            **self._spent(protection),
            "loss": total / weight if weight else None,
            "weight": weight,
            "norm": {"mean": math.fsum(norms) / len(norms), "max": max(norms)},
            "agreement": min(norm(mean) / typical, 1.0) if typical else None,
            "metrics": evaluation.merged(self._job, states),
        }

    def _protection(self, state: dict[str, Any] | None) -> Protection | None:
        """Differential privacy as it is after what was released so far; None: there is none."""
        exchange = self._job.strategy.exchange
        if not exchange.protected:
            return None
        from verbund.exchange.federated.protection import Protection  # packages that not everybody has

        shapes = {name: tuple(values.shape) for name, values in self._first.items()}
        protection = Protection(exchange, shapes, exchange.cohort_size(self._clients), None, None)
        if state is not None:
            protection.load(state["state"])
        return protection

    def _protected(
        self,
        protection: Protection,
        order: dict[str, Any],
        rule: Rule,
        parameters: dict[str, Tensor],
        updates: list[Update],
    ) -> dict[str, Tensor]:
        if protection.local is not None:  # clients have added the noise; what they have spent is known here too
            protection.begin(order["round"], sorted(number_of(str(facts["client"])) for facts in order["updates"]))
            return rule.step(parameters, updates)
        assert isinstance(rule, SumRule)
        sums = protection.begin(order["round"], range(len(updates)))
        for place, update in enumerate(updates):
            sums.add(place, rule.contribution(update), update.weight)
        return rule.apply(parameters, sums.close())

    def _spent(self, protection: Protection | None) -> dict[str, Any]:
        if protection is None or protection.accountant is None:
            return {"privacy": None}
        return {
            "privacy": {
                "state": protection.state(),
                "enough": protection.affords(protection.known or range(protection.cohort)),
                "spent": protection.accountant.summary(),
                "outlook": protection.outlook(self._job.train.steps or 0),
            }
        }

    def _save(self, digest: str, folder: Path) -> dict[str, Any]:
        self._local.put(self._version(digest)[0])
        pieces: list[Piece] = [piece for kind in ("parameters", "buffers") for piece in self._replica.pieces(kind)]
        with torch.no_grad():
            return write_part(folder, 0, pieces)


class _NoSamples:
    """A server has none."""

    def __len__(self) -> int:
        return 0
