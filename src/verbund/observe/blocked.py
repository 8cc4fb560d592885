"""Where, in the time a worker was blocked by others, waiting ends and communicating begins. No torch.

A collective can begin to move data when the last worker has come to it, and a message when its sender has computed it.
What a worker spends blocked before that moment is waiting, and it is charged to the one who came last; what it spends
blocked afterwards is communicating. (The same split is used by, e.g., Holistic Trace Analysis and Scalasca's patterns
"wait at barrier" and "late sender": Geimer et al., "The Scalasca performance toolset architecture", 2010.)

All functions take the rows of an island's workers, and return per worker rows of shape [n, 5]: step, blocked, split,
done, and the number of the worker that came last. Where that is not known, it is `UNKNOWN` and nothing counts as
waiting.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verbund.observe.events import ACTIONS, PART_BITS, RANK_BITS
from verbund.observe.journal import MICRO_BATCH_BITS, STAGE_BITS, Ints

UNKNOWN = -1
_FORWARD = ACTIONS.index("F")


def in_collectives(rows: list[Ints], comparable: bool) -> list[Ints]:
    """Of collectives.

    Args:
        rows: per worker, shape [collectives, 5].
        comparable: whether the workers' clocks are the same.
    """
    sizes = [len(r) for r in rows]
    every = np.concatenate(rows) if rows else np.empty((0, 5), np.int64)
    total = len(every)
    if total == 0:
        return [np.empty((0, 5), np.int64) for _ in rows]
    worker = np.repeat(np.arange(len(rows)), sizes)
    order, first = _groups(every[:, 0], every[:, 1])
    starts = np.flatnonzero(first)
    counts = np.diff(np.append(starts, total))
    group = np.cumsum(first) - 1
    arrival, owner = every[order, 2], worker[order]
    latest = np.maximum.reduceat(arrival, starts)
    # Of several that came last at once, the first row counts.
    at_last = np.flatnonzero(arrival == latest[group])
    _, which = np.unique(group[at_last], return_index=True)
    some = every[order[starts], 1] >> PART_BITS >> RANK_BITS
    members = np.where(some > 0, some, len(rows))
    came_last = np.where(counts == members, owner[at_last[which]], UNKNOWN)
    split, last = np.empty(total, np.int64), np.empty(total, np.int64)
    split[order], last[order] = latest[group], came_last[group]
    return np.split(_rows(every[:, 0], every[:, 3], split, every[:, 4], last, comparable), np.cumsum(sizes)[:-1])


def in_receives(receives: list[Ints], actions: list[Ints], comparable: bool) -> list[Ints]:
    """Of messages between the stages of pipelines.

    Args:
        receives: per worker, shape [receives, 5].
        actions: per worker, shape [actions, 6].
        comparable: whether the workers' clocks are the same.
    """
    line = lines(actions)
    worker = np.repeat(np.arange(len(actions)), [len(rows) for rows in actions])
    every = np.concatenate(actions) if actions else np.empty((0, 6), np.int64)
    step, kind, stage, micro_batch, start, length = every.T
    keys = _keys(step, stage, micro_batch, kind != _FORWARD)
    ends = np.stack((start + length, worker), axis=1)
    sent = kind != ACTIONS.index("W")
    result = []
    for number, mine in enumerate(receives):
        step, stage, micro_batch, begin, done = mine.T
        own = (worker == number) & (kind == _FORWARD)
        began = _find(keys[own], start[own], _keys(step, stage, micro_batch, False))
        # What was received before the forward pass was its input; what came after it, a gradient.
        backward = (began != UNKNOWN) & (done > began)
        neighbour = np.where(backward, stage + 1, stage - 1)
        among = sent & (line[worker] == line[number])
        end, last = _find(keys[among], ends[among], _keys(step, neighbour, micro_batch, backward)).T
        result.append(_rows(step, begin, end, done, np.where(neighbour < 0, UNKNOWN, last), comparable))
    return result


def lines(actions: list[Ints]) -> Ints:
    """Which of an island's pipelines each worker belongs to; `UNKNOWN` for one without actions.

    With other axes beside the pipeline several workers have the same stages. Ranks are numbered along the axes, so the
    n-th workers that have each stage make up the n-th pipeline.
    """
    found = np.full(len(actions), UNKNOWN, np.int64)
    having: dict[int, int] = {}
    for number, rows in enumerate(actions):
        if len(rows):
            first = int(rows[:, 2].min())
            found[number] = having.get(first, 0)
            having[first] = having.get(first, 0) + 1
    return found


def _rows(step: Ints, begin: Ints, split: Ints, done: Ints, last: Ints, comparable: bool) -> Ints:
    known = (last != UNKNOWN) & comparable
    split = np.where(known, np.clip(split, begin, done), begin)
    return np.stack((step, begin, split, done, last), axis=1)


def _groups(step: Ints, index: Ints) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """An order that brings rows of the same collective together, and where in it each collective begins."""
    width = int(index.max()) + 1
    if int(step.max()) < (1 << 62) // width:
        key = step * width + index
        order = np.argsort(key, kind="stable")
        key = key[order]
        return order, np.append(True, key[1:] != key[:-1])
    order = np.lexsort((index, step))
    step, index = step[order], index[order]
    return order, np.append(True, (step[1:] != step[:-1]) | (index[1:] != index[:-1]))


def _keys(step: Ints, stage: Ints, micro_batch: Ints, gradient: NDArray[np.bool_] | bool) -> Ints:
    """One number for each; the journal's reader keeps them small enough."""
    place = (step << STAGE_BITS | np.maximum(stage, 0)) << MICRO_BATCH_BITS | micro_batch
    keys: Ints = place << 1 | np.asarray(gradient, np.int64)
    return keys


def _find(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The values of the keys that are wanted; `UNKNOWN` where there is none."""
    if not len(keys):
        return np.full((len(wanted), *values.shape[1:]), UNKNOWN, np.int64)
    order = np.argsort(keys, kind="stable")
    at = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    found: Ints = values[at]
    found[keys[at] != wanted] = UNKNOWN
    return found
