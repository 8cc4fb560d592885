"""What a model draws depends on the sample, never on how a batch is divided or ordered."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from verbund.errors import TaskError
from verbund.randomness import BatchRandom, SampleRandomness, WorkerRandomness

BATCH = 7


pytestmark = pytest.mark.usefixtures("one_thread")


class Modules(nn.Module):
    """The dropout family as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 24)
        self.drop = nn.Dropout(0.3)
        self.alpha = nn.AlphaDropout(0.2)
        self.d1 = nn.Dropout1d(0.3)
        self.d2 = nn.Dropout2d(0.4)
        self.d3 = nn.Dropout3d(0.4)
        self.feature = nn.FeatureAlphaDropout(0.3)
        self.inplace = nn.Dropout(0.25, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x))
        h = self.alpha(self.drop(h)).view(-1, 4, 6)
        h = self.feature(self.d1(h)).view(-1, 3, 2, 4)
        h = self.d3(self.d2(h).unsqueeze(-1)).flatten(1)
        return self.inplace(h * 1.0)


class Functions(nn.Module):
    """Every function that is replaced, per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        b = len(h)
        h = functional.dropout(h, 0.2)
        h = functional.alpha_dropout(h, 0.2, True)
        h = functional.feature_alpha_dropout(h.view(b, 6, 4), 0.2, True)
        h = functional.dropout1d(h, 0.2)
        h = functional.dropout2d(h.view(b, 6, 2, 2), 0.2)
        h = functional.dropout3d(h.view(b, 6, 2, 2, 1), 0.2).view(b, 24)
        h = torch.dropout(h, 0.1, True)
        h = torch.native_dropout(h, 0.1, True)[0]
        h = functional.rrelu(h, training=True)
        q = h.view(b, 2, 3, 4)
        h = functional.scaled_dot_product_attention(q, q * 0.5, q, dropout_p=0.2, is_causal=True).reshape(b, 24)
        h = h + torch.rand(b, 24, dtype=h.dtype) + torch.randn((b, 1), dtype=h.dtype)
        h = h + torch.rand_like(h) * torch.randn_like(h)
        h = h + torch.randint(0, 9, (b, 24)).to(h.dtype) + torch.randint(3, (b, 1)) + torch.randint_like(h, 2, 5)
        h = h * torch.bernoulli(torch.sigmoid(h.detach())) + torch.full_like(h, 0.3).bernoulli()
        h = h + torch.empty_like(h).uniform_(-1, 2) * torch.empty_like(h).normal_(1.0, 3.0)
        h = h + torch.empty_like(h).exponential_(2.0) + torch.empty_like(h).bernoulli_(0.3)
        h = h + torch.normal(h.detach(), 0.5) + torch.normal(0.0, 1.0, (b, 24), dtype=h.dtype)
        h = h + torch.distributions.Normal(h, torch.ones_like(h)).rsample()
        h = h + functional.gumbel_softmax(h, hard=True) + functional.gumbel_softmax(h)
        # Several rows per sample, each sample's together.
        rows = h.reshape(b * 4, 6)
        return functional.dropout(rows, 0.3).reshape(b, 24) + torch.rand(()) + torch.randn([])


class Attention(nn.Module):
    """torch's transformer layers: attention draws inside functions, the rest in modules."""

    def __init__(self, batch_first: bool = True, need_weights: bool = False) -> None:
        super().__init__()
        self.batch_first, self.need_weights = batch_first, need_weights
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=batch_first)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.2, batch_first=batch_first)
        self.attention = nn.MultiheadAttention(8, 4, dropout=0.3, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([x, x[:, :2]], 1).view(-1, 4, 2).repeat(1, 1, 4)
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.decoder(self.layer(h), h)
        h = self.attention(h, h, h, need_weights=self.need_weights)[0]
        return (h if self.batch_first else h.transpose(0, 1)).flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.rnn = kind(2, 5, 3, dropout=0.3, batch_first=batch_first, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, 3, 2)
        h, _ = self.rnn(h if self.batch_first else h.transpose(0, 1))
        return (h if self.batch_first else h.transpose(0, 1)).flatten(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "modules": Modules,
    "functions": Functions,
    "attention": Attention,
    "attention, time first": lambda: Attention(batch_first=False),
    "attention weights": lambda: Attention(need_weights=True),
    "lstm": lambda: Recurrent(nn.LSTM, True),
    "gru, time first": lambda: Recurrent(nn.GRU, False),
    "rnn": lambda: Recurrent(nn.RNN, True),
    "mixed": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), Functions(), nn.Linear(24, 6), Attention()),
}


def built(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name]().to(dtype).train()


def run(
    model: nn.Module, randomness: SampleRandomness, x: Tensor, ids: Tensor, parts: list[Tensor], step: int = 3
) -> tuple[Tensor, list[Tensor]]:
    """Outputs by sample, and summed gradients, of one global batch run as `parts` (places in the batch)."""
    model.zero_grad()
    outputs: dict[int, Tensor] = {}
    for part in parts:
        with randomness.active(step, ids[part]):
            y = model(x[part])
        y.square().sum().backward()
        outputs.update(zip(part.tolist(), y.detach(), strict=True))
    return torch.stack([outputs[i] for i in range(len(x))]), [p.grad.clone() for p in model.parameters()]


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 6, generator=generator, dtype=dtype)
    return x, torch.randperm(10_000, generator=generator)[:BATCH]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in MODELS), ("mixed", torch.float32), ("lstm", torch.float32)]
)
def test_any_division_and_order_give_the_same(name: str, dtype: torch.dtype) -> None:
    x, ids = batch(dtype)
    model = built(name, dtype)
    randomness = SampleRandomness(model, 11)
    whole, gradients = run(model, randomness, x, ids, [torch.arange(BATCH)])
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(1))
    bound = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    for parts in ([torch.arange(BATCH)], [order[:4], order[4:]], list(order.split(1))):
        # One that has seen other passes, and a fresh one as in another process.
        fresh = built(name, dtype)
        for m, r in ((model, randomness), (fresh, SampleRandomness(fresh, 11))):
            outputs, summed = run(m, r, x, ids, parts)
            torch.testing.assert_close(outputs, whole, **bound)
            for a, b in zip(summed, gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=bound["rtol"], atol=bound["atol"] * float(b.abs().max() + 1))
    before = torch.get_rng_state()
    run(model, randomness, x, ids, [torch.arange(BATCH)])
    assert torch.equal(before, torch.get_rng_state()), "something drew from torch's own generator"
    for seed, step in ((12, 3), (11, 4)):
        other, _ = run(fresh, SampleRandomness(fresh, seed), x, ids, [torch.arange(BATCH)], step)
        assert not torch.allclose(other, whole)


@settings(max_examples=5, deadline=None)
@given(st.permutations(range(BATCH)), st.sets(st.integers(1, BATCH - 1), max_size=4))
def test_any_division_property(order: list[int], cuts: set[int]) -> None:
    x, ids = batch()
    model = built("mixed")
    randomness = SampleRandomness(model, 2)
    whole, gradients = run(model, randomness, x, ids, [torch.arange(BATCH)])
    bounds = [0, *sorted(cuts), BATCH]
    parts = [torch.tensor(order[a:b]) for a, b in pairwise(bounds)]
    outputs, summed = run(model, randomness, x, ids, parts)
    torch.testing.assert_close(outputs, whole, rtol=1e-12, atol=1e-12)
    for a, b in zip(summed, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11 * float(b.abs().max() + 1))


def test_masks_are_what_torch_makes_of_them() -> None:
    """Same zeros and scales as torch's own: the kept values are x / (1 - p), whole channels go together."""
    x = torch.rand(50, 20, 6, 6) + 1
    ids = torch.arange(50)
    for module, features in ((nn.Dropout(0.3), False), (nn.Dropout2d(0.3), True)):
        randomness = SampleRandomness(module, 0)
        with randomness.active(0, ids):
            y = module(x)
        kept = y != 0
        torch.testing.assert_close(y[kept], (x / 0.7)[kept])
        rate = float((kept[..., 0, 0] if features else kept).double().mean())
        draws = 1000 if features else x.numel()
        assert abs(rate - 0.7) < 4 * math.sqrt(0.21 / draws)
        assert bool((kept.flatten(2).all(2) | ~kept.flatten(2).any(2)).all()) == features


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(400, 500)
    for module in (nn.AlphaDropout(0.2), nn.AlphaDropout(0.7)):
        with SampleRandomness(module, 0).active(0, torch.arange(400)):
            y = module(x)
        assert abs(float(y.mean())) < 0.02
        assert abs(float(y.var()) - 1) < 0.03
        dropped = float((y == y.flatten().mode().values).double().mean())
        assert abs(dropped - module.p) < 0.005
    stock = functional.alpha_dropout(torch.zeros(1000), 0.5, True).unique()
    with SampleRandomness(module, 0).active(0, torch.arange(1000)):
        module.p = 0.5
        ours = module(torch.zeros(1000)).unique()
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"scale": 0.3}])
def test_attention_without_zeros_is_torchs(options: dict[str, object]) -> None:
    """With nearly no dropout the written-out attention is the fused one."""
    q = torch.randn(4, 6, 5, 8, dtype=torch.float64)
    kv = torch.randn(4, 2 if "enable_gqa" in options else 6, 7, 8, dtype=torch.float64)
    mask = None if "is_causal" in options else torch.rand(5, 7) > 0.2

    class Model(nn.Module):
        def forward(self, q: Tensor, kv: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, kv, kv, mask, dropout_p=1e-9, **options)  # type: ignore[arg-type]

    model = Model()
    with SampleRandomness(model, 0).active(0, torch.arange(4)):
        ours = model(q, kv)
    torch.testing.assert_close(ours, functional.scaled_dot_product_attention(q, kv, kv, mask, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_without_zeros_are_torchs(kind: type[nn.RNNBase], batch_first: bool) -> None:
    options = {"proj_size": 3} if kind is nn.LSTM else {}
    rnn = kind(4, 5, 3, dropout=1e-9, bidirectional=True, batch_first=batch_first, dtype=torch.float64, **options)
    x = torch.randn(6, 6, 4, dtype=torch.float64)
    h = torch.randn(6, 6, options.get("proj_size", 5), dtype=torch.float64)
    state = (h, torch.randn(6, 6, 5, dtype=torch.float64)) if kind is nn.LSTM else h
    for start in (None, state):
        stock, end = rnn(x, start)
        with SampleRandomness(rnn, 0).active(0, torch.arange(6)):
            ours, last = rnn(x, start)
        torch.testing.assert_close(ours, stock)
        torch.testing.assert_close(last, end)


def test_packed_sequences_are_refused() -> None:
    rnn = nn.LSTM(4, 5, 2, dropout=0.2)
    packed = pack_padded_sequence(torch.randn(3, 2, 4), [3, 2])
    with (
        SampleRandomness(rnn, 0).active(0, torch.arange(2)),
        pytest.raises(TaskError, match=r"packed sequence.*worker"),
    ):
        rnn(packed)


def test_evaluation_and_what_is_outside_are_left_alone() -> None:
    model = built("mixed")
    x, ids = batch()
    randomness = SampleRandomness(model, 0)
    names = list(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    run(model, randomness, x, ids, [torch.arange(BATCH)])
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == kinds
    plain = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double()
    keyed = SampleRandomness(plain, 0)
    plain.eval()
    with keyed.active(0, ids):
        assert torch.equal(plain(x), plain[0](x))
    plain.train()
    torch.manual_seed(3)
    own = plain(x)
    torch.manual_seed(3)
    assert torch.equal(own, functional.dropout(plain[0](x), 0.5))


def test_a_deep_copy_is_a_plain_model() -> None:
    model = built("mixed")
    x, ids = batch()
    randomness = SampleRandomness(model, 0)
    run(model, randomness, x, ids, [torch.arange(BATCH)])
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if "forward" in vars(module):
            assert vars(module)["forward"].__self__ is module
    drop = copied[1]
    assert isinstance(drop, nn.Dropout)
    with randomness.active(0, ids):
        torch.manual_seed(0)
        own = drop(x)
        torch.manual_seed(0)
        assert torch.equal(own, functional.dropout(x, 0.2))
        drop.eval()
        assert torch.equal(drop(x), x)
        assert not torch.equal(model[1](x), x)


def test_explicit_generators_are_respected() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(4)
            return x + torch.rand(x.shape, generator=generator) + torch.empty_like(x).normal_(generator=generator)

    model = Model()
    x = torch.zeros(3, 5)
    with SampleRandomness(model, 0).active(0, torch.arange(3)):
        y = model(x)
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(y, torch.rand(3, 5, generator=generator) + torch.randn(3, 5, generator=generator))


@pytest.mark.parametrize("name", ["modules", "functions", "attention", "lstm", "mixed"])
@pytest.mark.parametrize("early", [0, 2])
def test_repetition_draws_the_same(name: str, early: int) -> None:
    """Activation checkpointing changes no bit, in the first pass (which searches) and in later ones."""
    x, ids = batch()

    def train(saving: bool) -> list[Tensor]:
        torch.manual_seed(5)
        inner = MODELS[name]().double()
        model = nn.Sequential(nn.Linear(6, 6).double(), nn.Dropout(0.2), inner).train()
        randomness = SampleRandomness(model, 1)
        for step in range(early + 1):
            model.zero_grad()
            with randomness.active(step, ids):
                h = model[1](model[0](x))
                y = checkpoint(inner, h, use_reentrant=False, context_fn=randomness.context_fn) if saving else inner(h)
                z = model[1](y)  # a module that is used again after the repetition's part
            z.square().sum().backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(train(False), train(True), strict=True):
        assert torch.equal(a, b)


def test_worker_randomness_repeats_too_and_differs_by_rank() -> None:
    def train(saving: bool, rank: int) -> list[Tensor]:
        torch.manual_seed(5)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        randomness = WorkerRandomness(inner, 3, rank)
        x, ids = batch(torch.float32)
        with randomness.active(0, ids):
            if saving:
                y = checkpoint(
                    inner, x, use_reentrant=False, preserve_rng_state=False, context_fn=randomness.context_fn
                )
            else:
                y = inner(x)
            torch.rand(3)
        state = torch.get_rng_state()
        y.square().sum().backward()
        assert torch.equal(state, torch.get_rng_state())
        return [p.grad for p in inner.parameters()]

    plain = train(False, 0)
    assert all(map(torch.equal, plain, train(True, 0)))
    assert not all(map(torch.equal, plain, train(False, 1)))


def test_dropout_without_a_batch_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Dropout(0.1))

        def forward(self, x: Tensor, function: bool) -> Tensor:
            h = x.T[:5].contiguous()
            return functional.dropout(h, 0.1) if function else self.inner(h)

    model = Model()
    randomness = SampleRandomness(model, 0)
    for function, module in ((False, "inner.0"), (True, "")):
        with (
            randomness.active(0, torch.arange(4)),
            pytest.raises(TaskError, match=rf"module `{module}`.*\[5, 4\].*batch of 4.*\n?.*worker"),
        ):
            model(torch.rand(4, 6), function)


@pytest.mark.parametrize(
    "draw", [lambda x: torch.randperm(4), lambda x: torch.multinomial(x, 1), lambda x: x.log_normal_()]
)
def test_what_cannot_be_keyed_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x)

    model = Model()
    with SampleRandomness(model, 0).active(0, torch.arange(2)), pytest.raises(TaskError, match="cannot be keyed"):
        model(torch.rand(2, 3))


def test_a_draw_that_is_per_sample_only_now_and_then_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(8, 1)[0]

    model = Model()
    randomness = SampleRandomness(model, 0)
    with randomness.active(0, torch.arange(3)):
        shared = model(torch.zeros(3, 1))
    with randomness.active(0, torch.arange(1)):
        # One sample fits either way: what the larger batch showed decides.
        assert torch.equal(model(torch.zeros(1, 1)), shared[:1])
    with randomness.active(0, torch.arange(4)), pytest.raises(TaskError, match=r"x\.shape\[0\]"):
        model(torch.zeros(4, 1))
    randomness = SampleRandomness(model, 0)
    with randomness.active(0, torch.arange(4)):
        model(torch.zeros(4, 1))
    with randomness.active(0, torch.arange(2)), pytest.raises(TaskError, match="drew 8 rows for 4"):
        model(torch.zeros(2, 1))


def mode_is_on() -> bool:
    return torch._C._len_torch_function_stack() > 0


def test_the_mode_is_on_only_where_functions_draw() -> None:
    seen: dict[str, list[bool]] = {"outside": [], "inside": []}

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen["inside"].append(mode_is_on())
            return x + torch.randn_like(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.noise = nn.Dropout(0.1), Noise()

        def forward(self, x: Tensor) -> Tensor:
            seen["outside"].append(mode_is_on())
            return self.drop(self.noise(x))

    model = Outer()
    randomness = SampleRandomness(model, 0)
    for step in range(3):
        with randomness.active(step, torch.arange(4)):
            model(torch.zeros(4, 3))
    assert seen == {"outside": [True, False, False], "inside": [True, True, True]}
    assert not mode_is_on()
    assert "forward" not in vars(model)


def test_a_loss_that_draws_keeps_the_mode_on() -> None:
    model = nn.Linear(3, 3)
    randomness = SampleRandomness(model, 0)
    results = []
    for _ in range(3):
        with randomness.active(5, torch.arange(4)):
            results.append(torch.rand_like(model(torch.zeros(4, 3))))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_module_that_draws_late_is_found_and_said() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on = False

        def forward(self, x: Tensor) -> Tensor:
            return torch.rand_like(x) if self.on else x

    model = nn.Sequential(Late())
    randomness = SampleRandomness(model, 0)
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (0, 1, 2, 7, 7, 7):
            model[0].on = step > 1
            with randomness.active(step, torch.arange(4)):
                results.append(model(torch.zeros(4, 3)))
    assert torch.equal(results[3], results[4])
    assert torch.equal(results[3], results[5])
    assert [str(w.message) for w in caught if "`0` drew random numbers in step 7" in str(w.message)]


def test_an_exception_leaves_no_mode_behind() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    model = nn.Sequential(Broken())
    randomness = SampleRandomness(model, 0)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"), randomness.active(0, torch.arange(1)):
            model(torch.zeros(1))
        assert not mode_is_on()
    assert randomness.context_fn()[1].__class__.__name__ == "nullcontext"


def test_an_empty_share_draws_nothing() -> None:
    model = built("modules")
    with SampleRandomness(model, 0).active(0, torch.empty(0, dtype=torch.int64)):
        assert model(torch.empty(0, 6, dtype=torch.float64)).shape == (0, 24)


def test_low_precision_masks_scale_alike() -> None:
    x = torch.ones(64, 100, dtype=torch.bfloat16)
    drop = nn.Dropout(0.5)
    with SampleRandomness(drop, 0).active(0, torch.arange(64)):
        y = drop(x)
    assert y.dtype == torch.bfloat16
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_cost_without_randomness_is_small() -> None:
    """Entering and leaving: the aim is 5 µs; the bound leaves room for a busy machine."""
    model = nn.Linear(3, 3)
    randomness = SampleRandomness(model, 0)
    ids = torch.arange(4)
    with randomness.active(0, ids):
        model(torch.zeros(4, 3))

    def measured() -> float:
        start = time.perf_counter()
        for _ in range(200):
            with randomness.active(1, ids):
                pass
        return (time.perf_counter() - start) / 200

    assert min(measured() for _ in range(7)) < 25e-6


class TestBatchRandom:
    IDS = torch.tensor([9, 4, 1_000_000_007, 0])

    def drawn(self, ids: Tensor, step: int = 2, scope: str = "augment", seed: int = 1) -> list[Tensor]:
        random = BatchRandom(seed, step, ids, scope)
        return [
            random.uniform(3, 2, low=-1.0, high=4.0),
            random.uniform(),
            random.normal(5, mean=2.0, std=0.1),
            random.integers(-3, 9, 4),
            random.bernoulli(0.5, 8),
        ]

    def test_shapes_types_and_ranges(self) -> None:
        u, scalar, n, i, b = self.drawn(self.IDS)
        assert [tuple(t.shape) for t in (u, scalar, n, i, b)] == [(4, 3, 2), (4,), (4, 5), (4, 4), (4, 8)]
        assert [t.dtype for t in (u, scalar, n, i, b)] == [torch.float32] * 3 + [torch.int64, torch.float32]
        assert -1 <= float(u.min()) <= float(u.max()) < 4
        assert -3 <= int(i.min()) <= int(i.max()) < 9
        assert set(b.unique().tolist()) == {0.0, 1.0}

    def test_rows_belong_to_their_samples(self) -> None:
        whole = self.drawn(self.IDS)
        order = torch.tensor([2, 0])
        for a, b in zip(self.drawn(self.IDS[order]), whole, strict=True):
            assert torch.equal(a, b[order])

    def test_seed_step_scope_and_calls_matter(self) -> None:
        first = self.drawn(self.IDS)[0]
        for other in ({"step": 3}, {"scope": "noise"}, {"seed": 2}):
            assert not torch.equal(self.drawn(self.IDS, **other)[0], first)  # type: ignore[arg-type]
        random = BatchRandom(1, 2, self.IDS, "augment")
        assert not torch.equal(random.uniform(3), random.uniform(3))

    def test_an_empty_batch_and_an_empty_range(self) -> None:
        random = BatchRandom(1, 2, self.IDS[:0], "augment")
        assert random.uniform(3).shape == (0, 3)
        with pytest.raises(TaskError, match="no integer"):
            random.integers(4, 4)
