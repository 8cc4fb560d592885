"""Optimisers by name, their parameter groups, and the loss scale of fp16."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from verbund.errors import InputError, JobError, Problem, RunFailed, TaskError, nearest
from verbund.job import Group, Optimizer
from verbund.mesh.ftrl import FTRL
from verbund.mesh.schedule import BASE

# Optimisers that treat every element for itself: a share of a parameter can be trained by them.
ELEMENTWISE = frozenset(
    ("sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "rprop", "adagrad", "adadelta", "asgd", "ftrl")
)
_REFUSED = {
    "lbfgs": "`lbfgs` evaluates the loss several times a step, on whole batches that are not at hand then",
    "sparseadam": "`sparseadam` takes sparse gradients only, and gradients are dense here",
}
# What other programs call them.
_MEANT = {"learning_rate": "lr", "epsilon": "eps", "l2": "weight_decay", "beta1": "betas", "beta2": "betas"}
_NOT_OURS = frozenset(("self", "params", "differentiable"))
_WHOLE = frozenset(("foreach", "fused", "capturable"))
_FAST_DEVICES = frozenset(("cpu", "cuda"))
_LOWEST_SCALE = 2.0**-16
_HIGHEST_SCALE = 2.0**100
_GROWTH_STEPS = 2000


def build(
    parameters: Iterable[tuple[str, nn.Parameter]], spec: Optimizer, every: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """The optimiser that `spec` describes.

    Every parameter goes to the first group of `spec` one of whose patterns matches its name, else to the
    rest. Parameters with the same arguments share one group of the optimiser; each has its names in
    `param_names` and its rate before the schedule in `initial_lr`. Frozen parameters are left out, tied ones
    counted once. Where the user does not say otherwise the fused implementation is used if the class has one
    for such parameters, else the one over lists of tensors.

    Args:
        parameters: of the model, by name.
        spec: the job's.
        every: the names of all trained parameters of a model of which others hold the rest.

    Raises:
        JobError: on an unknown name or argument, or a value that the optimiser refuses; all problems at once.
        InputError: if a group matches no parameter, or the optimiser cannot take these parameters.
        TaskError: if the model has no parameter to train.
    """
    if problems := check(spec):
        raise JobError(problems)
    without_dynamo()
    kind = _classes()[spec.name.lower()]
    named = list({id(parameter): (name, parameter) for name, parameter in parameters}.values())
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise TaskError(
            "the model has no parameter to train", where="model()", fix="Give it one that requires a gradient"
        )
    base = _converted(kind, {"lr": spec.lr, **spec.arguments()})
    groups: dict[str, dict[str, Any]] = {}
    for index, members in _assign(named, spec.groups, every):
        arguments = base if index is None else _converted(kind, {**base, **_group_arguments(spec, index)})
        chosen = [(name, parameter) for name, parameter in members if parameter.requires_grad]
        group = groups.setdefault(repr(sorted(arguments.items())), {"params": [], **arguments})
        group["params"] += chosen
    filled = [group for group in groups.values() if group["params"]]
    for group in filled:
        group[BASE] = group["lr"]
    try:
        built = kind(filled, **{**base, **_implementation(kind, base, [p for _, p in trained])})
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"`{spec.name}` cannot train this model: {_sentence(error)}",
            where="train.optimizer",
            fix="Choose another optimiser, or give the arguments it needs",
        ) from error
    if isinstance(built, torch.optim.SGD):
        built.register_step_pre_hook(_missing_moments)
    return built


def state_share(spec: Optimizer) -> float:
    """How many bytes an optimiser keeps for each byte of a parameter, from a step with a small one."""
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    built = build([("", parameter)], spec.model_copy(update={"groups": []}))
    built.step()
    kept = sum(value.nbytes for value in built.state[parameter].values() if isinstance(value, Tensor) and value.dim())
    return kept / parameter.nbytes


def check(spec: Optimizer) -> list[Problem]:
    """What is wrong with the name and the arguments of an optimiser, without a model."""
    name = spec.name.lower()
    if name in _REFUSED:
        return [Problem("train.optimizer.name", _REFUSED[name], "Choose another, e.g. `adamw`")]
    known = _classes()
    if name not in known:
        return [Problem("train.optimizer.name", f"`{spec.name}` is no optimiser", nearest(name, sorted(known)))]
    without_dynamo()
    kind = known[name]
    base = {"lr": spec.lr, **spec.arguments()}
    problems = _argument_problems(kind, base, "train.optimizer")
    if problems:
        return problems
    problems += _value_problems(kind, base, base, "train.optimizer")
    for index, group in enumerate(spec.groups):
        where = f"train.optimizer.groups.{index}"
        extra = dict(group.model_extra or {})
        found = _argument_problems(kind, extra, where)
        found += [
            Problem(f"{where}.{key}", f"`{key}` holds for the whole optimiser", f"Give `train.optimizer.{key}`")
            for key in extra
            if key in _WHOLE
        ]
        if group.scale_lr is not None and "lr" in extra:
            found.append(Problem(f"{where}.scale_lr", "give `lr` or `scale_lr`, not both"))
        if not found and not problems:
            own = _group_arguments(spec, index)
            found = _value_problems(kind, {**base, **own}, own, where)
        problems += found
    return problems


def without_dynamo() -> None:
    """Lets torch's optimisers be built and stepped without importing `torch._dynamo`, which takes a second.

    Torch imports it at the first call of an optimiser's methods only to keep a compiler from tracing them.
    Methods that it would wrap for this are told that they are wrapped already (torch looks for an attribute),
    and `step` gets a wrapper that sets the gradient mode as torch's does, without the marks for the compiler.
    Under compilation the original runs. Where torch's internals are not as expected, they stay as they are.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        wrapped = _wrapped(method, "inner")
        if wrapped is not None and not hasattr(wrapped, "__dynamo_disable"):
            setattr(wrapped, "__dynamo_disable", wrapped)
    for kind in _classes().values():
        step = vars(kind).get("step")
        wrapped = _wrapped(step, "_use_grad")
        if step is not None and wrapped is not None:
            setattr(kind, "step", _plain_step(step, wrapped))  # noqa: B010 (mypy refuses assigning a method)


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius and others, 2018).

    The scale is halved when gradients overflow and doubled after 2000 steps in a row without.

    Args:
        scale: the first factor on the loss.
    """

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = float(scale)
        self._good_steps = 0

    def update(self, norm: float) -> bool:
        """Takes note of the global norm of a step's gradients.

        Returns:
            Whether it is finite, so that the step may be taken.

        Raises:
            RunFailed: if gradients overflow at every scale, so that fp16 is not the cause.
        """
        if math.isfinite(norm):
            self._good_steps += 1
            if self._good_steps >= _GROWTH_STEPS:
                self.scale = min(self.scale * 2.0, _HIGHEST_SCALE)
                self._good_steps = 0
            return True
        self.scale /= 2.0
        self._good_steps = 0
        if self.scale < _LOWEST_SCALE:
            raise RunFailed(
                "the gradients are not finite at any loss scale",
                where="train.precision",
                fix="Look for infinite inputs, lower the learning rate, or use another precision",
            )
        return False

    def state(self) -> dict[str, float | int]:
        """Plain values for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: Mapping[str, float | int]) -> None:
        """Continues from `state()`."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])


@functools.cache
def _classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """The optimisers by their names in lower case: those of `torch.optim` that are not refused, and our own."""
    found: dict[str, Callable[..., torch.optim.Optimizer]] = {"ftrl": FTRL}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found[name.lower()] = kind
    return {name: kind for name, kind in found.items() if name not in _REFUSED}


def _arguments(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: parameter for name, parameter in inspect.signature(kind).parameters.items() if name not in _NOT_OURS}


def _argument_problems(kind: Callable[..., Any], given: Mapping[str, Any], where: str) -> list[Problem]:
    """Unknown names and values of the wrong type."""
    known = _arguments(kind)
    problems = []
    for key, value in given.items():
        if key not in known:
            what = f"`{getattr(kind, '__name__', kind)}` has no argument `{key}`"
            meant = _MEANT.get(key)
            fix = f"Did you mean `{meant}`?" if meant in known else nearest(key, sorted(known))
            problems.append(Problem(f"{where}.{key}", what, fix))
        elif wanted := _wanted(known[key], value):
            problems.append(Problem(f"{where}.{key}", f"{wanted} is needed, but is {value!r}"))
    return problems


def _wanted(parameter: inspect.Parameter, value: Any) -> str | None:
    """What an argument has to be, if `value` is not; judged by its default and its annotation."""
    default = parameter.default
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default) and all(map(_number, value))
        return None if fits else f"a list of {len(default)} numbers"
    text = str(parameter.annotation)
    if isinstance(default, bool) or (default is None and "bool" in text):
        return None if isinstance(value, bool) else "true or false"
    if default is None and "str" in text:
        return None if isinstance(value, str) else "a text"
    if isinstance(default, int | float):
        return None if _number(value) else "a number"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _converted(kind: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the class wants them: TOML has lists only where it wants tuples."""
    known = _arguments(kind)
    return {key: tuple(value) if isinstance(known[key].default, tuple) else value for key, value in given.items()}


def _value_problems(
    kind: Callable[..., Any], arguments: Mapping[str, Any], suspects: Mapping[str, Any], where: str
) -> list[Problem]:
    """What the class itself says to these values, found by building one over a dummy.

    Its message does not name the argument: that is the one without which it would not complain.
    """
    error = _complaint(kind, arguments)
    if error is None:
        return []
    for key in suspects:
        rest = {other: value for other, value in arguments.items() if other != key}
        if _complaint(kind, rest) is None:
            return [Problem(f"{where}.{key}", _sentence(error))]
    return [Problem(where, _sentence(error))]


def _complaint(kind: Callable[..., Any], arguments: Mapping[str, Any]) -> Exception | None:
    try:
        kind([nn.Parameter(torch.zeros(1, 1))], **_converted(kind, arguments))
    except (ValueError, TypeError, RuntimeError) as error:
        return error
    return None


def _group_arguments(spec: Optimizer, index: int) -> dict[str, Any]:
    """The arguments in which a group differs from the rest."""
    group = spec.groups[index]
    own = dict(group.model_extra or {})
    if group.scale_lr is not None:
        own["lr"] = spec.lr * group.scale_lr
    return own


def _assign(
    named: list[tuple[str, nn.Parameter]], groups: list[Group], every: Sequence[str]
) -> list[tuple[int | None, list[tuple[str, nn.Parameter]]]]:
    """The parameters of the rest (None) and of each group of the job, the rest first."""
    members: dict[int | None, list[tuple[str, nn.Parameter]]] = {
        None: [],
        **{i: [] for i in range(len(groups))},
    }
    patterns = [[group.match] if isinstance(group.match, str) else list(group.match) for group in groups]

    def matches(name: str, index: int) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns[index])

    for name, parameter in named:
        first = next((index for index in range(len(groups)) if matches(name, index)), None)
        members[first].append((name, parameter))
    for index in range(len(groups)):
        if members[index] or any(matches(name, index) for name in every if name not in dict(named)):
            continue
        text = ", ".join(f"`{pattern}`" for pattern in patterns[index])
        where = f"train.optimizer.groups.{index}.match"
        if any(matches(name, index) for name, _ in named):
            raise InputError(
                f"all parameters that {text} matches are in an earlier group already",
                where=where,
                fix="Put the more special group first",
            )
        shown = ", ".join(name for name, _ in named[:6]) + (", ..." if len(named) > 6 else "")
        raise InputError(f"{text} matches no parameter", where=where, fix=f"There are: {shown}")
    return list(members.items())


def _implementation(
    kind: Callable[..., Any], given: Mapping[str, Any], parameters: list[nn.Parameter]
) -> dict[str, bool]:
    """The fastest implementation that the class has for these parameters, unless the user chose one."""
    if "fused" in given or "foreach" in given:
        return {}
    plain = all(
        type(parameter) in (Tensor, nn.Parameter) and parameter.device.type in _FAST_DEVICES for parameter in parameters
    )
    known = _arguments(kind)
    if plain and "fused" in known and all(parameter.is_floating_point() for parameter in parameters):
        return {"fused": True}
    return {"foreach": True} if plain and "foreach" in known else {}


def _wrapped(method: Any, wrapper: str) -> Callable[..., Any] | None:
    """The function inside a method that torch's decorator made, whose inner function is called `wrapper`."""
    code = getattr(method, "__code__", None)
    if code is None or code.co_name != wrapper:
        return None
    inside: Callable[..., Any] | None = getattr(method, "__wrapped__", None)
    return inside


def _plain_step(original: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def plain(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(bool(self.defaults["differentiable"]))
            return step(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return plain


@torch.no_grad()
def _missing_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Begins the moments of parameters that are used for the first time where others have theirs, which the fused SGD
    cannot: such that after its step they are the gradient, as in the implementations that can."""
    for group in optimizer.param_groups:
        if not (momentum := group["momentum"]) or not group["fused"]:
            continue
        used = [parameter for parameter in group["params"] if parameter.grad is not None]
        missing = [p for p in used if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if len(missing) == len(used):
            continue
        for parameter in missing:
            moments = torch.zeros_like(parameter)
            if dampening := group["dampening"]:
                moments.add_(parameter.grad, alpha=-1.0 if group["maximize"] else 1.0)
                moments.add_(parameter, alpha=group["weight_decay"]).mul_(dampening / momentum)
            optimizer.state[parameter]["momentum_buffer"] = moments


def _sentence(error: Exception) -> str:
    """An exception of torch as a clause of ours."""
    text = str(error).strip().rstrip(".").splitlines()[0]
    return text[:1].lower() + text[1:]
