"""torch's random functions, drawing from keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verbund.randomness import draws

Shape = torch.Size | tuple[int, ...]
Keys = Callable[[Shape, torch.device], Tensor]
KeysOf = Callable[[Shape, torch.device, str, bool], Tensor]
Replacement = Callable[[KeysOf, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# alpha and scale of SELU (Klambauer et al., "Self-Normalizing Neural Networks", 2017): what alpha dropout sets to.
_ALPHA = -1.7580993408473766


def dropout_of(module: nn.Module, x: Tensor, keys: Keys) -> Tensor:
    """What a module of the dropout family does in training."""
    p = float(module.p)  # type: ignore[arg-type]
    if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        return alpha_dropout(x, p, keys, features=isinstance(module, nn.FeatureAlphaDropout))
    result = dropout(x, p, keys, features=not isinstance(module, nn.Dropout))
    return x.copy_(result) if getattr(module, "inplace", False) and not x.requires_grad else result


def dropout(x: Tensor, p: float, keys: Keys, features: bool = False) -> Tensor:
    """Zeroes elements, or whole features (dimension 1), with probability p and scales the rest by 1 / (1 − p)."""
    if x.numel() == 0:
        return x
    factor = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return x * _mask(x, p, keys, features, factor)


def alpha_dropout(x: Tensor, p: float, keys: Keys, features: bool = False) -> Tensor:
    """Dropout that keeps mean and variance of SELU activations (Klambauer et al., 2017, section 3)."""
    if x.numel() == 0:
        return x
    if p >= 1.0:
        return torch.zeros_like(x)
    mask = _mask(x, p, keys, features, 1.0)
    a = ((1.0 - p) * (1.0 + p * _ALPHA**2)) ** -0.5
    return (x * mask + _ALPHA * (1.0 - mask)) * a - a * _ALPHA * p


def _mask(x: Tensor, p: float, keys: Keys, features: bool, factor: float) -> Tensor:
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if features else tuple(x.shape)
    rows = keys(shape, x.device)
    count = math.prod(shape) // rows.shape[1]
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return draws.keep(rows, count, p, dtype, factor).view(shape)


# -- replacements for functions -------------------------------------------------------------------------------------


def _bound(keys: KeysOf, what: str) -> Keys:
    return lambda shape, device: keys(shape, device, what, True)


def _dropouts(features: bool, alpha: bool) -> Replacement:
    def replace(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, p, training, inplace = _arguments(args, kwargs, ("input", "p", "training", "inplace"), (None, 0.5, True, False))
        if "train" in kwargs:
            training = kwargs["train"]
        if not training or p == 0.0:
            return x
        apply = alpha_dropout if alpha else dropout
        result = apply(x, p, _bound(keys, getattr(func, "__name__", "dropout")), features)
        return x.copy_(result) if inplace and not x.requires_grad else result

    return replace


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], defaults: tuple[Any, ...]) -> list[Any]:
    values = [kwargs.get(name, default) for name, default in zip(names, defaults, strict=True)]
    values[: len(args)] = args[: len(values)]
    return values


def _attention(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, p, causal = _arguments(args, kwargs, names, (None, None, None, None, 0.0, False))
    if p == 0.0:
        return func(*args, **kwargs)
    scale = kwargs.get("scale") or query.shape[-1] ** -0.5
    if kwargs.get("enable_gqa"):
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query * scale) @ key.transpose(-2, -1)
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = dropout(scores.softmax(-1), p, _bound(keys, "scaled_dot_product_attention"))
    return weights @ value


def _multi_head(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs torch's own function, with the two that draw in it replaced while it runs."""

    def keyed_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropout(x, p, _heads(keys)) if training and p > 0 else x

    def keyed_attention(*inner: Any, **options: Any) -> Any:
        return _attention(keys, plain_attention, inner, options)

    plain_dropout, plain_attention = functional.dropout, functional.scaled_dot_product_attention
    functional.dropout, functional.scaled_dot_product_attention = keyed_dropout, keyed_attention
    try:
        return func(*args, **kwargs)
    finally:
        functional.dropout, functional.scaled_dot_product_attention = plain_dropout, plain_attention


def _heads(keys: KeysOf) -> Keys:
    # The weights come as [batch · heads, T, S], each sample's heads together.
    return _bound(keys, "multi_head_attention_forward")


def _filled(kind: str) -> Replacement:
    """Functions that make a new tensor: rand, randn, randint and their `_like`s."""

    def replace(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments, options = list(args), dict(kwargs)
        bounds: tuple[int, int] | None = None
        like = getattr(func, "__name__", "").endswith("_like")
        if kind == "integers":
            head = [arguments.pop(0)] if like else []
            numbers = [options.pop(name) for name in ("low", "high") if name in options]
            while arguments and isinstance(arguments[0], int) and len(numbers) < 2:
                numbers.append(arguments.pop(0))
            bounds = (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
            arguments = head + arguments
        empty = _empty(like, arguments, options, kind)
        empty.copy_(_values(keys, empty, kind, getattr(func, "__name__", kind), bounds))
        return empty.requires_grad_(bool(options.get("requires_grad")))

    return replace


def _empty(like: bool, arguments: list[Any], options: dict[str, Any], kind: str) -> Tensor:
    options = {name: value for name, value in options.items() if name not in ("requires_grad", "generator")}
    if like:
        source = arguments[0] if arguments else options.pop("input")
        return torch.empty_like(source, **options)
    if kind == "integers":
        options.setdefault("dtype", torch.int64)
    size = options.pop("size", None)
    if size is None:
        size = arguments[0] if arguments and isinstance(arguments[0], (tuple, list)) else tuple(arguments)
    return torch.empty(tuple(size), **options)


def _values(keys: KeysOf, target: Tensor, kind: str, what: str, bounds: tuple[int, int] | None = None) -> Tensor:
    shape = tuple(target.shape)
    if target.numel() == 0:
        return torch.empty_like(target)
    rows = keys(shape, target.device, what, False)
    count = target.numel() // rows.shape[1]
    dtype = target.dtype if target.is_floating_point() else torch.float32
    if kind == "integers":
        assert bounds is not None
        return draws.integers(rows, count, *bounds).view(shape)
    drawn = {"uniform": draws.uniform, "normal": draws.normal, "exponential": draws.exponential}[kind]
    return drawn(rows, count, dtype).view(shape)


def _normal(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mean, std, size = _arguments(args, kwargs, ("mean", "std", "size"), (0.0, 1.0, None))
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        target = torch.empty_like(mean if isinstance(mean, Tensor) else std)
        if isinstance(mean, Tensor) and isinstance(std, Tensor):
            target = torch.empty(torch.broadcast_shapes(mean.shape, std.shape), dtype=mean.dtype, device=mean.device)
    else:
        options = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
        target = torch.empty(tuple(size), **options)
    return _values(keys, target, "normal", "normal") * std + mean


def _in_place(kind: str) -> Replacement:
    """uniform_, normal_ and exponential_ of a tensor."""

    def replace(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Tensor = args[0]
        names, defaults = {
            "uniform": (("from", "to"), (0.0, 1.0)),
            "normal": (("mean", "std"), (0.0, 1.0)),
            "exponential": (("lambd", "_"), (1.0, None)),
        }[kind]
        first, second = _arguments(args[1:], kwargs, names, defaults)
        values = _values(keys, target, kind, f"{kind}_")
        if kind == "uniform":
            values = values * (second - first) + first
        elif kind == "normal":
            values = values * second + first
        else:
            values = values / first
        with torch.no_grad():
            return target.copy_(values)

    return replace


def _bernoulli(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, p = _arguments(args, kwargs, ("input", "p"), (None, None))
    return _coins(keys, torch.empty_like(source), source if p is None else p)


def _bernoulli_(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, p = _arguments(args, kwargs, ("input", "p"), (None, 0.5))
    with torch.no_grad():
        return target.copy_(_coins(keys, target, p))


def _coins(keys: KeysOf, target: Tensor, p: Tensor | float) -> Tensor:
    if target.numel() == 0:
        return target
    shape = tuple(target.shape)
    rows = keys(shape, target.device, "bernoulli", False)
    count = target.numel() // rows.shape[1]
    if isinstance(p, Tensor):
        each = p.expand(shape).reshape(rows.shape[1], count)
        return draws.bernoulli_each(rows, count, each, target.dtype).view(shape)
    return draws.bernoulli(rows, count, float(p), target.dtype).view(shape)


def _gumbel(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Jang, Gu and Poole, "Categorical Reparameterization with Gumbel-Softmax", 2017, equation 2."""
    logits, tau, hard, _, dim = _arguments(args, kwargs, ("logits", "tau", "hard", "eps", "dim"), (None, 1.0, False, 0, -1))
    noise = -_values(keys, logits, "exponential", "gumbel_softmax").log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    one = torch.zeros_like(logits).scatter_(dim, index, 1.0)
    return one - soft.detach() + soft


def _rrelu(keys: KeysOf, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "lower", "upper", "training", "inplace")
    x, lower, upper, training, _ = _arguments(args, kwargs, names, (None, 1 / 8, 1 / 3, False, False))
    if not training:
        return func(*args, **kwargs)
    slope = _values(keys, x, "uniform", "rrelu") * (upper - lower) + lower
    return torch.where(x >= 0, x, x * slope)


REPLACED: dict[Callable[..., Any], Replacement] = {
    functional.dropout: _dropouts(features=False, alpha=False),
    functional.dropout1d: _dropouts(features=True, alpha=False),
    functional.dropout2d: _dropouts(features=True, alpha=False),
    functional.dropout3d: _dropouts(features=True, alpha=False),
    functional.alpha_dropout: _dropouts(features=False, alpha=True),
    functional.feature_alpha_dropout: _dropouts(features=True, alpha=True),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head,
    functional.gumbel_softmax: _gumbel,
    functional.rrelu: _rrelu,
    torch.dropout: _dropouts(features=False, alpha=False),
    torch.feature_dropout: _dropouts(features=True, alpha=False),
    torch.alpha_dropout: _dropouts(features=False, alpha=True),
    torch.rand: _filled("uniform"),
    torch.rand_like: _filled("uniform"),
    torch.randn: _filled("normal"),
    torch.randn_like: _filled("normal"),
    torch.randint: _filled("integers"),
    torch.randint_like: _filled("integers"),
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
    Tensor.random_: "Tensor.random_",
    Tensor.geometric_: "Tensor.geometric_",
    Tensor.cauchy_: "Tensor.cauchy_",
    Tensor.log_normal_: "Tensor.log_normal_",
    functional.fractional_max_pool2d: "fractional_max_pool2d",
    functional.fractional_max_pool3d: "fractional_max_pool3d",
}
