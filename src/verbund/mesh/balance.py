"""Shares of a global batch that go by how fast each worker has been.

Each step, all learn every worker's own seconds of it: they travel with the gradients' sums. Every so many steps each
computes from them, alike, what a step of so many samples takes each worker (see `Speeds`), and gives each so many that
all end together. (Tyagi and Sharma, "Taming resource heterogeneity in distributed ML training with dynamic batching",
ACSOS 2020, control the batch sizes of workers likewise; there gradients must be weighted by them, while here they are
sums.)

Which samples a step has, and by what their sum is divided, does not change; only who computes which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verbund.job import Stragglers
from verbund.mesh.axes import Division, Mesh
from verbund.mesh.speeds import Speeds

PARTS = 1 << 16
"""Weights of shares are whole numbers that add up to about so much."""
LEAST_SECONDS = 0.5
"""Speeds are those of so long a time at least: in short steps they are mostly noise."""
WORTH = 0.97
"""Shares stay as they are unless the others promise a step of at most this part of its time."""


@dataclass(frozen=True)
class _Shares:
    """From the step `since` on the workers that share a batch have weights; none: even shares."""

    since: int
    weights: tuple[int, ...] = ()


class Balance:
    """The division of every step's samples among islands and, in each of them, among workers. Shares are even until
    `begin`.

    Args:
        mesh: the islands and their axes.
        division: even shares inside of an island.
        settings: whether and when shares change.
        joint: whether the islands add up the gradients of every step.
        apart: whether each island has samples of its own all the same, so many of each step.
        lead: steps that are planned ahead of the one that is computed: what is found after a step is for those
            beyond them.
    """

    def __init__(
        self,
        mesh: Mesh,
        division: Division,
        settings: Stragglers | None = None,
        joint: bool = False,
        lead: int = 0,
        apart: bool = False,
    ) -> None:
        self._mesh, self._even, self._settings = mesh, division, settings or Stragglers()
        self._islands = Division(mesh.islands, division.unit)
        self._joint, self._lead, self._apart = joint and mesh.islands > 1, lead, apart
        self._inner = mesh.size("data", "shard")
        self.workers = self._inner * (mesh.islands if self._joint else 1)
        """Whose shares go by speed."""
        self._moves = False
        self._whole: tuple[int, ...] = ()
        self._forget(0)

    def begin(self, step: int, sizes: Sequence[int]) -> None:
        """From `step` on, shares go by speed; of which nothing is known yet.

        Args:
            step: the next one.
            sizes: the samples of a whole global batch that each island has with even shares.
        """
        self._whole = tuple(sizes) if self._joint else (sizes[self._mesh.island],)
        unit = self._even.unit
        # With fewer units than workers some have none, whatever their speed.
        enough = all(-(-size // unit) >= self._inner for size in self._whole)
        self._moves = self._settings.rebalances and self.workers > 1 and enough
        self._forget(step)

    def _forget(self, step: int) -> None:
        self._next = step
        self._known = [_Shares(step)]
        self._speeds = Speeds(self.workers, sum(self._whole) / self.workers)
        self._passed = 0.0

    @property
    def place(self) -> int:
        """Which of `workers` this one belongs to."""
        axes = ("islands", "data", "shard") if self._joint else ("data", "shard")
        return self._mesh.place(*axes)

    # -- whose samples -------------------------------------------------------------------------------------------

    def islands(self, step: int) -> Division:
        """How a global batch is divided among the islands."""
        return self._among_islands(self._at(step))

    def inside(self, step: int, island: int | None = None) -> Division:
        """How an island's share is divided among its workers; default: this worker's island."""
        return self._within(self._at(step), self._mesh.island if island is None else island)

    def counts(self, step: int, sizes: Sequence[int]) -> list[int]:
        """The samples of each of `workers` in a step.

        Args:
            step: one that is known.
            sizes: the samples of each island's share.
        """
        return self._shared(self._at(step), sizes if self._joint else (sizes[self._mesh.island],))

    def _at(self, step: int) -> tuple[int, ...]:
        """The weights of a step; none: even shares."""
        if not self._moves:
            return ()
        known = self._known  # a loader's thread asks ahead of the training, which replaces the list as a whole
        assert step <= self._next + self._lead, f"the shares of step {step} are asked for before step {self._next}"
        return next((shares.weights for shares in reversed(known) if shares.since <= step), ())

    def _among_islands(self, weights: tuple[int, ...]) -> Division:
        if not weights or not self._joint or self._apart:
            return self._islands
        sums = (sum(weights[first : first + self._inner]) for first in range(0, len(weights), self._inner))
        return replace(self._islands, weights=tuple(sums), least=self._inner)

    def _within(self, weights: tuple[int, ...], island: int) -> Division:
        if not weights:
            return self._even
        first = island * self._inner if self._joint else 0
        return replace(self._even, weights=weights[first : first + self._inner])

    def _shared(self, weights: tuple[int, ...], sizes: Sequence[int]) -> list[int]:
        """The samples of each of `workers`; `sizes` are those of their islands."""
        found = []
        for island, size in enumerate(sizes):
            division = self._within(weights, island)
            found += [high - low for low, high in (division.share(size, worker) for worker in range(self._inner))]
        return found

    def _promised(self, weights: tuple[int, ...]) -> list[int]:
        """The samples of each of `workers` in a whole global batch, with some weights."""
        sizes = self._whole
        if self._joint and weights and not self._apart:
            islands = self._among_islands(weights)
            shares = (islands.share(sum(sizes), island) for island in range(self._mesh.islands))
            sizes = tuple(high - low for low, high in shares)
        return self._shared(weights, sizes)

    # -- how fast ------------------------------------------------------------------------------------------------

    def record(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> list[int] | None:
        """Takes in what all workers have learnt of a step; each calls it with the same.

        Args:
            step: the one that was computed; each once, in order.
            sizes: the samples of each island's share.
            seconds: of each of `workers` its own.

        Returns:
            the new shares of a whole global batch, if they change.
        """
        self._next = step + 1
        if not self._moves:
            return None
        self._speeds.record(self.counts(step, sizes), seconds)
        self._passed += max(seconds)
        if (step + 1) % self._settings.every or self._passed < LEAST_SECONDS:
            return None
        self._passed = 0.0
        return self._decide(step + 1 + self._lead) if self._speeds.look() else None

    def _decide(self, since: int) -> list[int] | None:
        weights = self._weights()
        former, shares = (self._promised(each) for each in (self._known[-1].weights, weights))
        now, then = (self._speeds.longest(counts) for counts in (former, shares))
        if then > WORTH * now:
            return None
        current = next(known for known in reversed(self._known) if known.since < self._next)
        later = [known for known in self._known if known.since >= self._next]
        self._known = [current, *later, _Shares(since, weights)]
        return shares

    def _weights(self) -> tuple[int, ...]:
        """Those of shares with which all end together: of all workers, or, where each island has samples of its own, of
        those of an island."""
        sizes = self._whole if self._apart else (sum(self._whole),)
        together, wanted = self.workers // len(sizes), list[float]()
        for group, size in enumerate(sizes):
            first = group * together
            wanted += self._speeds.shares(first, first + together, size, self._even.unit)
        total = sum(sizes)
        return tuple(max(round(PARTS * share / total), 1) for share in wanted)
