"""Where in a model's forward pass its parameters are used: what each pipeline stage has to hold.

The forward pass is run once on the meta device, where nothing is computed or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from verbund.cluster.worker import describe
from verbund.errors import InputError


@dataclass
class Trace:
    """What a forward pass did.

    Args:
        calls: the indices of the watched modules, in the order in which they were called.
        used: per name of a parameter or buffer, how many watched modules had been called before each of its uses.
    """

    calls: list[int] = field(default_factory=list)
    used: dict[str, set[int]] = field(default_factory=dict)


def trace(model: nn.Module, watched: Sequence[nn.Module], call: Callable[[nn.Module], Any]) -> Trace:
    """Runs a forward pass on the meta device.

    Args:
        model: on any device; its values stay as they are.
        watched: whose calls are noted.
        call: calls the model it is given, with its inputs.

    Raises:
        InputError: if the forward pass needs values, which the meta device does not have.
    """
    found = Trace()
    tensors = on_meta(model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    with ExitStack() as stack:
        for index, module in enumerate(watched):
            handle = module.register_forward_pre_hook(lambda *_, index=index: found.calls.append(index))
            stack.callback(handle.remove)
        stack.enter_context(_Uses(names, found))
        stack.enter_context(torch.no_grad())
        run_on_meta(model, tensors, call)
    return found


def run_on_meta(model: nn.Module, tensors: dict[str, Tensor], call: Callable[[nn.Module], Any]) -> Any:
    """Calls the model with its parameters and buffers replaced by `tensors`.

    Raises:
        InputError: if that is not possible on the meta device.
    """
    try:
        with OnMeta():
            return functional_call(_Called(model, call), {f"model.{name}": t for name, t in tensors.items()}, ())
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        described = describe(error)["error"]
        raise InputError(
            f"the model's forward pass cannot be followed without values: {described['what']}",
            where=described["where"] or "strategy.mesh",
            fix="A model that is cut may not read values of its activations in Python (.item(), if x.any()); use the "
            "axes `data` and `shard` for this one",
        ) from error


def to_meta(value: Any) -> Any:
    """Tensors anywhere in `value` on the meta device."""
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, value)


def on_meta(model: nn.Module) -> dict[str, Tensor]:
    """What stands in for a model's tensors: parameters without values, and copies of the buffers, as masks and tables
    of positions may be read in Python."""
    parameters = {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}
    return {**parameters, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


class _Called(nn.Module):
    """Lets `functional_call` call a model in the caller's own way."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self.training = model.training

    def forward(self) -> Any:
        return self._call(self.model)


class OnMeta(TorchFunctionMode):
    """Brings tensors to the meta device that meet others there. What meets none has its values: masks, positions, and
    whatever a model reads of its inputs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, device, …: the device is where it would be
            value = func(*args, **kwargs)
            return self.device if isinstance(value, torch.device) else value
        return self.meeting(func, tensors, args, kwargs)

    device = torch.device("cpu")

    def meeting(self, func: Callable[..., Any], tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """A call with tensors on the meta device, and perhaps others."""
        if getattr(func, "__name__", "") in _MOVES:
            # There is nothing to move; only the type may change.
            types = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.dtype)]
            types += [x.dtype for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)]
            return args[0].to("meta", types[0] if types else args[0].dtype)
        if all(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        return func(*to_meta(args), **to_meta(kwargs))


_MOVES = frozenset(("to", "cpu", "cuda"))


class _Uses(OnMeta):
    """Notes which parameters functions of torch are called with."""

    def __init__(self, names: dict[int, str], found: Trace) -> None:
        super().__init__()
        self._names = names
        self._found = found

    def meeting(self, func: Callable[..., Any], tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        for tensor in tensors:
            if (name := self._names.get(id(tensor))) is not None:
                self._found.used.setdefault(name, set()).add(len(self._found.calls))
        return super().meeting(func, tensors, args, kwargs)
