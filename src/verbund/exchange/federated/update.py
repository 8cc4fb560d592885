"""What an owner's island contributes to a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One client's contribution.

    Args:
        difference: by global name, its parameters after local training minus those that it began from.
        weight: what it counts, e.g. the samples that it trained on.
        base_version: the number of server steps that the parameters had seen which it began from.
        local_steps: the optimiser steps that it took.
        aux: what a rule's clients send besides, by name (SCAFFOLD: differences of control variates).
        metrics: by name, total and weight over its samples.
    """

    difference: Mapping[str, Tensor]
    weight: float
    base_version: int
    local_steps: int
    aux: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
