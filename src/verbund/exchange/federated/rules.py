"""The rule that a job names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from verbund.exchange.federated.fedbuff import FedBuff
from verbund.exchange.federated.fednova import FedNova
from verbund.exchange.federated.robust import RULES
from verbund.exchange.federated.rule import Rule
from verbund.exchange.federated.scaffold import Scaffold
from verbund.exchange.federated.server_optimizers import Adaptive, Averaging, Momentum
from verbund.job import Rule as Settings
from verbund.job.federated import ADAPTIVE


def build(settings: Settings, clients: int, parameters: Mapping[str, Tensor], plain: Sequence[str]) -> Rule:
    """The server's side of a rule.

    Args:
        settings: the job's.
        clients: how many there are in all.
        parameters: what travels, by name.
        plain: names of those that are running statistics.
    """
    name, rate = settings.name, settings.rate
    if name in RULES:
        return RULES[name](settings, plain)
    if name in ADAPTIVE:
        return Adaptive(name, rate, settings.momentum, settings.second_momentum, settings.adaptivity, plain)
    if name == "fedavgm":
        return Momentum(rate, settings.momentum, plain)
    if name == "scaffold":
        trained = {key: values for key, values in parameters.items() if key not in plain}
        return Scaffold(clients, trained, rate, plain)
    if name == "fednova":
        return FedNova(rate, plain)
    if name == "fedbuff":
        return FedBuff(rate, settings.staleness_power, plain)
    return Averaging(rate, plain)
