"""torch's random functions, drawing from keys.

`REPLACED` maps each function to what takes its place; a replacement gets the source of the numbers, the function and
its arguments. `REFUSED` are the random functions that have no keyed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from verbund.errors import TaskError
from verbund.randomness import draws
from verbund.randomness.dropouts import alpha_dropout, dropout, keep_mask
from verbund.randomness.source import Source

Replacement = Callable[[Source, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# -- arguments -------------------------------------------------------------------------------------------------------


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], defaults: tuple[Any, ...]
) -> list[Any]:
    values = [kwargs.get(name, default) for name, default in zip(names, defaults, strict=True)]
    values[: len(args)] = args[: len(values)]
    return values


@lru_cache(maxsize=64)
def _undispatched(function: FunctionType) -> Callable[..., Any]:
    """A copy of one of torch's Python functions that does not hand itself over to a mode once more; what it calls
    still does."""
    scope = {
        **function.__globals__,
        "has_torch_function": _never,
        "has_torch_function_unary": _never,
        "has_torch_function_variadic": _never,
    }
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _never(*_: Any) -> bool:
    return False


def _inner(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For functions written in Python whose random part is another function of this table."""
    assert isinstance(func, FunctionType)
    return source.call(_undispatched(func), args, kwargs)


# -- replacements ----------------------------------------------------------------------------------------------------


def _dropouts(features: bool = False, alpha: bool = False, inplace: bool = False) -> Replacement:
    def replace(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Those written in C++ call the third argument `train` and are in place by their name.
        if "train" in kwargs:
            kwargs = {**kwargs, "training": kwargs["train"]}
        names = ("input", "p", "training", "inplace")
        x, p, training, within = _arguments(args, kwargs, names, (None, 0.5, True, False))
        if not training or p == 0.0:
            return x
        apply = alpha_dropout if alpha else dropout
        return apply(source, x, float(p), func.__name__, features=features, inplace=within or inplace)

    return replace


def _native_dropout(
    source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    x, p, train = _arguments(args, kwargs, ("input", "p", "train"), (None, 0.5, True))
    if train is False or p == 0.0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = keep_mask(source, x, p, "native_dropout", False, 1.0, None)
    return x * mask * (1.0 / (1.0 - p) if p < 1.0 else 0.0), mask.to(torch.bool)


def _attention(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention written out, as the fused kernels draw inside (Vaswani et al., 2017, equation 1)."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, p, causal = _arguments(args, kwargs, names, (None, None, None, None, 0.0, False))
    if p == 0.0:
        return func(*args, **kwargs)
    given = kwargs.get("scale")
    scale = query.shape[-1] ** -0.5 if given is None else given
    if kwargs.get("enable_gqa"):
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query * scale) @ key.transpose(-2, -1)
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # Dimension 0 is the batch, or batch times heads; never the time.
    weights = dropout(source, scores.softmax(-1), p, "scaled_dot_product_attention", dimension=0)
    return weights.to(value.dtype) @ value


def _multi_head(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own function, with the two that draw in it replaced: its weights come as [batch · heads, T, S], each
    sample's heads together, or as [batch, heads, T, S]."""
    assert isinstance(func, FunctionType)
    plain = _undispatched(func)

    def keyed_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropout(source, x, p, func.__name__, dimension=0) if training and p > 0.0 else x

    def keyed_attention(*inner: Any, **options: Any) -> Any:
        return _attention(source, functional.scaled_dot_product_attention, inner, options)

    assert isinstance(plain, FunctionType)
    scope = {**plain.__globals__, "dropout": keyed_dropout, "scaled_dot_product_attention": keyed_attention}
    keyed = FunctionType(plain.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    keyed.__kwdefaults__ = func.__kwdefaults__
    return keyed(*args, **kwargs)


def _values(source: Source, target: Tensor, kind: str, what: str) -> Tensor:
    """Numbers for every element of `target`: of its type, or float32 where that is no float."""
    if target.is_complex():
        raise TaskError(
            f"`{what}` of complex numbers cannot be keyed by the sample",
            where="train.randomness",
            fix='Draw real and imaginary part, or set train.randomness = "worker" to draw from torch\'s own generator',
        )
    if target.numel() == 0:
        return torch.empty_like(target)
    drawn = {"uniform": draws.uniform, "normal": draws.normal, "exponential": draws.exponential}[kind]
    dtype = target.dtype if target.is_floating_point() else torch.float32
    return source.draw(
        tuple(target.shape), target.device, what, lambda keys, count: drawn(keys, count, dtype), batch=False
    )


def _filled(kind: str) -> Replacement:
    """Functions that make a new tensor: rand, randn and their `_like`s."""

    def replace(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        empty = _empty(func, list(args), dict(kwargs))
        return empty.copy_(_values(source, empty, kind, func.__name__)).requires_grad_(
            bool(kwargs.get("requires_grad"))
        )

    return replace


def _integers(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """randint(low=0, high, size) and randint_like(input, low=0, high)."""
    arguments, options = list(args), dict(kwargs)
    head = [arguments.pop(0)] if func.__name__.endswith("_like") and arguments else []
    numbers: list[int] = []
    while arguments and not isinstance(arguments[0], (tuple, list)) and len(numbers) < 2:
        numbers.append(int(arguments.pop(0)))
    named = {name: int(options.pop(name)) for name in ("low", "high") if name in options}
    high = named.get("high", numbers[-1] if numbers else 1)
    low = named.get("low", numbers[0] if len(numbers) == 2 or (numbers and "high" in named) else 0)
    if low >= high:
        raise ValueError(f"{func.__name__}: low = {low} must be below high = {high}")
    if not head:
        options.setdefault("dtype", torch.int64)
    empty = _empty(func, head + arguments, options)
    if empty.numel() == 0:
        return empty
    return empty.copy_(
        source.draw(
            tuple(empty.shape),
            empty.device,
            func.__name__,
            lambda keys, count: draws.integers(keys, count, low, high),
            batch=False,
        )
    )


def _empty(func: Callable[..., Any], arguments: list[Any], options: dict[str, Any]) -> Tensor:
    options = {name: value for name, value in options.items() if name not in ("requires_grad", "generator")}
    if func.__name__.endswith("_like"):
        return torch.empty_like(arguments[0] if arguments else options.pop("input"), **options)
    size = options.pop("size", None)
    if size is None:
        size = arguments[0] if arguments and isinstance(arguments[0], (tuple, list)) else tuple(arguments)
    return torch.empty(tuple(size), **options)


def _normal(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mean, std, size = _arguments(args, kwargs, ("mean", "std", "size"), (0.0, 1.0, None))
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if tensors:
        shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
        target = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    else:
        options = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
        target = torch.empty(tuple(size), **options)
    drawn = _values(source, target, "normal", "normal") * std + mean
    out: Tensor | None = kwargs.get("out")
    return drawn if out is None else out.copy_(drawn)


def _in_place(kind: str) -> Replacement:
    """uniform_, normal_ and exponential_ of a tensor."""
    names, defaults = {
        "uniform": (("self", "from", "to"), (None, 0.0, 1.0)),
        "normal": (("self", "mean", "std"), (None, 0.0, 1.0)),
        "exponential": (("self", "lambd"), (None, 1.0)),
    }[kind]

    def replace(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, *bounds = _arguments(args, kwargs, names, defaults)
        values = _values(source, target, kind, func.__name__)
        if kind == "uniform":
            values.mul_(bounds[1] - bounds[0]).add_(bounds[0])
        elif kind == "normal":
            values.mul_(bounds[1]).add_(bounds[0])
        else:
            values.div_(bounds[0])
        return target.copy_(values)

    return replace


def _bernoulli(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    probabilities, p = _arguments(args, kwargs, ("input", "p"), (None, None))
    out: Tensor | None = kwargs.get("out")
    drawn = _coins(source, probabilities.detach(), probabilities.detach() if p is None else p)
    return drawn if out is None else out.copy_(drawn)


def _bernoulli_(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, p = _arguments(args, kwargs, ("self", "p"), (None, 0.5))
    return target.copy_(_coins(source, target.detach(), p))


def _coins(source: Source, like: Tensor, p: Tensor | float) -> Tensor:
    if isinstance(p, Tensor):
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        target = torch.empty(like.shape, dtype=wide, device=like.device)
        return (_values(source, target, "uniform", "bernoulli") < p).to(like.dtype)
    if like.numel() == 0:
        return torch.empty_like(like)
    dtype = like.dtype
    return source.draw(
        tuple(like.shape),
        like.device,
        "bernoulli",
        lambda keys, count: draws.bernoulli(keys, count, p, dtype),
        batch=False,
    )


def _rrelu(inplace: bool) -> Replacement:
    """Randomised leaky ReLU (Xu et al., "Empirical Evaluation of Rectified Activations", 2015)."""

    def replace(source: Source, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "lower", "upper", "training", "inplace")
        x, lower, upper, training, within = _arguments(args, kwargs, names, (None, 1 / 8, 1 / 3, False, False))
        if not training:
            return func(*args, **kwargs)
        drawn = _values(source, x.detach(), "uniform", "rrelu").mul_(upper - lower).add_(lower)
        slope = torch.where(x.detach() >= 0, torch.ones_like(drawn), drawn)
        return x.mul_(slope) if inplace or within is True else x * slope

    return replace


_DROPOUT, _FEATURES = _dropouts(), _dropouts(features=True)
_ALPHAS, _ALPHA_FEATURES = _dropouts(alpha=True), _dropouts(features=True, alpha=True)

REPLACED: dict[Callable[..., Any], Replacement] = {
    functional.dropout: _DROPOUT,
    functional.dropout1d: _inner,
    functional.dropout2d: _inner,
    functional.dropout3d: _inner,
    functional.alpha_dropout: _ALPHAS,
    functional.feature_alpha_dropout: _ALPHA_FEATURES,
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head,
    functional.gumbel_softmax: _inner,
    functional.rrelu: _rrelu(inplace=False),
    torch.dropout: _DROPOUT,
    torch.dropout_: _dropouts(inplace=True),
    torch.native_dropout: _native_dropout,
    torch.feature_dropout: _FEATURES,
    torch.feature_dropout_: _dropouts(features=True, inplace=True),
    torch.alpha_dropout: _ALPHAS,
    torch.alpha_dropout_: _dropouts(alpha=True, inplace=True),
    torch.feature_alpha_dropout: _ALPHA_FEATURES,
    torch.feature_alpha_dropout_: _dropouts(features=True, alpha=True, inplace=True),
    torch.rrelu: _rrelu(inplace=False),
    torch.rrelu_: _rrelu(inplace=True),
    torch.rand: _filled("uniform"),
    torch.rand_like: _filled("uniform"),
    torch.randn: _filled("normal"),
    torch.randn_like: _filled("normal"),
    torch.randint: _integers,
    torch.randint_like: _integers,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _in_place("uniform"),
    Tensor.normal_: _in_place("normal"),
    Tensor.exponential_: _in_place("exponential"),
}

REFUSED: dict[Callable[..., Any], str] = {
    torch.randperm: "torch.randperm",
    torch.multinomial: "torch.multinomial",
    Tensor.multinomial: "Tensor.multinomial",
    torch.poisson: "torch.poisson",
    torch.binomial: "torch.binomial",
    torch._standard_gamma: "a gamma, beta or Student distribution",
    torch._sample_dirichlet: "a Dirichlet distribution",
    Tensor.random_: "Tensor.random_",
    Tensor.geometric_: "Tensor.geometric_",
    Tensor.cauchy_: "Tensor.cauchy_",
    Tensor.log_normal_: "Tensor.log_normal_",
    functional.fractional_max_pool2d: "fractional_max_pool2d",
    functional.fractional_max_pool2d_with_indices: "fractional_max_pool2d",
    functional.fractional_max_pool3d: "fractional_max_pool3d",
    functional.fractional_max_pool3d_with_indices: "fractional_max_pool3d",
}
