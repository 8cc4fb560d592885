"""Running statistics over groups, and statistics over the whole global batch, against one process's BatchNorm."""

from __future__ import annotations

import copy
import os
import threading
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from verbund.comm.collectives import Group
from verbund.errors import TaskError
from verbund.mesh.batch_statistics import BufferDeltas, has_batch_statistics, synchronise
from verbund.mesh.changing_buffers import changing, persistent

pytestmark = pytest.mark.usefixtures("one_thread")


class Workers:
    """Threads that stand for workers, with an all-reduce in the order of their ranks."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._meeting = threading.Barrier(world, timeout=20)
        self._parts: dict[int, Tensor] = {}
        self.calls = 0

    def all_reduce(self, rank: int) -> Callable[[Tensor], None]:
        def reduce(tensor: Tensor) -> None:
            assert tensor.dtype == torch.float64
            self._parts[rank] = tensor.clone()
            self._meeting.wait()
            total = sum(self._parts[r] for r in range(self._world))
            self.calls += rank == 0
            self._meeting.wait()
            tensor.copy_(total)

        return reduce

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def target(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors[rank] = error
                self._meeting.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self._world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors.values():
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors
        return [results[rank] for rank in range(self._world)]


SHAPES: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (11, 4)),
    "1d with length": (nn.BatchNorm1d, (11, 4, 5)),
    "2d": (nn.BatchNorm2d, (11, 4, 3, 2)),
    "3d": (nn.BatchNorm3d, (11, 4, 2, 3, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"eps": 1e-2, "momentum": 0.7},
]


def samples(shape: tuple[int, ...], seed: int = 0, mean: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[1], generator=generator, dtype=torch.float64).view([1, -1] + [1] * (len(shape) - 2))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * (scale + 0.3) + mean


def network(kind: Callable[..., nn.Module], options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(kind(4, **options), nn.Tanh(), kind(4, **options)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def alone(model: nn.Module, steps: list[Tensor]) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """Outputs and gradients of one process that sees whole global batches."""
    found = []
    for x in steps:
        model.zero_grad()
        x = x.clone().requires_grad_()
        y = model(x)
        (y * cotangent(y)).sum().backward()
        found.append((y.detach(), x.grad, [p.grad.clone() for p in model.parameters()]))
    return found


def cotangent(y: Tensor) -> Tensor:
    return torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)


def shared(
    model: nn.Module, steps: list[Tensor], bounds: list[tuple[int, int]], workers: Workers, rank: int
) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """What one worker sees of the same; one without samples joins with a sample of weight 0."""
    low, high = bounds[rank]
    synchronised = synchronise(model, workers.all_reduce(rank))
    found = []
    for x in steps:
        model.zero_grad()
        phantom = low == high
        mine = (torch.full_like(x[:1], 1e3) if phantom else x[low:high].clone()).requires_grad_()
        synchronised.set_weights(torch.zeros(1) if phantom else None)
        y = model(mine)
        g = cotangent(torch.empty((len(x), *y.shape[1:]), dtype=y.dtype))[low:high]
        (y.sum() * 0.0 if phantom else (y * g).sum()).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        found.append((y.detach()[: high - low], mine.grad[: high - low], grads))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bounds", [[(0, 6), (6, 11)], [(0, 1), (1, 1), (1, 11)]], ids=["two", "three, one idle"])
def test_global_statistics_are_one_processs(shape: str, options: dict[str, Any], bounds: list[tuple[int, int]]) -> None:
    kind, size = SHAPES[shape]
    steps = [samples(size, seed) for seed in range(3)]
    reference = network(kind, options)
    models = [copy.deepcopy(reference) for _ in bounds]
    expected = alone(reference, steps)
    workers = Workers(len(bounds))
    results = workers.run(lambda rank: shared(models[rank], steps, bounds, workers, rank))
    for step, (y, of_x, of_parameters) in enumerate(expected):
        outputs = torch.cat([result[step][0] for result in results])
        torch.testing.assert_close(outputs, y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(torch.cat([r[step][1] for r in results]), of_x, rtol=1e-10, atol=1e-10)
        for index, gradient in enumerate(of_parameters):
            total = sum(result[step][2][index] for result in results)
            torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10)
    assert workers.calls == 3 * 2 * 2  # per layer one in the forward, one in the backward pass
    for model in models:
        for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)
        model.eval()
        reference.eval()
        assert torch.equal(model(steps[0]), models[0](steps[0]))
        torch.testing.assert_close(model(steps[0]), reference(steps[0]), rtol=1e-10, atol=1e-10)
        reference.train()
    assert workers.calls == 12, "evaluation sends nothing"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=3), st.floats(-1e3, 1e3), st.integers(0, 100))
def test_any_shares(sizes: list[int], mean: float, seed: int) -> None:
    total = sum(sizes)
    if total < 2:
        sizes, total = [2, *sizes[1:]], 2 + sum(sizes[1:])
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    bounds = list(pairwise(edges))
    steps = [samples((total, 4, 2), seed, mean)]
    reference = network(nn.BatchNorm1d, {})
    models = [copy.deepcopy(reference) for _ in bounds]
    (y, of_x, _) = alone(reference, steps)[0]
    workers = Workers(len(bounds))
    results = workers.run(lambda rank: shared(models[rank], steps, bounds, workers, rank))
    torch.testing.assert_close(torch.cat([r[0][0] for r in results]), y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([r[0][1] for r in results]), of_x, rtol=1e-8, atol=1e-8)


def test_a_large_mean_does_not_cancel_in_float32() -> None:
    x = (samples((64, 4), mean=0.0) + 3000.0).float()
    stock = nn.BatchNorm1d(4)
    models = [copy.deepcopy(stock) for _ in range(2)]
    workers = Workers(2)

    def work(rank: int) -> Tensor:
        synchronise(models[rank], workers.all_reduce(rank))
        return models[rank](x[rank * 32 : rank * 32 + 32]).detach()

    exact = (x.double() - x.double().mean(0)) / (x.double().var(0, correction=0) + 1e-5).sqrt()
    error = (torch.cat(workers.run(work)).double() - exact).abs().max()
    assert float(error) < 1.5 * float((stock(x).detach().double() - exact).abs().max()) + 1e-6


def test_per_sample_weights_cover_several_rows_of_a_sample() -> None:
    """Rows k·B, each sample's together: samples of weight 0 enter no statistic."""
    model = nn.BatchNorm1d(4).double()
    expected = nn.BatchNorm1d(4).double()
    x = samples((6, 4)).requires_grad_()
    kept = x.detach()[[0, 1, 4, 5]].requires_grad_()
    synchronise(model, lambda _: None).set_weights(torch.tensor([1.0, 0.0, 1.0]))
    y, z = model(x), expected(kept)
    torch.testing.assert_close(y[[0, 1, 4, 5]], z)
    torch.testing.assert_close(model.running_var, expected.running_var)
    g = cotangent(z)
    (y[[0, 1, 4, 5]] * g).sum().backward()
    (z * g).sum().backward()
    torch.testing.assert_close(x.grad[[0, 1, 4, 5]], kept.grad)
    assert float(x.grad[2:4].abs().max()) == 0.0


def test_the_gradient_is_the_derivative() -> None:
    model = nn.BatchNorm2d(3).double()
    synchronise(model, lambda _: None)
    x = samples((4, 3, 2, 2)).requires_grad_()
    assert torch.autograd.gradcheck(model, (x,))


def test_one_value_per_channel_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    synchronise(model, lambda _: None)
    with pytest.raises(TaskError, match=r"`0`.*one value per channel"):
        model(torch.zeros(1, 4))


def test_half_precision_is_normalised_in_float32() -> None:
    x = samples((64, 4)).bfloat16()
    model = nn.BatchNorm1d(4)
    synchronise(model, lambda _: None)
    y = model(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), nn.BatchNorm1d(4)(x.float()), rtol=0.01, atol=0.01)


def test_over_gloo_processes(tmp_path: Path) -> None:
    """The same over real collectives, with forked workers of 5, 0 and 3 samples."""
    bounds = [(0, 5), (5, 5), (5, 8)]
    steps = [samples((8, 4, 3), seed) for seed in range(2)]
    reference = network(nn.BatchNorm1d, {})
    start = copy.deepcopy(reference)
    expected = alone(reference, steps)

    def work(rank: int) -> None:
        group = Group(tmp_path / "store", rank, 3, torch.device("cpu"), 20.0)
        workers = Workers(1)
        workers.all_reduce = lambda _: lambda tensor: group.all_reduce(tensor, "the test")  # type: ignore[method-assign]
        low, high = bounds[rank]
        for (y, of_x, _), (whole_y, whole_x, _) in zip(
            shared(start, steps, bounds, workers, rank), expected, strict=True
        ):
            torch.testing.assert_close(y, whole_y[low:high], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(of_x, whole_x[low:high], rtol=1e-10, atol=1e-10)
        for ours, theirs in zip(start.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0, 0, 0]


# -- running statistics over groups ----------------------------------------------------------------------------------


class Codebook(nn.Module):
    """State of its own: a moving average and a counter, next to constants."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.2)
        self.register_buffer("average", torch.ones(3, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("mask", torch.ones(300, 300).tril())
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().double().mean(0), alpha=0.1)
        self.seen.fill_(True)
        self.cache = torch.zeros(len(x))
        return self.norm(x) * self.mask[0, 0]


def by_hand(groups: list[Tensor], momentum: float) -> dict[str, Tensor]:
    """The weighted mean of what each group alone makes of the start values."""
    n = sum(map(len, groups))
    mean = sum(len(g) * (momentum * g.mean(0)) for g in groups) / n
    var = sum(len(g) * ((1 - momentum) + momentum * g.var(0)) for g in groups) / n
    average = sum(len(g) * (0.9 + 0.1 * g.double().mean(0)) for g in groups) / n
    return {"norm.running_mean": mean, "norm.running_var": var, "average": average}


@pytest.mark.parametrize("division", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2, 3], []], [[], [0, 1, 2], [3]]])
def test_running_statistics_do_not_depend_on_the_division(division: list[list[int]]) -> None:
    data = samples((25, 3)).float()
    groups = [data[:7], data[7:14], data[14:21], data[21:]]
    models = [Codebook() for _ in division]
    deltas = [BufferDeltas(model) for model in models]
    assert {d.size for d in deltas} == {3 + 3 + 1 + 3 + 1}
    for step in range(2):
        start = [{k: v.clone() for k, v in m.named_buffers()} for m in models]
        for model, delta, mine in zip(models, deltas, division, strict=True):
            delta.begin(first=0 in mine)
            for group in mine:
                model(groups[group])
                delta.add(len(groups[group]))
        total = sum(delta.flat().clone() for delta in deltas)
        assert isinstance(total, Tensor)
        for delta in deltas:
            delta.apply(total, 25)
        for model in models:
            for name, value in models[0].state_dict().items():
                assert torch.equal(model.state_dict()[name], value), name
            assert int(model.norm.num_batches_tracked) == step + 1
            assert model.seen.dtype == torch.bool
            assert bool(model.seen)
            if step == 0:
                for name, value in by_hand(groups, 0.2).items():
                    found = model.get_buffer(name)
                    torch.testing.assert_close(found, value.to(found.dtype), rtol=1e-5, atol=1e-6)
            else:
                assert not torch.equal(model.average, start[0]["average"])


def test_one_pass_is_what_the_module_does() -> None:
    ours, stock = Codebook(), Codebook()
    deltas = BufferDeltas(ours)
    for seed in range(3):
        x = samples((9, 3), seed).float()
        deltas.begin(first=True)
        ours(x)
        deltas.add(9)
        deltas.apply(deltas.flat().clone(), 9)
        stock(x)
    for (name, a), b in zip(ours.state_dict().items(), stock.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)


def test_a_weightless_pass_changes_nothing() -> None:
    model = Codebook()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deltas = BufferDeltas(model)
    deltas.begin(first=False)
    model(torch.full((4, 3), 1e6))
    deltas.add(0)
    assert float(deltas.flat().abs().max()) == 0.0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_replaced_buffer_is_followed() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(70_000))

        def forward(self, x: Tensor) -> Tensor:
            self.average = self.average * 0.5 + x.mean()
            return x

    model = Replacing()
    deltas = BufferDeltas(model)
    assert deltas.size == 70_000
    deltas.begin(first=True)
    for value in (2.0, 4.0):
        model(torch.full((3,), value))
        deltas.add(3)
    deltas.apply(deltas.flat(), 6)
    assert torch.equal(model.average, torch.full((70_000,), 3.0))


def test_complex_buffers_and_their_shape() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
            self.grow = False

        def forward(self, x: Tensor) -> None:
            self.phase.mul_(1j)
            if self.grow:
                self.phase = torch.ones(3, dtype=torch.complex64)

    model = Model()
    deltas = BufferDeltas(model)
    deltas.begin(first=True)
    model(torch.zeros(1))
    deltas.add(1)
    deltas.apply(deltas.flat(), 1)
    torch.testing.assert_close(model.phase, torch.full((2,), 1j, dtype=torch.complex64))
    model.grow = True
    model(torch.zeros(1))
    with pytest.raises(TaskError, match="`phase` changed its shape"):
        deltas.add(1)


def test_a_change_from_outside_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("moved", torch.zeros(2))
    deltas = BufferDeltas(model)
    assert deltas.size == 0
    deltas.begin(first=True)
    model[0].moved.add_(1)
    with pytest.raises(TaskError, match=r"`0\.moved` changes in training"):
        deltas.add(2)


def names(model: nn.Module) -> set[str]:
    return {buffer.name for buffer in changing(model)}


def test_which_buffers_change() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key in ("table", "rows", "chained", "masked", "own"):
                self.register_buffer(key, torch.zeros(70_000))
            self.table.fill_(1.0)

        def forward(self, x: Tensor) -> Tensor:
            self.rows[0] = x.sum()
            self.chained.data.lerp_(x.mean(), 0.1)
            y = x.masked_fill(self.masked[:1] > 0, 0.0)
            return y.add_(1) + self.table[0]

        def update(self) -> None:
            self.own += 1

    assert names(Large()) == {"rows", "chained", "own"}
    assert names(nn.BatchNorm1d(3)) == {"running_mean", "running_var", "num_batches_tracked"}
    assert names(nn.BatchNorm1d(3, track_running_stats=False)) == set()
    assert names(nn.InstanceNorm1d(3, track_running_stats=True)) == names(nn.BatchNorm1d(3))
    assert names(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))) == {
        "parametrizations.weight.0._u",
        "parametrizations.weight.0._v",
    }
    assert names(nn.utils.spectral_norm(nn.Linear(3, 3))) == {"weight_u", "weight_v"}
    assert names(nn.TransformerEncoderLayer(8, 2, 8)) == set()
    tied = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    tied[1] = tied[0]
    assert len(persistent(tied)) == 3


def test_has_batch_statistics() -> None:
    assert has_batch_statistics(nn.Sequential(nn.BatchNorm2d(3)))
    assert has_batch_statistics(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))
    assert has_batch_statistics(nn.SyncBatchNorm(3))
    assert has_batch_statistics(nn.Sequential(nn.BatchNorm2d(3)).eval())
    assert not has_batch_statistics(nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.LayerNorm(3)))
    frozen = nn.Sequential(nn.BatchNorm2d(3))
    frozen[0].eval()
    assert not has_batch_statistics(frozen)


def test_no_buffers_cost_nothing() -> None:
    deltas = BufferDeltas(nn.Linear(3, 3))
    assert deltas.size == 0
    deltas.begin(first=True)
    deltas.add(3)
    assert deltas.flat().shape == (0,)
    deltas.apply(deltas.flat(), 3)
