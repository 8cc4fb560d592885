"""The server of a simulation: parameters, the rule's state, what clients keep; and all of it in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.errors import InputError
from verbund.exchange.federated.client_side import Memory
from verbund.exchange.federated.partition import Parts
from verbund.exchange.federated.rules import build
from verbund.exchange.federated.screening import Screening
from verbund.job import Job
from verbund.stage.federated.local import LocalTraining

if TYPE_CHECKING:
    from verbund.exchange.federated.privacy import Accountant, ExampleAccounts
    from verbund.exchange.federated.protection import Protection

_RULE, _CLIENT = "rule/", "client/"


class SimulatedServer:
    """What a server keeps between rounds, the same in all workers.

    Args:
        job: the rule.
        local: has the model whose values are the first ones.
        parts: whose samples are whose.
    """

    def __init__(self, job: Job, local: LocalTraining, parts: Parts) -> None:
        self._job, self._local, self._parts = job, local, parts
        clients = parts.clients
        self.parameters: dict[str, Tensor] = local.shared()
        self.compression = local.compression
        self.rule = build(job.strategy.exchange.rule, clients, self.parameters, local.side.plain)
        self.screening = Screening(job.strategy.exchange.rule, self.parameters, self.rule.told())
        exchange = job.strategy.exchange
        self.protection: Protection | None = None
        if exchange.protected:
            from verbund.exchange.federated.protection import Protection  # packages that not everybody has

            shapes = {name: tuple(values.shape) for name, values in self.parameters.items()}
            cohort = exchange.cohort_size(clients)
            rate = cohort / clients if exchange.privacy.sampling == "poisson" else None
            self.protection = Protection(exchange, shapes, cohort, rate, job.seed)
        self.accounts: ExampleAccounts | None = None
        if exchange.privacy.kind == "examples":
            from verbund.exchange.federated.privacy import ExampleAccounts  # packages that not everybody has
            from verbund.stage.federated.example_steps import round_of

            self.accounts = ExampleAccounts(exchange.privacy, [round_of(job, int(size)) for size in parts.sizes])
        self.memories: dict[int, Memory] = {}

    @property
    def accountant(self) -> Accountant | None:
        """What was spent, if there is privacy: of updates, or of the samples of the client that has spent most."""
        if self.accounts is not None:
            return self.accounts.worst()
        return self.protection.accountant if self.protection is not None else None

    def outlook(self, rounds: int) -> str | None:
        """What to expect of the privacy budget, a sentence; None if it is enough for so many more rounds.

        Raises:
            InputError: if it is not enough for the first one.
        """
        if self.accounts is not None:
            clients = self._parts.clients
            return self.accounts.outlook(rounds, self._job.strategy.exchange.cohort_size(clients) / clients)
        return self.protection.outlook(rounds) if self.protection is not None else None

    def show(self) -> None:
        """Gives the model the server's parameters: for validation, and for checkpoints."""
        self._local.put({**self.parameters, **self._local.first_personal})

    def record(self) -> dict[str, Any]:
        """What `load` needs besides tensors."""
        exchange = self._job.strategy.exchange
        protection = self.protection.state() if self.protection is not None else None
        return {
            "name": exchange.name,
            "rule": exchange.rule.name,
            "protection": protection,
            "accounts": self.accounts.state() if self.accounts is not None else None,
            "parts": self._parts.digest,
        }

    def pieces(self) -> Iterator[Piece]:
        """What only this exchange knows, for a checkpoint."""
        for name, values in self.rule.state().items():
            yield Piece.whole("exchange", f"{_RULE}{name}", values)
        for client, memory in sorted(self.memories.items()):
            for name, values in memory.items():
                yield Piece.whole("exchange", f"{_CLIENT}{client}/{name}", values)

    def load(self, checkpoint: Checkpoint) -> list[str]:
        """Takes up what a checkpoint has, whose parameters are in the model already.

        Returns:
            what had to be dropped, in sentences.
        """
        self.parameters = self._local.shared()
        record = checkpoint.state.get("exchange")
        if not record or record["name"] != self._job.strategy.exchange.name:
            return [f"The state of the exchange `{record['name']}` was dropped"] if record else []
        if self.protection is not None:
            self.protection.load(record.get("protection"))
        if self.accounts is not None:
            self._load_accounts(record)
        rule = self._job.strategy.exchange.rule.name
        if record["rule"] != rule:
            return [f"The rule was `{record['rule']}`: its state, and what clients kept, was dropped"]
        state: dict[str, Tensor] = {}
        same = record.get("parts") == self._parts.digest
        with torch.no_grad():
            for name in checkpoint.names("exchange"):
                if name.startswith(_RULE):
                    state[name.removeprefix(_RULE)] = checkpoint.read("exchange", name)
                elif name.startswith(_CLIENT) and same:
                    client, _, key = name.removeprefix(_CLIENT).partition("/")
                    memory = dict(self.memories.get(int(client), {}))
                    memory[key] = checkpoint.read("exchange", name)
                    self.memories[int(client)] = memory
        if state:
            self.rule.load(state)
        return [] if same else ["Clients have other samples than before: what they kept was dropped"]

    def _load_accounts(self, record: dict[str, Any]) -> None:
        assert self.accounts is not None
        where, fix = "strategy.exchange.privacy.kind", "Leave all as it was, or begin anew"
        if (spent := record.get("accounts")) is None:
            what = "the run had no privacy of single samples so far: what it has told of them would not be counted"
            raise InputError(what, where=where, fix=fix)
        if record.get("parts") != self._parts.digest:
            what = "clients have other samples than before: what was told of each would not be counted"
            raise InputError(what, where=where, fix=fix)
        self.accounts.load(spent)
