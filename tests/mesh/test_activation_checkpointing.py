"""Checkpointed modules give the same gradients, keep less, and say what they cannot repeat."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from verbund.errors import InputError, TaskError
from verbund.mesh import activation_checkpointing
from verbund.randomness import SampleRandomness, WorkerRandomness

pytestmark = pytest.mark.usefixtures("one_thread")


def nothing() -> tuple[nullcontext[None], nullcontext[None]]:
    return nullcontext(), nullcontext()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8)),
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
                nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
            ]
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + (block(h.unsqueeze(1)).squeeze(1) if isinstance(block, nn.TransformerEncoderLayer) else block(h))
        return self.head(h)


def trained(
    spec: bool | list[str],
    randomness: Callable[[nn.Module], SampleRandomness | WorkerRandomness],
    autocast: bool = False,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Net().train()
    source = randomness(model)
    activation_checkpointing.apply(model, spec, source.context_fn)
    x = torch.randn(12, 5)
    gradients = []
    for step in range(3):
        with source.active(step, torch.arange(12)), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().sum()
        loss.backward()
        gradients += [p.grad.clone() for p in model.parameters()]
    return gradients, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("spec", [True, ["blocks.*"], ["*"], ["blocks.1", "head"]], ids=str)
@pytest.mark.parametrize("kind", ["sample", "worker"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_not_a_bit_changes(spec: bool | list[str], kind: str, autocast: bool) -> None:
    """Gradients, running statistics and power iterations, with dropout in modules and in attention."""

    def randomness(model: nn.Module) -> SampleRandomness | WorkerRandomness:
        return SampleRandomness(model, 3) if kind == "sample" else WorkerRandomness(model, 3, 0)

    gradients, state = trained(False, randomness, autocast)
    again, same = trained(spec, randomness, autocast)
    assert list(same) == list(state)
    for name, value in state.items():
        assert torch.equal(same[name], value), name
    assert all(map(torch.equal, gradients, again))


def test_less_is_kept() -> None:
    def saved(spec: bool) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)))
        activation_checkpointing.apply(model, spec, nothing)
        sizes = []
        x = torch.randn(10, 8)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            model(x)
        return sum(sizes)

    # Hooks of a part are innermost: those outside see only what is saved between the parts.
    assert saved(True) == 0
    assert saved(False) > 4 * 10 * 64


def test_memory_is_free_after_the_backward_pass() -> None:
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    activation_checkpointing.apply(model, True, nothing)
    gc.disable()
    try:
        x = torch.randn(3, 4)
        watched = weakref.ref(x)
        y = model(x)
        y.sum().backward()
        del x, y
        assert watched() is None, "the input is kept alive by a cycle"
    finally:
        gc.enable()


def test_backward_twice() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    saving = copy.deepcopy(plain)
    activation_checkpointing.apply(saving, ["0", "1", "2"], nothing)
    x = torch.randn(5, 4, dtype=torch.float64)
    grads = []
    for model in (plain, saving):
        y = model(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_keyword_arguments_and_several_outputs() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor, *, scale: Tensor, flag: bool) -> dict[str, Tensor]:
            return {"y": self.a(x).tanh() * scale, "z": x * scale if flag else x}

    model = nn.ModuleDict({"inner": Inner()})
    scale = torch.ones(3, requires_grad=True)
    found = []
    for spec in ([], ["inner"]):
        activation_checkpointing.apply(model, spec, nothing)
        scale.grad = None
        out = model["inner"](torch.arange(6.0).view(2, 3), scale=scale, flag=True)
        (out["y"].sum() + out["z"].square().sum()).backward()
        found.append(scale.grad)
    assert torch.equal(*found)


def test_which_modules() -> None:
    model = Net()
    assert activation_checkpointing.apply(model, True, nothing) == ["blocks.0", "blocks.1", "blocks.2"]
    assert activation_checkpointing.apply(Net(), ["blocks.0*", "head"], nothing) == ["blocks.0", "head"]
    assert activation_checkpointing.apply(Net(), False, nothing) == []
    assert activation_checkpointing.apply(Net(), [], nothing) == []
    stock = Net()
    assert list(model.state_dict()) == list(stock.state_dict())
    # By name: a parametrised module has a class of its own.
    assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in stock.modules()]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert float(copied.blocks[0](torch.ones(4, 8)).detach().abs().max()) == 0.0


def test_what_matches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"`block\.\*` matches no module.*`embed`, `blocks`"):
        activation_checkpointing.apply(Net(), ["head", "block.*"], nothing)
    with pytest.raises(InputError, match="no ModuleList or Sequential"):
        activation_checkpointing.apply(nn.Bilinear(2, 2, 2), True, nothing)


def test_evaluation_and_inference_are_plain() -> None:
    calls = []

    def counted() -> tuple[nullcontext[None], nullcontext[None]]:
        calls.append(1)
        return nothing()

    model = nn.Sequential(nn.Linear(3, 3))
    activation_checkpointing.apply(model, True, counted)
    model.eval()(torch.zeros(1, 3))
    with torch.no_grad():
        model.train()(torch.zeros(1, 3))
    assert calls == []
    model(torch.zeros(1, 3))
    assert calls == [1]


def test_an_input_changed_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))
    activation_checkpointing.apply(model, ["1"], nothing)
    with pytest.raises(TaskError, match="`1` was changed in place"):
        model(torch.randn(2, 3)).sum().backward()


def test_a_forward_that_differs_is_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self, later: int) -> None:
            super().__init__()
            self.a, self.calls, self.later = nn.Linear(3, 3), 0, later

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for _ in range(2 if self.calls == 1 else self.later):
                x = self.a(x).tanh()
            return x[:, :2] if self.calls > 1 and self.later == 2 else x * x

    for later in (0, 1):
        model = nn.Sequential(Fickle(later))
        activation_checkpointing.apply(model, True, nothing)
        with pytest.raises(TaskError, match="`0` computes something else"):
            model(torch.randn(2, 3)).sum().backward()


def test_the_users_exception_comes_through() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.calls = nn.Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("in the repetition")
            return self.a(x).tanh()

    model = nn.Sequential(Broken())
    activation_checkpointing.apply(model, True, nothing)
    with pytest.raises(ValueError, match="in the repetition"):
        model(torch.randn(2, 3)).sum().backward()


def test_the_compiler_is_not_imported() -> None:
    """torch's own checkpointing imports torch._dynamo at its first call, which takes more than a second."""
    code = """
import sys, torch
from torch import nn
from contextlib import nullcontext
from verbund.mesh import activation_checkpointing
model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
activation_checkpointing.apply(model, True, lambda: (nullcontext(), nullcontext()))
model(torch.zeros(2, 3)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
