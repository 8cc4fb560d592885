"""A client's local training, the same for real clients and for simulated ones that have a model to themselves:
parameters and what the server tells become an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verbund.data.batch import Batch, Item, Transform, read
from verbund.data.hashing import key
from verbund.data.order import Order
from verbund.data.samples import Ids, Samples
from verbund.exchange.federated.client_side import PERSONAL, ClientSide, Memory
from verbund.exchange.federated.compressed import UpdateCompression
from verbund.exchange.federated.update import Update
from verbund.job import Exchange, Job
from verbund.mesh import schedule
from verbund.mesh.changing_buffers import changing
from verbund.mesh.replica import Replica
from verbund.observe.events import Unrecorded

if TYPE_CHECKING:
    from verbund.exchange.federated.privacy import ExamplePrivacy
    from verbund.stage.federated.example_steps import ExampleSteps

_STEP_BITS = 24
"""Local steps of a round have tickets of their own, (round << bits) + step: what is drawn there is keyed by them."""


@dataclass(frozen=True)
class Assignment:
    """What a client is asked to do.

    Args:
        client: its number, which keys the order of its samples.
        round: likewise.
        version: the server steps that the parameters have seen.
        parameters: what is shared, by name.
        told: what the rule tells besides, by name.
        share: of its local steps, that it takes; it takes one at least.
        secret: under the privacy `examples` what batches and noise are drawn by, which nobody but this client's workers
            may know; in a simulation it is the job's seed.
    """

    client: int
    round: int
    version: int
    parameters: Mapping[str, Tensor]
    told: Mapping[str, Tensor] = field(default_factory=dict)
    share: float = 1.0
    secret: str | None = None


class LocalOrder:
    """Which samples each local step has: a function of seed, client and round.

    Args:
        seed: of the job.
        exchange: epochs or steps of a round.
        batch: samples of a step.
        assignment: client, round, and its share of the steps.
        positions: the client's samples.
        privacy: of the round, where single samples are protected: then it draws the batches.
    """

    def __init__(
        self,
        seed: int,
        exchange: Exchange,
        batch: int,
        assignment: Assignment,
        positions: Ids,
        privacy: ExamplePrivacy | None = None,
    ) -> None:
        self.privacy = privacy
        self._order = Order(len(positions), batch, key(seed, assignment.client, assignment.round))
        self._positions, self._round = positions, assignment.round
        whole = exchange.local_steps or (exchange.local_epochs or 1) * self._order.tickets_per_epoch
        self.steps = max(round(assignment.share * whole), 1)
        """How many there are."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which each sample comes once."""
        return self._order.tickets_per_epoch

    def step(self, number: int) -> Ids:
        """The samples of a step; may be none where they are drawn."""
        if self.privacy is not None:
            drawn: Ids = self._positions[self.privacy.batch(self.ticket(number)).numpy()]
            return drawn
        return self._positions[self._order.positions(number)]

    def ticket(self, number: int) -> int:
        """What keys whatever is drawn in a step."""
        return ticket(self._round, number)


def ticket(round_: int, step: int) -> int:
    """The ticket of a local step."""
    return (round_ << _STEP_BITS) + step


class LocalTraining:
    """What trains clients, one after the other, with one model.

    Args:
        replica: of the client's own mesh, which does not divide the model. Its parameters are overwritten.
        job: the clients' optimiser, batch, and the rule.
        samples: the client's, or those of all clients in a simulation.
        transform: what augments a batch.
        total_rounds: for the schedule of the learning rate, which is one of rounds.
    """

    def __init__(
        self, replica: Replica, job: Job, samples: Samples, transform: Transform | None, total_rounds: int | None
    ) -> None:
        self.replica, self.job, self.samples = replica, job, samples
        self._transform, self.total_rounds = transform, total_rounds
        self._trained = dict(zip(replica.names, replica.parameters, strict=True))
        buffers = changing(replica.model)
        self._buffers = {b.name: b for b in buffers if b.get().is_floating_point()}
        self._counts = [(b, b.get().clone()) for b in buffers if not b.get().is_floating_point()]
        self.side = ClientSide(job.strategy.exchange.rule, replica.model, list(self._trained), list(self._buffers))
        exchange = job.strategy.exchange
        self.compression: UpdateCompression | None = None
        """What updates travel as, if not as they are."""
        if exchange.compression.name != "none":
            self.compression = UpdateCompression(exchange, self.side.plain, job.seed)
        self.first_personal = {name: values.clone() for name, values in self._read(self.side.personal).items()}
        """What a client has for itself before its first round: the values of the model as it is now."""
        self.changes_buffers = bool(buffers)
        self._journal = Unrecorded()
        self.examples: ExampleSteps | None = None
        """Gradients of single samples, where these are protected."""
        if exchange.privacy.kind == "examples":
            from verbund.stage.federated.example_steps import ExampleSteps  # packages that not everybody has

            self.examples = ExampleSteps(replica, job)

    def shared(self) -> dict[str, Tensor]:
        """A copy of what the model has of what is shared, by name."""
        return {name: values.clone() for name, values in self._read(self.side.shared).items()}

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives the model these values."""
        with torch.no_grad():
            for name, values in tensors.items():
                (self._trained[name] if name in self._trained else self._buffers[name].get()).copy_(values)
            for buffer, values in self._counts:
                buffer.get().copy_(values)

    def own_model(self, shared: Mapping[str, Tensor], memory: Memory) -> dict[str, Tensor]:
        """The model that a client has for itself: what is shared, but for what it keeps of its own."""
        own = {name: memory.get(f"{PERSONAL}{name}", values) for name, values in shared.items()}
        return own | {n: memory.get(f"{PERSONAL}{n}", self.first_personal[n]) for n in self.side.personal}

    def train(self, assignment: Assignment, positions: Ids, memory: Memory) -> tuple[Update, Memory]:
        """Trains on one client's samples.

        Args:
            assignment: what it starts from.
            positions: of its samples in `samples`, int64, at least one.
            memory: what it kept from its former round.

        Returns:
            its update, whose tensors are its own, and what it keeps.

        Raises:
            RunFailed: from the user's model or loss, with the samples concerned.
        """
        side = self.side
        order = self.order(assignment, positions)
        base = dict(assignment.parameters)
        own = self.own_model(base, memory)
        self.put(own if side.own_model is None else base)
        shift = side.shift(assignment.told, memory)
        loss, weight = self._run(order, assignment.round, base, side.proximal, shift)
        now = self._read(side.shared)
        difference = {name: now[name] - base[name] for name in side.shared}
        rates, momentum = self.rates()
        aux, kept = side.after(assignment.told, memory, difference, order.steps, rates, momentum)
        kept |= {f"{PERSONAL}{name}": values.clone() for name, values in self._read(side.personal).items()}
        if side.own_model is not None:
            self.put(own)
            self._run(order, assignment.round, base, side.own_model, {})
            kept |= {f"{PERSONAL}{name}": values.clone() for name, values in self._read(side.shared).items()}
        update = Update(
            difference, float(len(positions)), assignment.version, order.steps, aux, {"loss": (loss, weight)}
        )
        return update, kept

    def order(self, assignment: Assignment, positions: Ids) -> LocalOrder:
        """The order of a client's samples in a round."""
        exchange, batch = self.job.strategy.exchange, self.job.train.global_batch
        privacy = None
        if self.examples is not None:
            seed = assignment.secret if assignment.secret is not None else self.job.seed
            privacy = self.examples.privacy(exchange.privacy, self.job, len(positions), seed, assignment.client)
        return LocalOrder(self.job.seed, exchange, batch, assignment, positions, privacy)

    def rates(self) -> tuple[dict[str, float], float]:
        """The learning rates of the last step, by parameter, and the momentum of SGD (0 of others)."""
        found, momentum = {}, 0.0
        names = {id(values): name for name, values in self._trained.items()}
        for group in self.replica.optimizer.param_groups:
            momentum = float(group.get("momentum", 0.0))
            found.update({names[id(values)]: float(group["lr"]) for values in group["params"]})
        return found, momentum

    def batch(self, ids: Ids, number: int) -> Batch:
        """Samples as a local step has them."""
        return read(self.samples, Item(number, np.ascontiguousarray(self.samples.ids(ids))), self._transform)

    def trained_in(self, step: int, order: LocalOrder) -> list[str] | None:
        """The parameters that a local step trains; None: all. FedRep trains the personal part first, then the rest
        (Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", 2021, algorithm 1)."""
        if self.side.settings.name != "fedrep":
            return None
        head = step < min(self.side.settings.head_epochs * order.steps_per_epoch, order.steps - 1)
        return self.side.personal if head else self.side.shared

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        return {
            name: self._trained[name].detach() if name in self._trained else self._buffers[name].get() for name in names
        }

    def _run(
        self, order: LocalOrder, round_: int, base: Mapping[str, Tensor], proximal: float, shift: Mapping[str, Tensor]
    ) -> tuple[float, float]:
        """All local steps from where the model is; the losses' sum and weight."""
        replica = self.replica
        replica.optimizer.state.clear()  # each round's optimiser is new, as no server could send its state to all
        total = weight = 0.0
        for step in range(order.steps):
            ids, number = order.step(step), order.ticket(step)
            if self.examples is not None:
                assert order.privacy is not None
                told = self.examples.step(ids, number, self.batch, order.privacy)
                self._step(round_, self._correction(base, proximal, shift, self.trained_in(step, order)))
                total, weight = total + told[0], weight + told[1]
                continue
            sizes = (len(ids),)
            plan = replica.plan(sizes, number)
            batches = (self._cut(ids, low, high, number) for low, high, _ in plan)
            sums = replica.gradients(batches, len(plan), number, sizes, 0.0, self._journal)
            correct = self._correction(base, proximal, shift, self.trained_in(step, order))
            replica.update(round_, sizes, sums, self.total_rounds, correct)
            total, weight = total + sums.loss, weight + sums.weight
        return total, weight

    def _step(self, round_: int, correct: Callable[[], None] | None) -> None:
        """The optimiser's step along gradients that nothing is left to be done to but a rule's correction."""
        optimizer, train = self.replica.optimizer, self.job.train
        schedule.apply(optimizer, schedule.factor(train.schedule, round_, self.total_rounds))
        if correct is not None:
            correct()
        optimizer.step()

    def _cut(self, ids: Ids, low: int, high: int, number: int) -> Batch:
        return self.batch(ids[low:high], number)

    def _correction(
        self, base: Mapping[str, Tensor], proximal: float, shift: Mapping[str, Tensor], trained: list[str] | None
    ) -> Callable[[], None] | None:
        """What changes the gradients of a step, if anything does."""
        if not proximal and not shift and trained is None:
            return None

        def correct() -> None:
            with torch.no_grad():
                for name, values, gradient in self._gradients():
                    if trained is not None and name not in trained:
                        values.grad = None
                        continue
                    if proximal and name in base:
                        gradient.add_(values - base[name], alpha=proximal)
                    if name in shift:
                        gradient.add_(shift[name])

        return correct

    def _gradients(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, values in self._trained.items():
            if values.grad is not None:
                yield name, values, values.grad
