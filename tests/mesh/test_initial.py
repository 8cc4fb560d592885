"""A model filled from its recorded constructor against the ordinary construction: bits, memory, refusals."""

from __future__ import annotations

import copy
import functools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from verbund.mesh.initial import NotRecordable, record
from verbund.mesh.initial.seeds import seed_everything

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SEED = 11
Build = Callable[[], nn.Module]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def states() -> tuple[bytes, Any, Any]:
    """Where the three generators stand."""
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def ordinary(build: Build, seed: int = SEED) -> nn.Module:
    seed_everything(seed)
    return build()


def filled(build: Build, seed: int = SEED) -> nn.Module:
    recorded = record(build, seed)
    assert all(tensor.is_meta for tensor in tensors(recorded.model).values())
    names: list[str] = []

    def keep(name: str, values: Tensor) -> Tensor:
        names.append(name)
        return values

    recorded.fill(keep)
    assert sorted(names) == sorted(tensors(recorded.model))
    return recorded.model


def check(build: Build, seed: int = SEED) -> nn.Module:
    """The recorded model, after it was compared with the ordinary one."""
    expected = ordinary(build, seed)
    after = states()
    model = filled(build, seed)
    assert states() == after
    assert [*model.state_dict()] == [*expected.state_dict()]
    ours, theirs = tensors(model), tensors(expected)
    assert [*ours] == [*theirs]
    for name, tensor in theirs.items():
        one = ours[name]
        assert (type(one), one.dtype, one.shape, one.device) == (
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.device,
        )
        assert (one.stride(), one.requires_grad, one.is_leaf) == (tensor.stride(), tensor.requires_grad, True), name
        assert bits(one) == bits(tensor), name
    return model


# -- modules of torch ------------------------------------------------------------------------------------------------


def spectral() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 5)), parametrizations.spectral_norm(nn.Conv2d(2, 3, 3))
    )


MODULES: dict[str, Build] = {
    "linear": lambda: nn.Linear(7, 5),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "conv": lambda: nn.Sequential(nn.Conv1d(4, 8, 3, groups=2), nn.Conv2d(3, 4, 3), nn.ConvTranspose3d(2, 3, 2)),
    "embedding": lambda: nn.Embedding(9, 6, padding_idx=2),
    "embedding bag": lambda: nn.EmbeddingBag(9, 6, mode="sum"),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention of other sizes": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
    "rnn": lambda: nn.ModuleList([nn.RNN(3, 5), nn.GRU(3, 5, 2), nn.LSTMCell(3, 5)]),
    "lstm": lambda: nn.LSTM(3, 8, 2, bidirectional=True, proj_size=4),
    "norms": lambda: nn.Sequential(
        nn.BatchNorm2d(4), nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm1d(3, affine=True)
    ),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 3, nn.LayerNorm(16)),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 40, [10, 20]),
    "prelu": lambda: nn.Sequential(nn.PReLU(3), nn.Flatten(), nn.Dropout()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 5)),
    "spectral norm": spectral,
    "double": lambda: nn.Linear(7, 5, dtype=torch.float64),
    "bfloat16": lambda: nn.Linear(7, 5, dtype=torch.bfloat16),
    "half afterwards": lambda: nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)).half(),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "on the cpu": lambda: nn.Linear(3, 2, device="cpu").to("cpu"),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)).requires_grad_(False),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_have_the_ordinary_values(name: str) -> None:
    check(MODULES[name])


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_every_seed(seed: int) -> None:
    check(MODULES["encoder"], seed)


# -- initialisers ----------------------------------------------------------------------------------------------------

INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "truncated": functools.partial(nn.init.trunc_normal_, std=0.02),
    "truncated tight": functools.partial(nn.init.trunc_normal_, a=-0.5, b=0.5),
    "constant": functools.partial(nn.init.constant_, val=0.5),
    "eye": nn.init.eye_,
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "kaiming uniform": functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
    "kaiming normal": functools.partial(nn.init.kaiming_normal_, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
    "sparse": functools.partial(nn.init.sparse_, sparsity=0.3),
    "on data": lambda weight: nn.init.normal_(weight.data, std=0.1),
    "rows": lambda weight: (weight.data[:2].zero_(), weight.data[2].normal_()),
    "columns": lambda weight: nn.init.normal_(weight.data[:, 1:3]),
    "transposed": lambda weight: nn.init.normal_(weight.data.T),
    "scaled": lambda weight: weight.data.mul_(0.02).add_(1.0).clamp_(0.99, 1.01),
    "twice": lambda weight: (weight.data.normal_(), weight.data.uniform_()),
    "new data": lambda weight: setattr(weight, "data", torch.randn(weight.shape) * 0.02),
    "masked": lambda weight: weight.data.masked_fill_(weight.data > 0, 0.25),
    "indexed": lambda weight: weight.data.__setitem__(weight.data > 0, 0.25),
    "shifted": lambda weight: weight.data[1:].copy_(weight.data[:-1].clone()),
    "for each": lambda weight: torch._foreach_mul_([weight.data, weight.data[0]], 0.5),
    "exponential": lambda weight: weight.data.exponential_(2.0),
    "bernoulli": lambda weight: weight.data.bernoulli_(0.3),
    "permutation": lambda weight: weight.data.copy_(torch.randperm(weight.numel()).view_as(weight)),
    "multinomial": lambda weight: weight.data[0].copy_(torch.multinomial(torch.ones(9), weight.shape[1], True)),
    "gamma": lambda weight: weight.data.copy_(torch._standard_gamma(torch.full_like(weight, 0.5))),
    "drawn with probabilities that were drawn": lambda weight: weight.data.copy_(
        torch.bernoulli(torch.rand(weight.shape))
    ),
    "like": lambda weight: weight.data.copy_(
        torch.randn_like(weight) + torch.rand_like(weight).T.reshape(weight.shape)
    ),
    "no grad": lambda weight: torch.no_grad()(lambda: weight.mul_(torch.linspace(0.0, 1.0, weight.shape[1])))(),
    "matrices": lambda weight: weight.data.copy_(torch.linalg.qr(weight.data @ weight.data.T)[0] @ weight.data),
    "out": lambda weight: torch.mul(weight.data, 2.0, out=weight.data),
    "out that grows": lambda weight: weight.data.copy_(torch.neg(weight.data, out=torch.empty(0))),
}


@pytest.mark.parametrize("shape", [(6, 6), (33, 40)])
@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_after_the_construction(name: str, shape: tuple[int, int]) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(*shape), nn.LayerNorm(shape[1]), nn.Linear(*shape, bias=False))
        for module in model:
            if isinstance(module, nn.Linear):
                INITIALISERS[name](module.weight)
        return model

    check(build)


def test_a_function_applied_to_all_modules() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    check(lambda: nn.Sequential(nn.Embedding(9, 8, padding_idx=0), MODULES["encoder"]()).apply(init))


# -- what constructors do --------------------------------------------------------------------------------------------

TABLE = np.arange(12, dtype=np.float64).reshape(3, 4)
GLOBAL = torch.linspace(0.0, 1.0, 5)


class Own(nn.Module):
    """A constructor that does what people's do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 6) * 0.02)
        self.temperature = nn.Parameter(torch.tensor(0.07).log())
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.whole = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)
        self.legacy = nn.Parameter(torch.Tensor(3, 2).fill_(2.0))
        position = torch.arange(50).unsqueeze(1)
        rates = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
        table = torch.zeros(50, 8)
        table[:, 0::2] = torch.sin(position * rates)
        table[:, 1::2] = torch.cos(position * rates)
        self.register_buffer("table", table.unsqueeze(0))
        self.register_buffer("mask", torch.triu(torch.full((5, 5), float("-inf")), diagonal=1), persistent=False)
        self.register_buffer("positions", torch.arange(7).expand(1, -1))
        self.register_buffer("rotation", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nothing", None)
        self.register_buffer("numpy", torch.from_numpy(TABLE).float())
        self.register_buffer("drawn", torch.tensor(np.random.normal(size=(3, 2))))
        self.register_buffer("listed", torch.tensor([random.random() for _ in range(3)]))
        self.register_buffer("outside", GLOBAL * 2)
        self.register_buffer("chosen", torch.where(torch.rand(9) > 0.5, 1.5, 0.0))
        self.register_buffer("grid", torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")))
        self.from_numpy = nn.Parameter(torch.from_numpy(TABLE.copy()))
        self.copied = nn.Linear(4, 3)
        with torch.no_grad():
            self.copied.weight.copy_(torch.from_numpy(TABLE))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.widths = torch.arange(3).tolist()
        if torch.equal(torch.ones(2), torch.ones(2)) and bool((torch.arange(3) < 3).all()):
            self.conditional = nn.Parameter(torch.rand(3))
        self.picked = nn.Parameter(torch.arange(6.0)[torch.arange(6) % 2 == 0] + torch.rand(3))
        self.buffer = nn.Buffer(torch.rand(2), persistent=False)
        self.listing = nn.ParameterList([nn.Parameter(torch.rand(n)) for n in (1, 2)])


def test_what_constructors_do() -> None:
    model = check(Own)
    plain = ordinary(Own)
    assert (model.rates, model.widths) == (plain.rates, plain.widths)


def test_tied_parameters_stay_tied() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False), nn.Linear(6, 8))
        model[1].weight = model[0].weight
        model[2].register_parameter("weight", model[0].weight)
        return model

    model = check(build)
    assert model[1].weight is model[0].weight is model[2].weight


def test_modules_that_keep_their_parameters_elsewhere_too() -> None:
    model = check(MODULES["lstm"])
    assert all(
        held is getattr(model, name) for held, name in zip(model._flat_weights, model._flat_weights_names, strict=True)
    )
    inputs = torch.randn(2, 3, 3)
    assert torch.equal(model(inputs)[0], ordinary(MODULES["lstm"])(inputs)[0])


def test_deep_copies() -> None:
    def build() -> nn.Module:
        student = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        student.register_buffer("view", torch.rand(4, 6).T[1:3])
        teacher = copy.deepcopy(student).requires_grad_(False)
        nn.init.normal_(student[0].weight)
        return nn.ModuleList([student, teacher])

    check(build)


def test_tensors_that_are_neither_parameters_nor_buffers_get_their_values_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.plain = torch.randn(4)
            self.held = {"list": [torch.rand(2), self.linear.weight]}
            inside = torch.rand(3)
            self.function = lambda: inside

    recorded = record(Model, SEED)
    recorded.fill(lambda name, values: values)
    plain = ordinary(Model)
    assert torch.equal(recorded.model.plain, plain.plain)
    assert type(recorded.model.plain) is Tensor
    assert torch.equal(recorded.model.function(), plain.function())
    assert torch.equal(recorded.model.held["list"][0], plain.held["list"][0])
    assert recorded.model.held["list"][1] is recorded.model.linear.weight


def test_a_forward_pass_within_the_constructor() -> None:
    def build() -> nn.Module:
        features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.MaxPool2d(2))
        width = features(torch.randn(2, 1, 12, 12)).flatten(1).shape[1]
        return nn.Sequential(features, nn.Linear(width, 3))

    # The running statistics come from that pass.
    assert check(build)[0][1].num_batches_tracked == 1


def test_a_default_type_that_holds_for_a_while() -> None:
    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = nn.Linear(5, 4)
        model.register_buffer("table", torch.arange(5) / 3 + torch.linspace(0, 1, 5) + torch.rand(5))
        torch.set_default_dtype(before)
        return nn.Sequential(model, nn.Linear(4, 3))

    assert check(build)[0].table.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_values_from_a_file(tmp_path: Path) -> None:
    torch.save(nn.Linear(5, 4, bias=False).state_dict(), tmp_path / "weights.pt")

    def build() -> nn.Module:
        model = nn.Linear(5, 4)
        model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=False)
        return model

    check(build)


def test_tensors_from_outside_stay_as_they_are() -> None:
    outside = nn.Linear(2, 2)
    before = outside.weight.clone()

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].weight = model[1].weight = outside.weight
        model.register_buffer("constant", GLOBAL)
        return model

    model = check(build)
    assert model[0].weight is model[1].weight is not outside.weight
    assert model.constant is not GLOBAL
    assert torch.equal(outside.weight, before)


def test_attributes_of_parameters_stay() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        model.weight.no_decay = True
        return model

    assert check(build).weight.no_decay


def test_a_large_table_and_a_large_matrix() -> None:
    def build() -> nn.Module:
        model = nn.Linear(1500, 1600)
        model.register_buffer("angles", torch.outer(torch.arange(3000.0), torch.rand(800)).cos())
        model.register_buffer("mask", torch.ones(2500, 2500, dtype=torch.bool).tril())
        model.weight.data.copy_(torch.cat([model.weight.data[800:], model.weight.data[:800]]) * 3)
        model.register_buffer("permuted", (torch.rand(30, 400, 500).permute(2, 0, 1) * torch.rand(30, 1)).sqrt())
        model.register_buffer("sliced", torch.rand(3000, 3000)[:, :2500] * 2.0)
        return model

    check(build)


# -- generators ------------------------------------------------------------------------------------------------------


def draws(*seeds: int | None, between: Callable[[], Any] = lambda: None) -> nn.Module:
    found = nn.ParameterList()
    for seed in seeds:
        if seed is not None:
            torch.manual_seed(seed)
        found.append(torch.rand(5))
        between()
        found.append(torch.randn(20))
    return found


def forked() -> nn.Module:
    model = draws(None)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.append(torch.rand(3))
        model.append(torch.rand(3))
    model.append(torch.rand(3))
    state = torch.get_rng_state()
    model.append(torch.randn(40))
    torch.set_rng_state(state)
    model.append(torch.randn(40))
    return model


def own_generators() -> nn.Module:
    one, two = torch.Generator().manual_seed(4), torch.Generator()
    model = draws(None)
    for generator in (one, two, one, None):
        model.append(torch.randn(5, generator=generator))
        model.append(torch.empty(4).uniform_(generator=generator))
        model.append(torch.randperm(5, generator=generator).float())
    model.generator = one
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: draws(SEED),
        lambda: draws(None, SEED, None, 5, 5, SEED),
        lambda: draws(None, None, between=lambda: torch.manual_seed(torch.initial_seed() + 1)),
        lambda: draws(1, between=lambda: torch.rand(1000)),
        lambda: (draws(None), torch.manual_seed(8))[0],
        forked,
        own_generators,
    ],
)
def test_constructors_that_seed(build: Build) -> None:
    check(build)


def test_a_generator_of_the_constructor_goes_on_where_it_would() -> None:
    model, plain = check(own_generators), ordinary(own_generators)
    assert torch.equal(torch.rand(3, generator=model.generator), torch.rand(3, generator=plain.generator))


# -- any model -------------------------------------------------------------------------------------------------------

LAYERS = st.sampled_from([
    lambda n: nn.Linear(n, n),
    lambda n: nn.Linear(n, n, bias=False).bfloat16(),
    lambda n: nn.BatchNorm1d(n),
    lambda n: nn.Embedding(5, n, padding_idx=1),
    lambda n: nn.GRU(n, 3),
    lambda n: nn.Conv1d(n, 2, 3),
    lambda n: nn.MultiheadAttention(2 * n, 2),
    lambda n: copy.deepcopy(nn.Sequential(nn.Linear(n, 2), nn.LayerNorm(n))),
    lambda n: nn.ParameterList([torch.randn(n, 2) * 0.1, torch.rand(n).exp()]),
    lambda n: nn.PReLU(n, init=torch.linspace(0, 1, n + 1)[1].item()),
])  # fmt: skip
CHANGES = st.sampled_from([
    lambda p: p.data.normal_(),
    lambda p: p.data[:1].zero_(),
    lambda p: p.data[-1:].uniform_(-1, 1),
    lambda p: p.data.mul_(0.5),
    lambda p: p.data.copy_(p.data.flip(0)),
    lambda p: setattr(p, "data", p.data.clone() + 1),
    lambda p: p.data.add_(torch.randn_like(p)),
    lambda p: torch.rand(3),
])  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(
    layers=st.lists(st.tuples(LAYERS, st.integers(1, 9)), min_size=1, max_size=5),
    changes=st.lists(st.tuples(CHANGES, st.integers(0, 30)), max_size=8),
    seed=st.integers(0, 2**32),
)
def test_any_model(layers: list[Any], changes: list[Any], seed: int) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(layer(size) for layer, size in layers))
        parameters = list(model.parameters())
        for change, index in changes:
            change(parameters[index % len(parameters)])
        return model

    check(build, seed)


VIEWS = st.sampled_from([
    lambda t: t,
    lambda t: t[:2],
    lambda t: t[1:, ::2],
    lambda t: t.T,
    lambda t: t[3],
    lambda t: t.view(-1)[5:11],
    lambda t: t.detach(),
    lambda t: t.flatten(),
])  # fmt: skip
STATEMENTS = st.sampled_from([
    lambda a, b: a.normal_(),
    lambda a, b: a.uniform_(-1, 1),
    lambda a, b: a.fill_(0.5),
    lambda a, b: a.mul_(2.0),
    lambda a, b: a.add_(b.sum()),
    lambda a, b: a.copy_(b.mean() + torch.rand(())),
    lambda a, b: a.copy_(torch.rand(a.shape) * b.max()),
    lambda a, b: a.bernoulli_(b.clone().flatten()[0].sigmoid()),
    lambda a, b: torch.mul(a, 0.5, out=a),
    lambda a, b: a.zero_().add_(torch.randperm(a.numel()).view(a.shape)),
    lambda a, b: torch.randn(20),
    lambda a, b: torch.multinomial(b.clone().flatten().abs() + 0.1, 3),
])  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    statements=st.lists(
        st.tuples(STATEMENTS, st.integers(0, 4), VIEWS, st.integers(0, 4), VIEWS, st.booleans()), max_size=25
    ),
    kept=st.lists(st.integers(0, 4), unique=True, min_size=1),
    cast=st.booleans(),
)
def test_any_order_of_draws_changes_and_copies(statements: list[Any], kept: list[int], cast: bool) -> None:
    def build() -> nn.Module:
        pool = [torch.zeros(4, 5) for _ in range(5)]
        for statement, to, write, source, read, copied in statements:
            statement(write(pool[to]), read(pool[source]))
            if copied:
                pool[to] = pool[source].clone()
        model = nn.ParameterList([pool[index] for index in kept])
        return model.half() if cast else model

    check(build)


# -- language models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 2}),
        ("LlamaForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("BertModel", {}),
        ("GPT2LMHeadModel", {}),
        ("T5ForConditionalGeneration", {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}),
        ("ViTModel", {"image_size": 16, "patch_size": 4}),
        ("SwinModel", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2]}),
    ],
)
def test_models_of_transformers(kind: str, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = getattr(transformers, kind)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "n_layer": 2,
        "n_embd": 32,
    }
    config = model.config_class(**(sizes if "d_model" not in settings and "depths" not in settings else {}), **settings)
    check(lambda: model(config))


# -- refusals --------------------------------------------------------------------------------------------------------


class Subclass(nn.Parameter):
    pass


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def changed_array() -> nn.Module:
    array = np.ones(3, dtype=np.float32)
    model = nn.ParameterList([torch.from_numpy(array)])
    array[1] = 5
    return model


def swallowed() -> nn.Module:
    try:
        value = torch.rand(1).item()
    except Exception:
        value = 0.0
    return nn.ParameterList([torch.full((2,), value)])


def failing() -> nn.Module:
    raise ValueError("no such model")


def hooked() -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight.register_hook(lambda gradient: gradient * 2)
    return model


REFUSALS: dict[str, tuple[Build, str]] = {
    "item": (lambda: nn.Linear(2, 2).register_parameter("x", torch.rand(1).item()), "drawn at random"),
    "tolist": (lambda: torch.rand(3).tolist(), "`tolist` asks for values that are drawn at random"),
    "condition": (lambda: nn.Linear(2, 2) if torch.rand(1) > 0.5 else nn.Linear(2, 3), "drawn at random"),
    "sizes": (lambda: nn.ParameterList([torch.rand(9)[torch.rand(9) > 0.5]]), "drawn at random"),
    "equal": (lambda: torch.equal(torch.rand(2), torch.rand(2)), "`aten.equal.default` asks"),
    "numpy": (lambda: nn.Linear(2, 2).weight.detach().numpy(), "`numpy` reaches past"),
    "as an array": (lambda: np.asarray(nn.Linear(2, 2).weight.detach()), "`numpy` reaches past"),
    "pointer": (lambda: nn.Linear(2, 2).weight.data_ptr(), "`data_ptr` reaches past"),
    "storage": (lambda: nn.Linear(2, 2).weight.untyped_storage(), "`untyped_storage` reaches past"),
    "for each value": (lambda: nn.Linear(2, 2).weight.data.apply_(abs), "`apply_` reaches past"),
    "shared memory": (lambda: nn.Linear(2, 2).share_memory(), "`share_memory_` reaches past"),
    "device": (lambda: nn.Linear(2, 2, device="meta"), "makes a tensor on meta"),
    "lazy": (lambda: nn.LazyLinear(2), "meets a tensor"),
    "class of parameters": (
        lambda: nn.ParameterList([Subclass(torch.rand(2))]),
        "`Subclass` is a parameter of another",
    ),
    "old weight norm": (lambda: nn.utils.weight_norm(nn.Linear(2, 2)), "with a gradient"),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(2, 2)), "share memory without being the same"),
    "views of one memory": (shared, "`0.weight` and `1.weight` share memory"),
    "a changed array": (changed_array, "an array was changed"),
    "from outside": (lambda: GLOBAL.view(-1).copy_(torch.rand(5)), "not the constructor's own"),
    "caught": (swallowed, "drawn at random"),
    "failing": (failing, "ValueError: no such model"),
    "hook": (hooked, "`weight` has a gradient, or a hook"),
    "sparse": (lambda: nn.ParameterList([torch.eye(3).to_sparse()]), ""),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_is_the_matter(name: str) -> None:
    build, reason = REFUSALS[name]
    outside = GLOBAL.clone()
    with pytest.raises(NotRecordable) as caught:
        record(build, SEED)
    assert reason in str(caught.value)
    assert torch.equal(outside, GLOBAL)
    # The way out is open.
    check(MODULES["linear"])


def test_a_refusal_names_the_users_line() -> None:
    def build() -> nn.Module:
        return nn.Linear(2, int(torch.rand(1) * 3))

    line = build.__code__.co_firstlineno + 1
    with pytest.raises(NotRecordable, match=rf"_local_scalar_dense.* {Path(__file__).name}:{line}".replace(" ", ".*")):
        record(build, SEED)
    with pytest.raises(
        NotRecordable, match=rf"no such model, .*{Path(__file__).name}:{failing.__code__.co_firstlineno + 1}"
    ):
        record(failing, SEED)


def test_a_cached_table_survives_a_refusal() -> None:
    @functools.cache
    def table() -> Tensor:
        return torch.arange(4.0).exp()

    def build() -> nn.Module:
        model = nn.ParameterList([table()])
        torch.rand(1).item()
        return model

    with pytest.raises(NotRecordable):
        record(build, SEED)
    assert torch.equal(ordinary(build)[0], torch.arange(4.0).exp())


def test_a_cached_table_survives_a_recording() -> None:
    @functools.cache
    def table() -> Tensor:
        return torch.arange(4.0).exp()

    record(lambda: nn.Linear(int(table()[0]), 2), SEED).fill(lambda name, values: values)
    assert torch.equal(table(), torch.arange(4.0).exp())


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_what_keep_returns_takes_the_place() -> None:
    recorded = record(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).requires_grad_(True), SEED)
    before = dict(recorded.model.named_parameters())

    def keep(name: str, values: Tensor) -> Tensor | None:
        assert not values.requires_grad
        return values[2:4].clone() if name == "0.weight" else values if name == "1.running_var" else None

    recorded.fill(keep)
    model = recorded.model
    plain = ordinary(lambda: nn.Linear(4, 6))
    assert torch.equal(model[0].weight, plain.weight[2:4])
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.requires_grad
    assert model[0].weight is before["0.weight"]
    assert model[0].bias.is_meta
    assert torch.equal(model[1].running_var, torch.ones(6))
    assert [*model.state_dict()] == [*ordinary(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))).state_dict()]
    with pytest.raises(RuntimeError, match="once"):
        recorded.fill(keep)


def test_a_filled_model_trains() -> None:
    recorded = record(MODULES["encoder"], SEED)
    recorded.fill(lambda name, values: values)
    model, plain = recorded.model, ordinary(MODULES["encoder"])
    for one in (model, plain):
        torch.manual_seed(0)
        one(torch.randn(3, 2, 16)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# -- memory ----------------------------------------------------------------------------------------------------------

WIDTH = 256
LARGEST = 4 * WIDTH * WIDTH * 4


def peak(action: Callable[..., Any], *arguments: Any) -> int:
    """The most bytes of tensors that it makes and that are there at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        made = action(*arguments)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    del made
    return most


def drop(name: str, values: Tensor) -> None:
    """Keeps nothing."""


def transformer(finish: Callable[[nn.Module], Any] = lambda model: None) -> Build:
    def build() -> nn.Module:
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH), 6)
        model = nn.ModuleList([nn.Embedding(4 * WIDTH, WIDTH, padding_idx=0), layers, nn.Linear(WIDTH, 4 * WIDTH)])
        finish(model)
        return model

    return build


def initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.MultiheadAttention):
        for part in module.in_proj_weight.data.chunk(3):
            nn.init.xavier_uniform_(part)


FINISHES: dict[str, Callable[[nn.Module], Any]] = {
    "as constructed": lambda model: None,
    "apply": lambda model: model.apply(initialise),
    "scaled in the end": lambda model: [parameter.data.mul_(0.5) for parameter in model.parameters()],
    "bfloat16": lambda model: model.bfloat16(),
    "apply and bfloat16": lambda model: model.apply(initialise).bfloat16(),
    "new data": lambda model: [setattr(p, "data", torch.randn(p.shape) * 0.02) for p in model.parameters()],
    "a teacher": lambda model: model.append(copy.deepcopy(model)),
}


@pytest.mark.parametrize("name", FINISHES)
def test_few_tensors_are_held_at_a_time(name: str) -> None:
    build = transformer(FINISHES[name])
    # The one layer that the encoder copies from stays until its last copy is made, where the copies are used.
    layer = sum(p.numel() * 4 for p in nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH).parameters())
    copied = name in ("as constructed", "scaled in the end", "bfloat16", "a teacher")
    assert peak(record(build, SEED).fill, drop) <= 2.1 * LARGEST + copied * layer
    assert sum(p.numel() * 4 for p in build().parameters()) > 20 * LARGEST


def test_draws_that_are_repeated_until_they_please_are_one_operation() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(12)))
        for layer in model:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.001, b=0.001)
        return model

    # What torch's function itself needs.
    assert peak(record(build, SEED).fill, drop) <= 6 * LARGEST
    check(build)


def test_what_is_kept_comes_on_top() -> None:
    build = transformer(FINISHES["apply"])
    half = sum(p[: len(p) // 2].numel() * 4 for p in build().parameters())
    assert (
        peak(record(build, SEED).fill, lambda name, values: values[: len(values) // 2].clone()) <= half + 2.2 * LARGEST
    )


def test_recording_takes_no_memory() -> None:
    assert peak(record, transformer(FINISHES["apply and bfloat16"]), SEED) < 2**18


# -- start-up --------------------------------------------------------------------------------------------------------


def test_nothing_large_is_imported() -> None:
    code = """
import sys
import torch
before = set(sys.modules)
from torch import nn
from verbund.mesh.initial import record
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4), 2)
        angles = torch.outer(torch.arange(3000.0), 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64))
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], dim=-1))
        self.register_buffer("mask", torch.tril(torch.ones(512, 512, dtype=torch.bool)).view(1, 1, 512, 512))
        self.large = nn.Parameter(torch.randn(3000, 3000) * 0.02)
        nn.init.trunc_normal_(self.large, std=0.02)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
record(Model, 0).fill(lambda name, values: None)
large = ("torch._dynamo", "sympy", "torch._subclasses", "torch._inductor", "torch.fx.experimental")
print([name for name in set(sys.modules) - before if name.startswith(large)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
