"""What a rule asks of its clients: which parts of the model they keep, what is added to their gradients, and what they
send and remember besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from verbund.errors import InputError
from verbund.exchange.federated.fednova import NORMALISER, normaliser
from verbund.exchange.federated.scaffold import CONTROL, new_control
from verbund.job import Rule

PERSONAL = "personal/"
"""Before the names of what a client has for itself."""
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Memory = Mapping[str, Tensor]
"""What a client keeps from one of its rounds to the next, by name; empty before its first."""


class ClientSide:
    """The clients' part of a rule.

    Args:
        settings: the rule.
        model: whose normalisation layers may stay with the clients.
        trained: names of the trained parameters.
        buffers: names of the running statistics.

    Raises:
        InputError: if a pattern of `personal` matches nothing, or nothing is left to share.
    """

    def __init__(self, settings: Rule, model: nn.Module, trained: Sequence[str], buffers: Sequence[str]) -> None:
        self.settings = settings
        personal = _personal(settings, model, [*trained, *buffers])
        self.personal = [name for name in (*trained, *buffers) if name in personal]
        """Names of what stays with each client."""
        self.shared = [name for name in (*trained, *buffers) if name not in personal]
        """Names of what travels: trained parameters, then running statistics."""
        self.plain = [name for name in buffers if name not in personal]
        """Of those the running statistics, which no optimiser is for."""
        self.controlled = [name for name in trained if name not in personal] if settings.name == "scaffold" else []
        self.proximal = settings.proximal if settings.name == "fedprox" else 0.0
        """μ: μ·(w − w₀) is added to a gradient."""
        self.own_model = settings.proximal if settings.name == "ditto" else None
        """λ, where each client trains a whole model of its own besides (Li et al., "Ditto: Fair and Robust Federated
        Learning Through Personalization", 2021, algorithm 1)."""
        if not any(name in self.shared for name in trained):
            raise InputError(
                f"under `{settings.name}` no parameter is left for clients to share",
                where="strategy.exchange.rule.personal",
                fix="Give narrower patterns",
            )

    def shift(self, told: Mapping[str, Tensor], memory: Memory) -> dict[str, Tensor]:
        """What is added to the gradients, by parameter: with SCAFFOLD c − cᵢ."""
        found = {}
        for name in self.controlled:
            common = told[f"{CONTROL}{name}"]
            own = memory.get(f"{CONTROL}{name}")
            found[name] = common if own is None else common - own
        return found

    def after(
        self,
        told: Mapping[str, Tensor],
        memory: Memory,
        difference: Mapping[str, Tensor],
        steps: int,
        rates: Mapping[str, float],
        momentum: float,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a client sends besides its difference, and what it remembers of its shared parameters.

        Args:
            told: by the server.
            memory: from before.
            difference: of the shared parameters.
            steps: that it took.
            rates: learning rate by parameter.
            momentum: of its SGD.
        """
        if self.settings.name == "fednova":
            return {NORMALISER: torch.tensor([normaliser(steps, momentum)], dtype=torch.float64)}, {}
        aux, kept = {}, {}
        for name in self.controlled:
            common = told[f"{CONTROL}{name}"]
            own = memory.get(f"{CONTROL}{name}")
            own = torch.zeros_like(common) if own is None else own
            new = new_control(own, common, difference[name], steps, rates[name])
            aux[f"{CONTROL}{name}"], kept[f"{CONTROL}{name}"] = new - own, new
        return aux, kept


def _personal(settings: Rule, model: nn.Module, names: Sequence[str]) -> set[str]:
    """Which of the names stay with the clients."""
    if settings.name == "fedbn" and not settings.personal:
        norms = [name for name, module in model.named_modules() if isinstance(module, _NORMS)]
        found = {name for name in names if name.rpartition(".")[0] in norms}
        if not found:
            raise InputError(
                "the model has no normalisation layer that `fedbn` could leave with its clients",
                where="strategy.exchange.rule.name",
                fix="Use another rule, or name what stays with clients in `personal`",
            )
        return found
    found = set()
    for pattern in settings.personal:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise InputError(
                f"`{pattern}` matches no parameter",
                where="strategy.exchange.rule.personal",
                fix=f"There are: {', '.join(names[:6])}{', …' if len(names) > 6 else ''}",
            )
        found |= matched
    return found
