"""Rules that withstand clients that send anything. All clients count the same."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from verbund.errors import RunFailed
from verbund.exchange.federated.rule import Rule, moved
from verbund.exchange.federated.update import Update
from verbund.job import Rule as Settings
from verbund.job.federated import too_few

_ITERATIONS = 100


class Robust(Rule):
    """x ← x + η · A(Δ₁ … Δₙ) with some robust A.

    Args:
        settings: η and how many updates may be faulty.
        plain: names that move by A itself, whatever η is.
    """

    sees_each: ClassVar[bool] = True

    def __init__(self, settings: Settings, plain: Sequence[str] = ()) -> None:
        self.settings = settings
        self._plain = frozenset(plain)

    def step(self, parameters: Mapping[str, Tensor], updates: Sequence[Update]) -> dict[str, Tensor]:
        """See `Rule.step`.

        Raises:
            RunFailed: if there are too few updates for what the rule promises.
        """
        if lack := too_few(self.settings, len(updates)):
            raise RunFailed(
                lack,
                where="strategy.exchange.rule",
                fix="Use a larger cohort, or a smaller `faulty`",
            )
        names = list(parameters)
        together = self.aggregate([{name: update.difference[name] for name in names} for update in updates])
        return {
            name: moved(values, together[name], 1.0 if name in self._plain else self.settings.rate)
            for name, values in parameters.items()
        }

    @abstractmethod
    def aggregate(self, differences: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """A of the clients' differences, float64 by name."""


class Median(Robust):
    """The median of each coordinate (Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", 2018, definition 1); of an even number the mean of the two in the middle."""

    def aggregate(self, differences: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return {name: _middle(_stacked(differences, name), 0) for name in differences[0]}


class TrimmedMean(Robust):
    """Of each coordinate the mean without the f largest and the f smallest (Yin et al. 2018, definition 2)."""

    def aggregate(self, differences: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        faulty = self.settings.faulty_of(len(differences))
        sorted_ = {name: _stacked(differences, name).sort(0).values for name in differences[0]}
        return {name: values[faulty : len(values) - faulty].mean(0) for name, values in sorted_.items()}


class Krum(Robust):
    """The update whose n − f − 2 nearest others are nearest, or the mean of the `kept` best so (Multi-Krum) (Blanchard
    et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017, section 4)."""

    def aggregate(self, differences: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        count = len(differences)
        faulty = self.settings.faulty_of(count)
        kept = 1 if self.settings.name == "krum" else self.settings.kept or count - faulty
        scores = _scores(squared_distances(differences), range(count), faulty)
        best = sorted(range(count), key=lambda place: (scores[place], place))[:kept]
        chosen = [differences[place] for place in sorted(best)]
        return {name: _stacked(chosen, name).mean(0) for name in differences[0]}


class Bulyan(Robust):
    """θ = n − 2f updates are chosen one by one by Krum; of each coordinate the mean of the θ − 2f of them that are
    nearest to their median (El Mhamdi et al., "The Hidden Vulnerability of Distributed Learning in Byzantium", 2018,
    section 4)."""

    def aggregate(self, differences: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        count = len(differences)
        faulty = self.settings.faulty_of(count)
        distances = squared_distances(differences)
        left = list(range(count))
        chosen: list[int] = []
        while len(chosen) < count - 2 * faulty:
            scores = _scores(distances, left, faulty)
            best = min(left, key=lambda place: (scores[place], place))
            left.remove(best)
            chosen.append(best)
        picked = [differences[place] for place in sorted(chosen)]
        return {name: _around_median(_stacked(picked, name), len(picked) - 2 * faulty) for name in differences[0]}


class GeometricMedian(Robust):
    """The point whose summed distance from all updates is least, by the smoothed algorithm of Weiszfeld (Pillutla et
    al., "Robust Aggregation for Federated Learning", 2022, algorithm 1), until it stands still."""

    smoothing = 1e-6

    def aggregate(self, differences: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        stacked = {name: _stacked(differences, name) for name in differences[0]}
        middle = {name: values.mean(0) for name, values in stacked.items()}
        for _ in range(_ITERATIONS):
            far = sum((values - middle[name]).flatten(1).square().sum(1) for name, values in stacked.items())
            assert isinstance(far, Tensor)
            share = 1.0 / far.sqrt().clamp_min(self.smoothing)
            share = share / share.sum()
            former = middle
            middle = {name: torch.tensordot(share, values, 1) for name, values in stacked.items()}
            moved_ = sum(float((middle[name] - former[name]).square().sum()) for name in middle)
            size = sum(float(values.square().sum()) for values in middle.values())
            if moved_ <= 1e-20 * max(size, 1e-20):
                break
        return middle


RULES: dict[str, type[Robust]] = {
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": Krum,
    "bulyan": Bulyan,
    "geometric_median": GeometricMedian,
}


def squared_distances(differences: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Of all pairs of updates, float64 [n, n]."""
    count = len(differences)
    found = torch.zeros(count, count, dtype=torch.float64)
    for name in differences[0]:
        rows = _stacked(differences, name).reshape(count, -1)
        for place in range(count):
            found[place] += (rows - rows[place]).square().sum(1).cpu()
    return found


def _scores(distances: Tensor, among: Sequence[int], faulty: int) -> dict[int, float]:
    """Krum's score of each: the sum of the squared distances to its nearest others, n − f − 2 of them, at least 1."""
    nearest = max(len(among) - faulty - 2, 1)
    places = list(among)
    scores = {}
    for place in places:
        others = [other for other in places if other != place]
        scores[place] = float(distances[place, others].sort().values[:nearest].sum()) if others else 0.0
    return scores


def _stacked(differences: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """One tensor of all clients, float64 [n, …]."""
    return torch.stack([each[name].to(torch.float64) for each in differences])


def _middle(values: Tensor, dimension: int) -> Tensor:
    count = values.shape[dimension]
    ordered = values.sort(dimension).values
    return (ordered.select(dimension, (count - 1) // 2) + ordered.select(dimension, count // 2)) / 2


def _around_median(values: Tensor, count: int) -> Tensor:
    """The mean of the `count` values nearest to the median, coordinate by coordinate."""
    nearest = (values - _middle(values, 0)).abs().sort(dim=0, stable=True).indices[:count]
    return values.gather(0, nearest).mean(0)
