"""The schedules: complete, free of deadlocks, as small as the papers say, and in the order of torch's."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.errors import InputError
from verbund.mesh.pipeline.schedule import SCHEDULES, Action, actions, bubble, idle, simulate, stages

INTERLEAVED = [name for name in SCHEDULES if name.startswith("interleaved")]
SPLIT = [name for name in SCHEDULES if name.endswith("zero_bubble")]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(SCHEDULES))
    chunks = draw(st.integers(1, 4)) if schedule in INTERLEAVED else 1
    return schedule, draw(st.integers(1, 9)), chunks, draw(st.integers(0, 40))


costs = st.fixed_dictionaries({kind: st.integers(0, 9) for kind in "FBIW"})


@given(pipelines())
@settings(max_examples=300, deadline=None)
def test_each_stage_takes_each_micro_batch_forward_and_backward_once(pipeline: tuple[str, int, int, int]) -> None:
    schedule, ranks, chunks, micro_batches = pipeline
    lists = actions(*pipeline)
    assert len(lists) == ranks
    kinds = "FIW" if schedule in SPLIT else "FB"
    expected = Counter((k, s, m) for k in kinds for s in range(ranks * chunks) for m in range(micro_batches))
    assert Counter(tuple(action) for mine in lists for action in mine) == expected
    assert all(action.stage % ranks == rank for rank, mine in enumerate(lists) for action in mine)
    # Also on its own, a rank never takes a backward pass before its forward pass, nor weights before the input.
    for mine in lists:
        order = {action: number for number, action in enumerate(mine)}
        for action in mine:
            before = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
            assert before is None or order[action] > order[Action(before, *action[1:])]


@given(pipelines(), costs, st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_no_deadlock_and_every_dependency_is_met(
    pipeline: tuple[str, int, int, int], cost: dict[str, int], communicate: int
) -> None:
    schedule, ranks, chunks, _ = pipeline
    last = stages(schedule, ranks, chunks) - 1
    lists = actions(*pipeline)
    timed = simulate(lists, lambda action: cost[action.kind], communicate)
    assert len(timed) == sum(map(len, lists))
    forward = {t.action[1:]: t for t in timed if t.action.kind == "F"}
    backward = {t.action[1:]: t for t in timed if t.action.kind in "BI"}
    for rank, (kind, stage, micro_batch), start, end in timed:
        assert end - start == cost[kind]
        if kind == "F":
            needs = [forward[stage - 1, micro_batch]] if stage else []
        elif kind == "W":
            needs = [backward[stage, micro_batch]]
        else:
            needs = [forward[stage, micro_batch]]
            needs += [backward[stage + 1, micro_batch]] if stage < last else []
        for need in needs:
            assert start >= need.end + (communicate if need.rank != rank else 0)
    for rank, mine in enumerate(lists):
        assert [t.action for t in timed if t.rank == rank] == mine
        times = [(t.start, t.end) for t in timed if t.rank == rank]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))


@given(pipelines())
@settings(max_examples=200, deadline=None)
def test_messages_of_a_kind_are_sent_in_the_order_in_which_they_are_taken(pipeline: tuple[str, int, int, int]) -> None:
    schedule, ranks, chunks, _ = pipeline
    last = stages(schedule, ranks, chunks) - 1
    sent, taken = defaultdict(list), defaultdict(list)  # by kind, sender, receiver: of which stage and micro-batch
    for rank, mine in enumerate(actions(*pipeline)):
        for kind, stage, micro_batch in mine:
            if kind == "W":
                continue
            back = kind != "F"
            before, after = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
            if 0 <= after <= last:
                sent[back, rank, after % ranks].append((stage, micro_batch))
            if 0 <= before <= last:
                taken[back, before % ranks, rank].append((before, micro_batch))
    assert sent == taken


def held_at_most(lists: Sequence[Sequence[Action]]) -> list[int]:
    """Per rank, of how many forward passes it holds the activations at most. With several chunks each stage counts."""
    peaks = []
    for mine in lists:
        held = peak = 0
        for action in mine:
            held += {"F": 1, "I": 0}.get(action.kind, -1)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


@given(pipelines())
@settings(max_examples=200, deadline=None)
def test_activations_held_at_once_are_bounded(pipeline: tuple[str, int, int, int]) -> None:
    schedule, ranks, chunks, micro_batches = pipeline
    held = held_at_most(actions(*pipeline))
    longest = -(-micro_batches // max(1, micro_batches // ranks))  # of a round
    for rank, count in enumerate(held):
        away = ranks - rank
        if schedule == "gpipe":
            assert count == micro_batches
        elif schedule == "1f1b" or (schedule == "interleaved" and chunks == 1):
            assert count == min(away, micro_batches)
        elif schedule == "interleaved":
            assert count == min((chunks - 1) * longest + 2 * away - 1, chunks * micro_batches)
        elif schedule == "zero_bubble":  # as much as 1F1B's first rank
            assert count == min(ranks, micro_batches)
        else:
            assert count == min((chunks - 1) * longest + ranks, chunks * micro_batches)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 17, 32])
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_bubbles_of_gpipe_and_1f1b_are_the_papers(ranks: int, micro_batches: int, backward: int) -> None:
    expected = Fraction(ranks - 1, micro_batches + ranks - 1)
    for schedule in ("gpipe", "1f1b"):
        assert bubble(schedule, ranks, 1, micro_batches, backward=backward) == pytest.approx(float(expected))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("over", [0, 1, 2])
def test_interleaving_divides_the_idle_time_by_the_chunks(ranks: int, chunks: int, rounds: int, over: int) -> None:
    micro_batches = rounds * ranks + min(over, ranks - 1)
    idle_per_work = Fraction(ranks - 1, chunks * micro_batches)  # of the paper, section 2.2
    assert bubble("interleaved", ranks, chunks, micro_batches) == pytest.approx(
        float(idle_per_work / (1 + idle_per_work))
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("weights", [1, 2])
def test_the_idle_time_of_zero_bubble_is_the_papers(ranks: int, times: int, weights: int) -> None:
    """(p-1)(F+I-W), where 1F1B idles for (p-1)(F+I+W), as long as W is not longer than F and I together."""
    micro_batches = times * ranks
    cost = {"F": 2.0, "I": 2.0, "W": float(weights)}
    timed = simulate(actions("zero_bubble", ranks, 1, micro_batches), lambda action: cost[action.kind])
    length = max(t.end for t in timed)
    assert length - micro_batches * sum(cost.values()) == pytest.approx((ranks - 1) * (4 - weights))
    assert bubble("zero_bubble", ranks, 1, micro_batches) < bubble("1f1b", ranks, 1, micro_batches)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4, 7, 8, 19])
def test_both_together_are_better_than_either(ranks: int, chunks: int, micro_batches: int) -> None:
    both = bubble("interleaved_zero_bubble", ranks, chunks, micro_batches)
    assert both <= bubble("zero_bubble", ranks, 1, micro_batches) + 1e-9
    assert both < bubble("interleaved", ranks, chunks, micro_batches)


def test_costs_per_stage_and_of_messages() -> None:
    # One micro-batch goes through both stages and back: 1 + 3 + 6 + 2, and a message each way.
    assert bubble("1f1b", 2, 1, 1, [1.0, 3.0], [2.0, 6.0]) == pytest.approx(1 - 12 / (2 * 12))
    assert bubble("1f1b", 2, 1, 1, [1.0, 3.0], [2.0, 6.0], 2.0) == pytest.approx(1 - 12 / (2 * 16))
    assert bubble("1f1b", 1, 1, 3, communicate=100.0) == 0.0
    assert bubble("1f1b", 4, 1, 0) == 0.0
    assert idle([], 4) == 0.0


def test_a_deadlock_is_told() -> None:
    lists = actions("1f1b", 2, 1, 2)
    lists[1].reverse()
    with pytest.raises(ValueError, match="rank 0 at B of stage 0, micro-batch 0; rank 1 at B of stage 1"):
        simulate(lists, lambda action: 1.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("2f2b", 2, 1, 4), "no pipeline schedule `2f2b`"),
        (("1f1b", 2, 2, 4), "one stage a rank, not 2"),
        (("1f1b", 0, 1, 4), "0 ranks"),
        (("interleaved", 2, 0, 4), "0 stages each"),
        (("1f1b", 2, 1, -1), "-1 micro-batches"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        actions(*arguments)


# -- against torch's ---------------------------------------------------------------------------------------------------


def _torch_order(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """The order of torch's schedule of that name, without its process groups."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    names = {
        "1f1b": "ScheduleInterleaved1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zero_bubble": "ScheduleInterleavedZeroBubble",
        "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    }
    made = object.__new__(getattr(schedules, names[schedule]))
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, chunks, micro_batches
    made.number_of_rounds = max(1, micro_batches // ranks)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            Action(letters[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in made._calculate_single_rank_operations(rank)
            if action is not None
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "interleaved_zero_bubble"])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (3, 3), (4, 1), (8, 2)])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_the_order_is_torchs(schedule: str, ranks: int, chunks: int, times: int) -> None:
    chunks = chunks if schedule in INTERLEAVED else 1
    if schedule == "interleaved" and chunks == 1:
        return  # torch's gets further ahead than 1F1B there, for nothing
    for micro_batches in {times * ranks, times * (ranks + 1), math.ceil(ranks / 2)}:
        if micro_batches % max(1, micro_batches // ranks) == 0:
            expected = _torch_order(schedule, ranks, chunks, micro_batches)
            assert actions(schedule, ranks, chunks, micro_batches) == expected
