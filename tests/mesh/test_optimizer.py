"""Optimisers by name: arguments, groups, implementations, start-up, loss scale."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from verbund.errors import InputError, JobError, RunFailed, TaskError
from verbund.job import Group, Optimizer
from verbund.mesh import optimizer as optimizers
from verbund.mesh.optimizer import LossScale, build, check


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def spec(name: str = "adamw", **settings: Any) -> Optimizer:
    return Optimizer(name=name, **settings)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(6, 4, generator=random)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("name", "reference", "arguments"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("AdamW", torch.optim.AdamW, {"betas": [0.8, 0.99], "eps": 1e-6}),
        ("ADAM", torch.optim.Adam, {"amsgrad": True}),
        ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.1}),
        ("rmsprop", torch.optim.RMSprop, {"centered": True}),
        ("nadam", torch.optim.NAdam, {}),
        ("adafactor", torch.optim.Adafactor, {}),
    ],
)
def test_an_optimiser_by_name_steps_as_torchs_plain_one(name: str, reference: Any, arguments: dict[str, Any]) -> None:
    ours, theirs = model(), model()
    optimizer = build(ours.named_parameters(), spec(name, lr=0.01, **arguments))
    assert type(optimizer) is reference
    plain = reference(theirs.parameters(), lr=0.01, foreach=False, **arguments)
    for a, b in zip(train(ours, optimizer), train(theirs, plain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_the_fused_implementation_is_the_default(name: str) -> None:
    assert build(model().named_parameters(), spec(name)).defaults["fused"] is True
    assert not build(model().named_parameters(), spec(name, fused=False)).defaults["fused"]
    chosen = build(model().named_parameters(), spec(name, foreach=True))
    assert chosen.defaults["foreach"] is True
    assert not chosen.defaults["fused"]


def test_lists_of_tensors_are_second() -> None:
    assert build(model().named_parameters(), spec("rmsprop")).defaults["foreach"] is True


@pytest.mark.parametrize(
    "arguments", [{}, {"nesterov": True}, {"dampening": 0.3, "weight_decay": 0.1, "maximize": True}]
)
def test_a_parameter_may_be_used_late(arguments: dict[str, Any]) -> None:
    """Torch's own fused SGD begins the moments of all parameters or of none."""
    ours, theirs = [nn.Parameter(torch.ones(3)) for _ in range(2)], [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = build([("a", ours[0]), ("b", ours[1])], spec("sgd", momentum=0.9, **arguments))
    assert optimizer.defaults["fused"] is True
    plain = torch.optim.SGD(theirs, lr=1e-3, momentum=0.9, foreach=False, **arguments)
    for step in range(6):
        for index, both in enumerate(zip(ours, theirs, strict=True)):
            for parameter in both:
                parameter.grad = torch.full((3,), step + 1.0) if step >= 2 * index else None
        optimizer.step()
        plain.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_all_of_torchs_optimisers_can_be_built_or_say_why_not() -> None:
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or name == "Optimizer":
            continue
        if name in ("LBFGS", "SparseAdam"):
            assert "`" + name.lower() + "`" in str(check(spec(name))[0])
            continue
        assert check(spec(name)) == []
        matrices = [(n, p) for n, p in model().named_parameters() if p.ndim == 2]
        assert type(build(matrices, spec(name))) is kind


def groups_of(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def test_groups_by_pattern() -> None:
    net = model()
    optimizer = build(
        net.named_parameters(),
        spec(
            lr=0.1,
            weight_decay=0.5,
            groups=[
                Group(match="1.*", weight_decay=0),
                Group(match=["*.bias", "nothing.*"], weight_decay=0.0),
                Group(match="0.*", scale_lr=0.5, betas=[0.5, 0.6]),
            ],
        ),
    )
    found = groups_of(optimizer)
    assert found.keys() == dict(net.named_parameters()).keys()
    assert {name: group["weight_decay"] for name, group in found.items()} == {
        "0.weight": 0.5,
        "0.bias": 0,
        "1.weight": 0,
        "1.bias": 0,
        "2.weight": 0.5,
        "2.bias": 0,
    }
    assert found["0.weight"]["lr"] == found["0.weight"]["initial_lr"] == pytest.approx(0.05)
    assert found["0.weight"]["betas"] == (0.5, 0.6)
    assert found["2.weight"]["lr"] == 0.1
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert parameter is dict(net.named_parameters())[name]


def test_equal_arguments_share_one_group() -> None:
    same = [Group(match="*.bias", weight_decay=0.0), Group(match="1.*", weight_decay=0.0)]
    assert len(build(model().named_parameters(), spec(groups=same)).param_groups) == 2
    unlike = [Group(match="*.bias", lr=0.25), Group(match="1.*", weight_decay=0.0)]
    assert len(build(model().named_parameters(), spec(groups=unlike)).param_groups) == 3
    assert groups_of(build(model().named_parameters(), spec(groups=unlike)))["0.bias"]["lr"] == 0.25


def test_a_group_that_holds_all_leaves_no_empty_rest() -> None:
    assert len(build(model().named_parameters(), spec(groups=[Group(match="*", lr=0.5)])).param_groups) == 1


def test_a_group_that_matches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"groups\.0\.match: `\*\.bais` matches no parameter.*0\.weight"):
        build(model().named_parameters(), spec(groups=[Group(match="*.bais")]))
    shadowed = [Group(match="*", weight_decay=0.0), Group(match="*.bias", lr=0.1)]
    with pytest.raises(InputError, match=r"groups\.1\.match: all parameters that `\*\.bias`.*earlier group"):
        build(model().named_parameters(), spec(groups=shadowed))


def test_frozen_and_tied_parameters() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    twice = [*net.named_parameters(), ("alias", net[2].weight)]
    optimizer = build(twice, spec(groups=[Group(match="0.weight", lr=0.5)]))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 5
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(TaskError, match="no parameter to train"):
        build(net.named_parameters(), spec())


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"name": "adamv"}, "name", "Did you mean `adam"),
        ({"name": "LBFGS"}, "name", "evaluates the loss several times"),
        ({"weight_decya": 0.1}, "weight_decya", "Did you mean `weight_decay`"),
        ({"params": 3}, "params", "has no argument"),
        ({"weight_decay": -1.0}, "weight_decay", "invalid weight_decay value: -1.0"),
        ({"weight_decay": "much"}, "weight_decay", "a number is needed, but is 'much'"),
        ({"betas": [0.9]}, "betas", "a list of 2 numbers"),
        ({"betas": [0.9, 1.5]}, "betas", "invalid beta parameter at index 1"),
        ({"amsgrad": 1}, "amsgrad", "true or false"),
        ({"fused": "yes"}, "fused", "true or false"),
        ({"name": "sgd", "nesterov": True}, "nesterov", "requires a momentum"),
        ({"fused": True, "foreach": True}, "fused", "cannot be"),
        ({"groups": [Group(match="*", moment=0.1)]}, "groups.0.moment", "has no argument"),
        ({"groups": [Group(match="*", weight_decay=-1.0)]}, "groups.0.weight_decay", "invalid weight_decay"),
        ({"groups": [Group(match="*", lr=-1.0)]}, "groups.0.lr", "invalid learning rate: -1.0"),
        ({"groups": [Group(match="*", fused=False)]}, "groups.0.fused", "the whole optimiser"),
        ({"groups": [Group(match="*", lr=0.1, scale_lr=0.1)]}, "groups.0.scale_lr", "not both"),
    ],
)
def test_wrong_arguments_are_named(settings: dict[str, Any], key: str, words: str) -> None:
    problems = check(spec(**settings))
    assert [problem.where for problem in problems] == [f"train.optimizer.{key}"]
    assert words in str(problems[0])
    with pytest.raises(JobError):
        build(model().named_parameters(), spec(**settings))


def test_all_problems_are_reported_at_once() -> None:
    found = check(spec(beta=[0.9], epz=1e-8, groups=[]))
    assert [problem.where for problem in found] == ["train.optimizer.beta", "train.optimizer.epz"]


def test_an_optimiser_that_cannot_take_the_model_says_so() -> None:
    with pytest.raises(InputError, match=r"train\.optimizer: `muon` cannot train this model.*2D"):
        build(model().named_parameters(), spec("muon"))


SUBPROCESS = """
import sys, torch
from verbund.job import Group, Optimizer
from verbund.mesh.optimizer import build, check

for name in ("sgd", "adamw", "rmsprop", "adam", "nadam"):
    net = torch.nn.Linear(3, 2)
    spec = Optimizer(name=name, groups=[Group(match="bias", weight_decay=0.0)])
    assert not check(spec)
    before = net.weight.detach().clone()
    optimizer = build(net.named_parameters(), spec)
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, net.weight)
    assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert net.weight.grad is None
    assert "torch._dynamo" not in sys.modules, name
print("free")
"""


def test_nothing_of_the_compiler_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SUBPROCESS], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("free", 0), done.stderr


def test_other_internals_of_torch_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that were not made by the decorators we know stay as they are, and training goes on."""

    class Foreign(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    step = Foreign.step
    monkeypatch.setattr(optimizers, "_classes", lambda: {"foreign": Foreign})
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    optimizers.without_dynamo()
    assert Foreign.step is step
    assert optimizers._wrapped(step, "_use_grad") is None
    assert optimizers._wrapped(len, "inner") is None


def test_a_differentiable_step_cannot_be_asked_for() -> None:
    assert "has no argument" in str(check(spec(differentiable=True))[0])


def test_state_survives_a_copy() -> None:
    net, other = model(), model()
    first = build(net.named_parameters(), spec(lr=0.01))
    train(net, first, 3)
    other.load_state_dict(net.state_dict())
    second = build(other.named_parameters(), spec(lr=0.01))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for a, b in zip(train(net, first, 3), train(other, second, 3), strict=True):
        assert torch.equal(a, b)


def test_the_loss_scale_halves_and_doubles() -> None:
    scale = LossScale(1024.0)
    assert not scale.update(float("inf"))
    assert not scale.update(float("nan"))
    assert scale.scale == 256.0
    for _ in range(1999):
        assert scale.update(1.0)
    assert scale.scale == 256.0
    resumed = LossScale()
    resumed.load(scale.state())
    assert resumed.update(0.0)
    assert resumed.scale == 512.0
    assert resumed.state() == {"scale": 512.0, "good_steps": 0}
    for _ in range(1999):
        resumed.update(1.0)
    resumed.update(float("inf"))
    resumed.update(1.0)
    assert resumed.scale == 256.0  # an overflow starts the count anew


def test_gradients_that_never_are_finite_end_the_run() -> None:
    scale = LossScale(1.0)
    for _ in range(16):
        assert not scale.update(float("nan"))
    assert scale.scale == 2.0**-16
    with pytest.raises(RunFailed, match="not finite at any loss scale"):
        scale.update(float("nan"))


def test_what_others_call_an_argument_is_understood() -> None:
    (problem,) = check(spec("adamw", learning_rate=0.1))
    assert problem.fix == "Did you mean `lr`?"
