"""Who computes which micro-batch when: the schedules of pipeline parallelism as pure functions. No torch.

A model's layers are cut into stages; stage `s` lives on rank `s % ranks`, so that with several chunks a rank holds
every `ranks`-th stage. All schedules are one rule with three settings. A rank goes through its forward passes and
through its backward passes in fixed orders; it takes the next forward pass as long as it holds fewer activations
than its *depth*, and else the next backward pass.

    gpipe                   no depth: all forward passes first (Huang et al., "GPipe", 2019)
    1f1b                    depth `ranks - rank` (Narayanan et al., "Memory-efficient pipeline-parallel DNN
                            training", 2021: PipeDream-Flush)
    interleaved             several chunks; ranks get twice as far ahead of the last (Narayanan et al., "Efficient
                            large-scale language model training on GPU clusters", 2021, section 2.2)
    zero_bubble             backward passes in two halves; the one for the weights, on which nobody waits, comes
                            `rank` micro-batches later and fills the gaps (Qi et al., "Zero bubble pipeline
                            parallelism", 2024: ZB-H1)
    interleaved_zero_bubble  both
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from verbund.errors import InputError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble")
_INTERLEAVED = ("interleaved", "interleaved_zero_bubble")
_SPLIT = ("zero_bubble", "interleaved_zero_bubble")


class Action(NamedTuple):
    """What a rank does with one micro-batch in one of its stages.

    Args:
        kind: `F` forward, `B` backward, `I` backward for the input only, `W` backward for the weights only.
        stage: of all ranks' stages, from 0.
        micro_batch: its number in the step, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


class Timed(NamedTuple):
    """An action with the rank that takes it and its moments."""

    rank: int
    action: Action
    start: float
    end: float


Costs = float | Sequence[float]
"""Of any stage, or per stage."""


def stages(schedule: str, ranks: int, chunks: int) -> int:
    """The number of stages that the layers are cut into: `chunks` on each rank.

    Raises:
        InputError: if there is no such schedule, or it takes one stage a rank only.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"there is no pipeline schedule `{schedule}`", fix=f"Take one of {', '.join(SCHEDULES)}")
    if ranks < 1 or chunks < 1:
        raise InputError(f"a pipeline of {ranks} ranks with {chunks} stages each cannot be", fix="Take 1 or more")
    if chunks > 1 and schedule not in _INTERLEAVED:
        fix = f"Take 1, or one of the schedules {' and '.join(_INTERLEAVED)}"
        raise InputError(f"the pipeline schedule `{schedule}` has one stage a rank, not {chunks}", fix=fix)
    return ranks * chunks


def actions(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does in one step, in order.

    Executing each list in order, with receives that block and sends that do not, never ends in a deadlock, for any
    number of micro-batches. From one rank to another, outputs are sent in the order in which they are taken, and so are
    gradients; between two ranks with several chunks both flow the same way, and then only each kind for itself.
    """
    stages(schedule, ranks, chunks)
    if micro_batches < 0:
        raise InputError(f"{micro_batches} micro-batches cannot be", fix="Take 0 or more")
    return [_of_rank(schedule, ranks, chunks, micro_batches, rank) for rank in range(ranks)]


def bubble(
    schedule: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    forward: Costs = 1.0,
    backward: Costs = 2.0,
    communicate: float = 0.0,
) -> float:
    """The share of the ranks' time in which they have nothing to do.

    Args:
        forward, backward: what a micro-batch takes in a stage. A backward pass for the input only and one for the
            weights only take half of `backward` each.
        communicate: what a tensor takes from one rank to another.
    """

    def cost(action: Action) -> float:
        of = forward if action.kind == "F" else backward
        taken = of if isinstance(of, (int, float)) else of[action.stage]
        return taken if action.kind in "FB" else taken / 2

    return idle(simulate(actions(schedule, ranks, chunks, micro_batches), cost, communicate), ranks)


def idle(timed: Sequence[Timed], ranks: int) -> float:
    """The share of the ranks' time, from the first start to the last end, in which they do nothing."""
    if not timed:
        return 0.0
    length = max(t.end for t in timed) - min(t.start for t in timed)
    busy = sum(t.end - t.start for t in timed)
    return max(1.0 - busy / (ranks * length), 0.0) if length > 0 else 0.0


def simulate(
    lists: Sequence[Sequence[Action]], cost: Callable[[Action], float], communicate: float = 0.0
) -> list[Timed]:
    """When each action happens if every rank takes its own in order, as early as it can.

    Args:
        lists: per rank, as `actions` gives them.
        cost: what an action takes.
        communicate: what a tensor takes from one rank to another; meanwhile both may compute.

    Returns:
        all actions, by start and rank.

    Raises:
        ValueError: if the ranks wait for one another for ever.
    """
    home = {action.stage: rank for rank, mine in enumerate(lists) for action in mine}
    last = max(home, default=0)
    ends: dict[tuple[str, int, int], float] = {}
    timed: list[Timed] = []
    positions, clocks = [0] * len(lists), [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(lists):
            while positions[rank] < len(mine):
                action = mine[positions[rank]]
                needed = list(_needs(action, last))
                if any(result not in ends for result in needed):
                    break
                arrivals = [ends[r] + (communicate if home[r[1]] != rank else 0.0) for r in needed]
                start = max([clocks[rank], *arrivals])
                clocks[rank] = ends[_result(action)] = start + cost(action)
                timed.append(Timed(rank, action, start, clocks[rank]))
                positions[rank] += 1
                moved = True
    stuck = [f"rank {r} at {mine[at]}" for r, (mine, at) in enumerate(zip(lists, positions, strict=True)) if mine[at:]]
    if stuck:
        raise ValueError(f"the ranks wait for one another: {'; '.join(stuck)}")
    return sorted(timed, key=lambda t: (t.start, t.rank))


def _of_rank(schedule: str, ranks: int, chunks: int, micro_batches: int, rank: int) -> list[Action]:
    forwards, backwards, longest = [], [], 0
    for turn in _rounds(micro_batches, ranks):
        longest = max(longest, len(turn))
        for chunk in range(chunks):
            forwards += [(chunk * ranks + rank, number) for number in turn]
            backwards += [((chunks - 1 - chunk) * ranks + rank, number) for number in turn]
    # With several chunks, the paper lets a rank get further ahead than the bubble needs: messages get time to arrive.
    distance = (ranks - 1 - rank) * (2 if schedule == "interleaved" and chunks > 1 else 1)
    depth = len(forwards) if schedule == "gpipe" else (chunks - 1) * longest + distance + 1
    split = schedule in _SPLIT

    found: list[Action] = []
    taken = weights = 0
    for number, (stage, micro_batch) in enumerate(backwards):
        reach = min(number + depth, len(forwards))
        found += [Action("F", *forward) for forward in forwards[taken:reach]]
        taken = reach
        found.append(Action("I" if split else "B", stage, micro_batch))
        if split and number >= rank:
            found.append(Action("W", *backwards[weights]))
            weights += 1
    found += [Action("W", *backward) for backward in backwards[weights:]] if split else []
    return found


def _rounds(micro_batches: int, ranks: int) -> Iterator[range]:
    """The micro-batches in rounds that go through all chunks together.

    A round that is shorter than the pipeline would leave ranks waiting between two chunks, and for each other; so what
    the rounds of `ranks` micro-batches leave over makes some of them longer instead of a shorter one.
    """
    count = max(1, micro_batches // ranks)
    begin = 0
    for number in range(count):
        end = begin + micro_batches // count + (number < micro_batches % count)
        yield range(begin, end)
        begin = end


def _needs(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
    """The results (see `_result`) without which an action cannot start."""
    kind, stage, micro_batch = action
    if kind == "F":
        if stage > 0:
            yield "output", stage - 1, micro_batch
    elif kind == "W":
        yield "gradient", stage, micro_batch
    else:
        yield "output", stage, micro_batch
        if stage < last:
            yield "gradient", stage + 1, micro_batch


def _result(action: Action) -> tuple[str, int, int]:
    kind = {"F": "output", "W": "weights"}.get(action.kind, "gradient")
    return kind, action.stage, action.micro_batch
