"""Which client of a simulation has which samples: functions of the seed, with numpy alone.

Every sample belongs to exactly one client.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.data.hashing import key
from verbund.data.permutation import Permutation
from verbund.data.samples import Ids
from verbund.errors import InputError
from verbund.job import Partition

_WHERE = "strategy.exchange.partition"
_LABELS_LIMIT = 10_000
BY_LABEL = ("dirichlet", "shards", "pathological")


@dataclass(frozen=True)
class Parts:
    """A partition.

    Args:
        order: positions of all samples, those of a client together, int64 [samples].
        starts: where each client's begin in it, and the end, int64 [clients + 1].
    """

    order: Ids
    starts: Ids

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> Ids:
        """Samples of each client, int64 [clients]."""
        return np.diff(self.starts)

    @cached_property
    def digest(self) -> int:
        """Tells one partition from another."""
        return zlib.crc32(self.starts.tobytes(), zlib.crc32(self.order.tobytes()))

    def of(self, client: int) -> Ids:
        """Positions of a client's samples."""
        return self.order[self.starts[client] : self.starts[client + 1]]


def divide(
    settings: Partition, clients: int | None, seed: int, samples: int, values: NDArray[Any] | None = None
) -> Parts:
    """Divides samples among clients.

    Args:
        settings: how.
        clients: how many; None: as many as a column has values.
        seed: of the job.
        samples: how many there are.
        values: of the column that says what belongs together (`column`), or the labels, [samples].

    Raises:
        InputError: if it cannot be done.
    """
    if settings.name == "column":
        assert values is not None
        return _by_column(values, clients)
    if clients is None:
        raise InputError("how many clients are there?", where="strategy.exchange.clients", fix="E.g. `clients = 100`")
    if samples < clients * max(settings.minimum, 1):
        raise InputError(
            f"{samples} samples are too few for {clients} clients with at least {max(settings.minimum, 1)} each",
            where=_WHERE,
            fix="Use fewer clients or a smaller `minimum`",
        )
    if settings.name in BY_LABEL:
        assert values is not None
        labels, of_label = np.unique(values, return_inverse=True)
        if len(labels) > _LABELS_LIMIT:
            raise InputError(
                f"`{settings.name}` divides by label, and there are {len(labels)} different ones",
                where=_WHERE,
                fix="Name a column with few values in `column`",
            )
        counts = np.bincount(of_label, minlength=len(labels))
        if settings.name == "shards":
            return _shards(of_label, clients, settings.labels, seed)
        if settings.name == "pathological":
            return _pathological(of_label, counts, clients, settings.labels, seed)
        return _dirichlet(of_label, counts, clients, settings, seed)
    if settings.name == "iid":
        sizes = np.diff(samples * np.arange(clients + 1, dtype=np.int64) // clients)
    else:
        rank = np.arange(clients, dtype=np.float64)
        shares = (rank + 1) ** -settings.alpha if settings.name == "power" else np.exp(-settings.alpha * rank)
        sizes = _with_minimum(_rounded(shares / shares.sum(), samples), max(settings.minimum, 1))
    return Parts(_shuffled(np.arange(samples), key(seed, 0)), _starts(sizes))


def alike(parts: Parts, values: NDArray[Any], others: NDArray[Any], seed: int) -> Parts:
    """Divides other samples, such as those for validation, to each client's taste: of those with some label (or value
    of a column) each client gets the share that it has of the samples with it; clients may get none.

    Args:
        parts: who has which samples.
        values: their labels, [samples].
        others: the labels of the other samples, [others].
        seed: of the job.
    """
    labels, of_label = np.unique(values, return_inverse=True)
    owner = np.empty(len(parts.order), np.int64)
    owner[parts.order] = np.repeat(np.arange(parts.clients), parts.sizes)
    mine = np.empty(len(others), np.int64)
    for number, label in enumerate(np.unique(others).tolist()):
        positions = _shuffled(np.flatnonzero(others == label), key(seed, 8, number))
        place = int(np.searchsorted(labels, label))
        known = place < len(labels) and labels[place] == label
        counts = np.bincount(owner[of_label == place] if known else owner, minlength=parts.clients)
        mine[positions] = np.repeat(np.arange(parts.clients), _rounded(counts / counts.sum(), len(positions)))
    order = np.argsort(mine, kind="stable").astype(np.int64)
    return Parts(order, _starts(np.bincount(mine, minlength=parts.clients)))


def _by_column(values: NDArray[Any], clients: int | None) -> Parts:
    found, of_value = np.unique(values, return_inverse=True)
    if clients is not None and clients != len(found):
        raise InputError(
            f"the column has {len(found)} values, and `clients` is {clients}",
            where="strategy.exchange.clients",
            fix="Leave it out: with `column` the values say how many clients there are",
        )
    return Parts(np.argsort(of_value, kind="stable").astype(np.int64), _starts(np.bincount(of_value)))


def _shards(of_label: Ids, clients: int, runs: int, seed: int) -> Parts:
    """McMahan et al. 2017, section 3: samples sorted by label, cut into runs, so many of them for each client."""
    shuffled = _shuffled(np.arange(len(of_label)), key(seed, 1))
    by_label = shuffled[np.argsort(of_label[shuffled], kind="stable")]
    count = clients * runs
    if len(of_label) < count:
        raise InputError(f"{len(of_label)} samples cannot be cut into {count} shards", where=_WHERE, fix="Use fewer")
    cuts = len(of_label) * np.arange(count + 1, dtype=np.int64) // count
    dealt = _shuffled(np.arange(count), key(seed, 2)).reshape(clients, runs)
    pieces = [[by_label[cuts[shard] : cuts[shard + 1]] for shard in own] for own in dealt]
    return _joined([np.concatenate(own) for own in pieces])


def _pathological(of_label: Ids, counts: Ids, clients: int, labels: int, seed: int) -> Parts:
    """Each client has so many labels, those that the fewest others have; a label is divided evenly."""
    if labels > len(counts) or clients * labels < len(counts):
        raise InputError(
            f"{clients} clients with {labels} labels each cannot have all samples of {len(counts)} labels",
            where=f"{_WHERE}.labels",
            fix="Change `labels` or `clients`",
        )
    random = np.random.Generator(np.random.Philox(key(seed, 3)))
    users = np.zeros(len(counts), np.int64)
    own: list[list[int]] = [[] for _ in range(len(counts))]
    for client in range(clients):
        for label in np.lexsort((random.random(len(counts)), users))[:labels].tolist():
            users[label] += 1
            own[label].append(client)
    if lacking := [label for label in range(len(counts)) if counts[label] < users[label]]:
        raise InputError(
            f"a label has {counts[lacking[0]]} samples, and {users[lacking[0]]} clients are to have some of them",
            where=f"{_WHERE}.labels",
            fix="Use fewer clients or fewer labels for each",
        )
    pieces: list[list[Ids]] = [[] for _ in range(clients)]
    for label, positions in _of_labels(of_label, counts, seed):
        cuts = len(positions) * np.arange(users[label] + 1, dtype=np.int64) // users[label]
        for place, client in enumerate(own[label]):
            pieces[client].append(positions[cuts[place] : cuts[place + 1]])
    return _joined([np.concatenate(each) for each in pieces])


def _dirichlet(of_label: Ids, counts: Ids, clients: int, settings: Partition, seed: int) -> Parts:
    """Each label is divided in proportions drawn from a symmetric Dirichlet distribution (Hsu et al. 2019; Yurochkin
    et al. 2019). Clients below the minimum get samples of the largest ones, instead of drawing until none is."""
    owner = np.empty(len(of_label), np.int64)
    for label, positions in _of_labels(of_label, counts, seed):
        random = np.random.Generator(np.random.Philox(key(seed, 5, label)))
        shares = random.dirichlet(np.full(clients, settings.alpha))
        owner[positions] = np.repeat(np.arange(clients), _rounded(shares, len(positions)))
    sizes = np.bincount(owner, minlength=clients)
    wanted = _with_minimum(sizes, max(settings.minimum, 1))
    shuffled = _shuffled(np.arange(len(of_label)), key(seed, 6))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
    starts = _starts(sizes)
    given = [grouped[starts[c] + wanted[c] : starts[c + 1]] for c in range(clients) if wanted[c] < sizes[c]]
    spare = np.concatenate(given) if given else np.empty(0, np.int64)
    spare = _shuffled(spare, key(seed, 7)) if len(spare) else spare
    at, pieces = 0, []
    for client in range(clients):
        own = grouped[starts[client] : starts[client] + min(sizes[client], wanted[client])]
        lacks = int(wanted[client] - len(own))
        pieces.append(np.concatenate([own, spare[at : at + lacks]]))
        at += lacks
    return _joined(pieces)


def _of_labels(of_label: Ids, counts: Ids, seed: int) -> list[tuple[int, Ids]]:
    """The samples of each label, shuffled."""
    by_label = np.argsort(of_label, kind="stable").astype(np.int64)
    ends = np.cumsum(counts)
    runs = [by_label[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return [(label, _shuffled(run, key(seed, 4, label))) for label, run in enumerate(runs) if len(run)]


def _shuffled(values: Ids, seed: int) -> Ids:
    return np.asarray(values)[Permutation(len(values), seed)(np.arange(len(values)))].astype(np.int64)


def _rounded(shares: NDArray[np.float64], total: int) -> Ids:
    """Whole numbers near `shares` times `total` that add up to it."""
    ends = np.rint(np.cumsum(shares) * total).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def _with_minimum(sizes: Ids, minimum: int) -> Ids:
    """Sizes of the same sum of which none is below the minimum: what is lacking is taken from the largest."""
    sizes = sizes.astype(np.int64).copy()
    lacking = int(np.maximum(minimum - sizes, 0).sum())
    sizes = np.maximum(sizes, minimum)
    if not lacking:
        return sizes
    # The level to which all larger ones are cut: the largest under which enough is taken.
    low, high = minimum, int(sizes.max())
    while low < high:
        level = (low + high + 1) // 2
        if int(np.maximum(sizes - level, 0).sum()) >= lacking:
            low = level
        else:
            high = level - 1
    cut = np.minimum(sizes, low)
    back = int(np.maximum(sizes - low, 0).sum()) - lacking
    above = np.flatnonzero(sizes > low)[:back]
    cut[above] += 1
    return cut


def _starts(sizes: Ids) -> Ids:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _joined(pieces: list[Ids]) -> Parts:
    return Parts(np.concatenate(pieces).astype(np.int64), _starts(np.array([len(piece) for piece in pieces])))
