"""Sums over 1 to 4 workers, several steps with error feedback, against plain float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comm.compression.workers import together
from verbund.comm.collectives import Group
from verbund.comm.compression.coded_sums import CodedSums
from verbund.comm.compression.methods import codec
from verbund.comm.compression.power_sgd import PowerSums, shrinks
from verbund.comm.compression.sums import CompressedSums, Tensors
from verbund.job import Compression

SHAPES = {"a": (60, 40), "b": (), "c": (37,), "d": (0,), "e": (8, 5, 3, 3), "f": (1500,)}
STEPS = 6
METHODS = ("fp16", "bf16", "int8", "int4", "sign", "top_k")


def gradient(step: int, rank: int, count: int) -> np.ndarray:
    random = np.random.default_rng([step, rank])
    common = np.random.default_rng(99).normal(size=count) * np.logspace(-2, 1, count)
    return (common + 0.3 * random.normal(size=count)).astype(np.float32).astype(np.float64)


def built(method: Compression, group: Group, stretches: list[Tensors]) -> CompressedSums:
    made = codec(method)
    if made is None:
        return PowerSums(group, stretches, 0, method.rank)
    return CodedSums(group, stretches, 0, made)


@dataclass
class Outcome:
    sums: list[np.ndarray]
    error: np.ndarray
    totals: Any


def run(method: Compression, world: int, folder: Path, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[Outcome]:
    """Two stretches of the same shapes, STEPS steps."""
    count = sum(math.prod(shape) for shape in shapes.values())

    def work(group: Group) -> Outcome:
        stretches = [
            Tensors(torch.zeros(count), [f"{n}{name}" for name in shapes], list(shapes.values())) for n in range(2)
        ]
        sums = built(method, group, stretches)
        found = []
        for step in range(STEPS):
            sums.begin(step, 1.0)
            for number, stretch in enumerate(stretches):
                stretch.flat.copy_(torch.from_numpy(gradient(step + 100 * number, group.rank, count)))
                sums.start(number)
            assert sums.sent()
            sums.finish(True, True, set())
            found.append(np.concatenate([s.flat.numpy().copy() for s in stretches]))
        return Outcome(found, np.concatenate([s.error.double().numpy() for s in stretches]), sums.totals)

    return together(world, folder, work)


# -- by hand ---------------------------------------------------------------------------------------------------


def squeezed(name: str, values: np.ndarray) -> np.ndarray:
    if name == "top_k":
        kept = np.argsort(-np.abs(values))[: round(0.05 * len(values))]
        back = np.zeros_like(values)
        back[kept] = values[kept]
        return back
    if name == "sign":
        blocks = [values[low : low + 256] for low in range(0, len(values), 256)]
        return np.concatenate([np.where(b >= 0, 1, -1) * np.abs(b).mean() for b in blocks])
    raise AssertionError(name)


def by_hand(name: str, world: int, count: int, offset: int) -> list[np.ndarray]:
    """Error feedback as Karimireddy and others have it; sums of sign go the two ways."""
    errors = [np.zeros(count) for _ in range(world)]
    found = []
    chunk = -(-count // (world * 256)) * 256
    for step in range(STEPS):
        sent = [errors[w] + gradient(step + offset, w, count) for w in range(world)]
        ways = (
            [slice(chunk * w, chunk * (w + 1)) for w in range(world)] if name == "sign" and world > 2 else [slice(None)]
        )
        total = np.zeros(count)
        for owner, way in enumerate(ways):
            received = [squeezed(name, values[way]) if len(values[way]) else values[way] for values in sent]
            for w in range(world):
                errors[w][way] = sent[w][way] - received[w]
            total[way] = sum(received)
            if len(ways) > 1 and len(total[way]):
                again = squeezed(name, total[way])
                errors[owner][way] += total[way] - again
                total[way] = again
        found.append(total)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["top_k", "sign"])
def test_several_steps_as_by_hand(name: str, world: int, tmp_path: Path) -> None:
    outcomes = run(Compression.model_validate(name), world, tmp_path)
    count = len(outcomes[0].sums[0]) // 2
    expected = [np.concatenate(pair) for pair in zip(*(by_hand(name, world, count, o) for o in (0, 100)), strict=True)]
    for step in range(STEPS):
        scale = np.abs(expected[step]).max()
        assert np.abs(outcomes[0].sums[step] - expected[step]).max() <= 1e-4 * scale, (step, name)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_power_sgd_as_by_hand(world: int, tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if shrinks(shape, 2, 1.0)}
    assert set(shapes) == {"a", "e"}
    count = sum(math.prod(s) for s in shapes.values())
    firsts: dict[str, np.ndarray] = {}

    def work(group: Group) -> list[np.ndarray]:
        stretch = Tensors(torch.zeros(count), list(shapes), list(shapes.values()))
        sums = PowerSums(group, [stretch], 3, 2)
        if group.rank == 0:
            firsts.update({name: q.t().double().numpy().copy() for name, q in sums.warm().items()})
        found = []
        for step in range(STEPS):
            sums.begin(step, 1.0)
            stretch.flat.copy_(torch.from_numpy(gradient(step, group.rank, count)))
            sums.start(0)
            sums.sent()
            sums.finish(True, True, set())
            found.append(stretch.flat.numpy().copy())
        return found

    results = together(world, tmp_path, work)
    error = np.zeros(count)
    q = dict(firsts)
    for step in range(STEPS):
        m = error + sum(gradient(step, w, count) for w in range(world))
        total, at = np.zeros(count), 0
        for name, shape in shapes.items():
            part = slice(at, at + math.prod(shape))
            at = part.stop
            matrix = m[part].reshape(shape[0], -1)
            p = np.linalg.qr(matrix @ q[name])[0]
            q[name] = matrix.T @ p
            total[part] = (p @ q[name].T).ravel()
        error = m - total
        assert np.abs(results[0][step] - total).max() <= 1e-4 * np.abs(total).max()
        assert all(np.array_equal(results[0][step], other[step]) for other in results)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*METHODS, "power_sgd"])
def test_nothing_is_lost_and_all_have_the_same_bits(name: str, world: int, tmp_path: Path) -> None:
    """What came and what is still kept add up to what all workers had."""
    shapes = {"a": (60, 40), "e": (8, 5, 3, 3)} if name == "power_sgd" else SHAPES
    outcomes = run(Compression.model_validate(name), world, tmp_path, shapes)
    count = len(outcomes[0].error) // 2
    had = sum(
        np.concatenate([gradient(step, w, count), gradient(step + 100, w, count)])
        for step in range(STEPS)
        for w in range(world)
    )
    came = sum(sums.astype(np.float64) for sums in outcomes[0].sums)
    kept = sum(outcome.error for outcome in outcomes)
    assert np.abs(came + kept - had).max() <= 2e-5 * np.abs(had).max()
    for outcome in outcomes[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(outcomes[0].sums, outcome.sums, strict=True))
    if world > 1:
        totals = outcomes[0].totals
        assert totals.steps == STEPS
        assert totals.bytes_without > 1.5 * totals.bytes_with or name == "power_sgd"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["int8", "top_k", "power_sgd"])
def test_a_step_that_is_not_taken_changes_nothing(name: str, world: int, tmp_path: Path) -> None:
    shapes = {"a": (60, 40)}

    def work(group: Group) -> tuple[list[torch.Tensor], bool, bool]:
        stretch = Tensors(torch.zeros(2400), list(shapes), list(shapes.values()))
        sums = built(Compression.model_validate(name), group, [stretch])
        kept = []
        for step, (take, finite) in enumerate([(True, True), (False, True), (True, False), (True, True)]):
            sums.begin(step, 1.0)
            stretch.flat.copy_(torch.from_numpy(gradient(0 if finite else 5, group.rank, 2400)))
            if not finite and group.rank == 1:
                stretch.flat[7] = math.inf
            sums.start(0)
            assert sums.sent() == (finite or group.rank != 1)
            sums.finish(take, finite, set())
            assert finite or stretch.flat.isnan().all()
            kept.append(stretch.error.clone())
        return kept, torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2]), torch.equal(kept[0], kept[3])

    for _, same, still in together(world, tmp_path, work):
        assert same
        assert not still


@pytest.mark.parametrize("name", ["int8", "sign", "top_k", "power_sgd"])
def test_what_nobody_used_keeps_all_of_its_error(name: str, tmp_path: Path) -> None:
    shapes: dict[str, Sequence[int]] = {"a": (30, 40), "b": (40, 30)}

    def work(group: Group) -> None:
        stretch = Tensors(torch.zeros(2400), list(shapes), [tuple(s) for s in shapes.values()])
        sums = built(Compression.model_validate(name), group, [stretch])
        for step, unused in enumerate([set(), {"b"}]):
            sums.begin(step, 1.0)
            stretch.flat.copy_(torch.from_numpy(gradient(step, group.rank, 2400)))
            before = stretch.error.clone()
            if unused:
                stretch.flat[1200:] = 0
            sums.start(0)
            sums.sent()
            sums.finish(True, True, unused)
        assert torch.equal(stretch.error[1200:], before[1200:])
        assert not torch.equal(stretch.error[:1200], before[:1200])

    together(2, tmp_path, work)


def test_power_sgd_keeps_only_what_does_not_travel(tmp_path: Path) -> None:
    """Workers whose rows differ, within the same columns: each one's part of Q takes all of it along."""

    def work(group: Group) -> float:
        stretch = Tensors(torch.zeros(40 * 30), ["a"], [(40, 30)])
        sums = PowerSums(group, [stretch], 3, 1)
        draw = np.random.default_rng(1)
        left, mean, apart = draw.normal(size=40), draw.normal(size=30), draw.normal(size=30)
        mine = np.outer(left, mean + (apart if group.rank == 0 else -apart)).ravel()
        for step in range(STEPS):
            sums.begin(step, 1.0)
            stretch.flat.copy_(torch.from_numpy(mine))
            sums.start(0)
            sums.sent()
            sums.finish(True, True, set())
        return float(stretch.error.norm() / np.linalg.norm(mine))

    assert max(together(2, tmp_path, work)) < 1e-4


@pytest.mark.parametrize("name", [*METHODS, "power_sgd"])
def test_a_loss_scale_changes_nothing_else(name: str, tmp_path: Path) -> None:
    """Scales by powers of two: what is kept is kept unscaled."""

    def work(group: Group) -> None:
        found = []
        for scales in ((1.0, 1.0, 1.0), (8.0, 4.0, 16.0)):
            stretch = Tensors(torch.zeros(2400), ["a"], [(60, 40)])
            sums = built(Compression.model_validate(name), group, [stretch])
            for step, scale in enumerate(scales):
                sums.begin(step, scale)
                stretch.flat.copy_(torch.from_numpy(gradient(step, group.rank, 2400))).mul_(scale)
                sums.start(0)
                sums.sent()
                sums.finish(True, True, set())
            found.append((stretch.flat / scale, stretch.error))
        for a, b in zip(*found, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max()))

    together(2, tmp_path, work)


@pytest.mark.parametrize("name", [*METHODS, "power_sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        stretch = Tensors(torch.zeros(2400, dtype=dtype), ["a"], [(60, 40)])
        sums = built(Compression.model_validate(name), group, [stretch])
        came = torch.zeros(2400, dtype=torch.float64)
        for step in range(30):
            sums.begin(step, 1.0)
            stretch.flat.copy_(torch.from_numpy(gradient(0, group.rank, 2400)))
            sums.start(0)
            sums.sent()
            sums.finish(True, True, set())
            came += stretch.flat.double()
        assert stretch.error.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        return came, stretch.error.double()

    found = together(2, tmp_path, work)
    had = 30 * torch.from_numpy(gradient(0, 0, 2400) + gradient(0, 1, 2400))
    (came, kept), (same, more) = found
    # Gradients and sums of bfloat16 are themselves rounded, to one in 256.
    assert float((came + kept + more - had).norm() / had.norm()) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(came, same)
