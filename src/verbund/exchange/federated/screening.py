"""What becomes of an update before it is aggregated: checked, weighted, shortened, or refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from verbund.exchange.federated.fednova import NORMALISER
from verbund.exchange.federated.update import Update
from verbund.job import Rule


class Refused(Exception):
    """An update cannot be used; the message says why, and of the data no more than that."""


class Screening:
    """The checks of a rule.

    Args:
        settings: the rule.
        expected: what an update's difference must have, by name.
        aux: what it must have besides.
    """

    def __init__(self, settings: Rule, expected: Mapping[str, Tensor], aux: Mapping[str, Tensor]) -> None:
        self._settings = settings
        self._expected = {name: tuple(values.shape) for name, values in expected.items()}
        self._aux = {name: tuple(values.shape) for name, values in aux.items()}
        if settings.name == "fednova":
            self._aux[NORMALISER] = (1,)

    def checked(self, update: Update) -> Update:
        """The update as it is aggregated: with the weight that it gets, and no longer than is allowed.

        Raises:
            Refused: if it cannot be used.
        """
        return self.measured(update)[0]

    def measured(self, update: Update) -> tuple[Update, float]:
        """The same, and the norm of the difference as it came.

        Raises:
            Refused: if it cannot be used.
        """
        _check_names("difference", update.difference, self._expected)
        _check_names("aux", update.aux, self._aux)
        if NORMALISER in self._aux and not float(update.aux[NORMALISER]) > 0:
            raise Refused(f"`{NORMALISER}` is not positive")
        if not (math.isfinite(update.weight) and update.weight > 0):
            raise Refused(f"the weight is {update.weight}")
        if update.local_steps < 1:
            raise Refused(f"{update.local_steps} local steps")
        weight = update.weight if self._settings.by_samples else 1.0
        weight = min(weight, self._settings.max_weight or weight)
        difference, length = update.difference, norm(update.difference)
        if not math.isfinite(length) or not math.isfinite(norm(update.aux)):
            raise Refused(f"`{_not_finite({**update.difference, **update.aux})}` has values that are no finite numbers")
        if (bound := self._settings.clip_norm) is not None and length > bound:
            difference = {name: values * (bound / length) for name, values in difference.items()}
        return replace(update, weight=weight, difference=difference), length

    @property
    def compares(self) -> bool:
        """Whether updates of a round are compared with each other, so that all have to be there."""
        return self._settings.refuse_beyond is not None

    def outliers(self, norms: Sequence[float]) -> dict[int, str]:
        """Of a round's updates those that are too long, by place, with the reason."""
        if self._settings.refuse_beyond is None or not norms:
            return {}
        middle = median(norms)
        bound = self._settings.refuse_beyond * middle
        return {
            place: f"its norm is {length:.4g}, the median of its round {middle:.4g}"
            for place, length in enumerate(norms)
            if length > bound
        }


@torch.no_grad()
def norm(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all together, in float64."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in tensors.values()))


def _check_names(what: str, given: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    if given.keys() != expected.keys():
        odd = sorted(given.keys() ^ expected.keys())
        raise Refused(f"`{odd[0]}` is {'unknown' if odd[0] in given else 'missing'} in its {what}")
    for name, values in given.items():
        if tuple(values.shape) != expected[name]:
            raise Refused(f"`{name}` has shape {list(values.shape)}, not {list(expected[name])}")


def _not_finite(tensors: Mapping[str, Tensor]) -> str:
    """The first of them that is to blame for a norm that is no finite number."""
    return next(
        (name for name, values in tensors.items() if not math.isfinite(norm({name: values}))), next(iter(tensors))
    )
