"""What a model's forward pass does between the modules that it may be cut at: which parameters it uses, how much it
computes, and which values it takes along.

The forward pass is run once on the meta device, where nothing is computed or stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from verbund.cluster.worker import describe
from verbund.errors import InputError
from verbund.mesh.pipeline.work import Work
from verbund.mesh.users_line import users_line


@dataclass(frozen=True)
class Crossing:
    """A value that a forward pass takes past the call of a watched module without handing it to that module.

    Args:
        shape: of the value.
        made: how many watched modules had been called when it was computed.
        used: how many when it was used.
        function: of torch, which used it; empty for the model's output.
        line: `, FILE:LINE` of the user's code, if known.
    """

    shape: list[int]
    made: int
    used: int
    function: str
    line: str


@dataclass
class Trace:
    """What a forward pass did. Places are numbers of watched modules that had been called before.

    Args:
        calls: the indices of the watched modules, in the order in which they were called.
        used: per name of a parameter or buffer, the places at which it was used.
        work: what was computed at each place.
        crossings: per place the first value that crosses its beginning.
    """

    calls: list[int] = field(default_factory=list)
    used: dict[str, set[int]] = field(default_factory=dict)
    work: dict[int, float] = field(default_factory=dict)
    crossings: dict[int, Crossing] = field(default_factory=dict)


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
    work = Work(lambda: len(found.calls))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    uses = _Uses({id(tensor): name for name, tensor in tensors.items()}, trained, found, work)
    found.work = work.found
    with ExitStack() as stack:
        for index, module in enumerate(watched):
            hook = module.register_forward_pre_hook(uses.entering(index), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(uses)
        stack.enter_context(work)
        stack.enter_context(torch.no_grad())
        uses.note_output(run_on_meta(model, tensors, call))
    return found


def run_on_meta(model: nn.Module, tensors: dict[str, Tensor], call: Callable[[nn.Module], Any]) -> Any:
    """Calls the model with its parameters and buffers replaced by `tensors`.

    Raises:
        InputError: if that is not possible on the meta device.
    """
    try:
        with OnMeta(), standing_in(model, tensors):
            return call(model)
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


@contextmanager
def standing_in(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within the block a model has other parameters and buffers, given by their first names.

    torch's `functional_call` leaves its tensors behind in a module that has several names.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    replaced = {id(own[name]): tensor for name, tensor in tensors.items()}
    former: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        held_by: list[dict[str, Any]] = [module._parameters, module._buffers]
        for places in held_by:
            former += [(places, name, held) for name, held in places.items() if id(held) in replaced]
    for places, name, held in former:
        places[name] = replaced[id(held)]
    try:
        yield
    finally:
        for places, name, held in former:
            places[name] = held


class OnMeta(TorchFunctionMode):
    """Brings tensors to the meta device that meet others there. What meets none has its values: masks, positions, and
    whatever a model reads of its inputs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (_any_on_meta(args) or (kwargs and _any_on_meta(kwargs.values()))):
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, device, …: the device is where it would be
            value = func(*args, **kwargs)
            if not isinstance(value, Tensor):
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


def _any_on_meta(values: Iterable[Any]) -> bool:
    """Whether there is such a tensor. This stands before every function that a stage calls: no general walk."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta:
                return True
        elif isinstance(value, (list, tuple)):
            if _any_on_meta(value):
                return True
        elif isinstance(value, dict) and _any_on_meta(value.values()):
            return True
    return False


_MOVES = frozenset(("to", "cpu", "cuda"))
WITHOUT_VALUES = frozenset(("size", "dim", "numel", "stride", "is_floating_point", "requires_grad_"))
"""What may be asked of a tensor whose values are not here."""


class _Uses(OnMeta):
    """Notes which parameters functions of torch are called with, and which values from where."""

    def __init__(self, names: dict[int, str], trained: set[str], found: Trace, work: Work) -> None:
        super().__init__()
        self._names = names
        self._work = work
        self._trained = {number for number, name in names.items() if name in trained}
        # Results that a gradient goes back through.
        self._learning: set[int] = set()
        self._found = found
        self._made: dict[int, int] = {}
        self._handed: dict[int, set[int]] = {}
        # An id is one tensor's as long as that is there.
        self._keep: list[Any] = []

    def entering(self, index: int) -> Callable[..., None]:
        """What is called before a watched module."""

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._found.calls.append(index)
            self._handed[len(self._found.calls)] = {id(x) for x in tree_leaves((args, kwargs))}
            self._keep.append((args, kwargs))

        return hook

    def note_output(self, output: Any) -> None:
        """What the model returns is used at the end."""
        self._use([x for x in tree_leaves(output) if isinstance(x, Tensor)], "")

    def meeting(self, func: Callable[..., Any], tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name not in WITHOUT_VALUES:
            self._use(tensors, name)
        ids = {id(tensor) for tensor in tensors}
        gradients = (not ids.isdisjoint(self._trained)) + (not ids.isdisjoint(self._learning))
        self._work.passes = 1 + gradients
        output = super().meeting(func, tensors, args, kwargs)
        self._work.passes = 1
        for made in tree_leaves(output):
            if isinstance(made, Tensor) and made.is_meta and id(made) not in self._names:
                self._made.setdefault(id(made), len(self._found.calls))
                if gradients:
                    self._learning.add(id(made))
                self._keep.append(made)
        return output

    def _use(self, tensors: list[Tensor], function: str) -> None:
        found = self._found
        here = len(found.calls)
        for tensor in tensors:
            if (name := self._names.get(id(tensor))) is not None:
                found.used.setdefault(name, set()).add(here)
            made = self._made.get(id(tensor), here)
            for place in range(made + 1, here + 1):
                if place not in found.crossings and id(tensor) not in self._handed[place]:
                    line = users_line(sys._getframe()) if function else ""
                    found.crossings[place] = Crossing(list(tensor.shape), made, here, function, line)
