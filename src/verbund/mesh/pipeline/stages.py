"""A model run as pipeline stages, without changing its code.

A stage runs the model's own forward pass from its beginning. What lies before the stage works on the meta device, as
its parameters are not here: nothing is computed, and only what needs no parameters (masks, positions) has values. When
the pass comes to the stage's first module, that module's inputs are replaced by what the stage before sent; when it
comes to the first module of the next stage, the pass ends there and that module's inputs are what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from verbund.errors import TaskError
from verbund.mesh.pipeline.trace import WITHOUT_VALUES, OnMeta, standing_in, to_meta
from verbund.randomness import SampleRandomness
from verbund.randomness.override import Override


@dataclass(frozen=True)
class Boundary:
    """What goes from a stage to the next: the tensors that the next one's first module is called with."""

    tensors: list[Tensor]


class _Reached(BaseException):
    """The forward pass has come to the next stage. Not an Exception, so that no model catches it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


class Stages:
    """The stages of a model.

    Args:
        model: parameters that no stage of this worker needs are on the meta device.
        paths: of the layers' first modules, in the order of their calls.
        starts: the first layer of every stage.
        randomness: keyed by how often a module drew, in the layers that are left out too.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Sequence[str],
        starts: Sequence[int],
        randomness: SampleRandomness | None = None,
    ) -> None:
        self.model = model
        self.randomness = randomness
        self.count = len(starts)
        self._ends = [*starts[1:], len(paths)]
        self._starts = list(starts)
        self.first = 0
        self.end = len(paths)
        self.running = False
        self.before = False
        self.known: dict[int, Tensor] = {}
        self.received: list[Tensor] = []
        self.name = ""
        self._mode = _Regions(self)
        self._paths = list(paths)

    def install(self) -> None:
        """Puts a gate before every layer; whatever else takes the place of a layer's forward pass has done so."""
        for index, path in enumerate(self._paths):
            _Gate(self, index, path, self.model.get_submodule(path)).install()

    def run(self, stage: int, call: Callable[[], Any], received: list[Tensor] | None) -> Any:
        """Runs one stage.

        Args:
            stage: its number.
            call: calls the whole model with its inputs.
            received: what the stage before sent; None for the first.

        Returns:
            The model's output of the last stage, else a `Boundary`.
        """
        self.first, self.end = self._starts[stage], self._ends[stage]
        self.before = stage > 0
        self.known = {}
        self.received = [_entering(x) if x.requires_grad else x for x in received or []]
        self.running = True
        try:
            if stage == 0:
                return call()
            with self._mode:
                output = call()
        except _Reached as reached:
            return Boundary(reached.tensors)
        finally:
            self.running = False
            self.known, self.received = {}, []
        if self.before:
            raise TaskError(
                f"the forward pass never came to `{self.name or 'its stage'}`", where="strategy.mesh.pipeline"
            )
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(output)):
            raise TaskError(
                "the model's output contains a value of an earlier stage",
                where="strategy.mesh.pipeline",
                fix="Return only what is computed from the last layers, or leave the axis `pipeline` out",
            )
        return output

    def replaced(self, value: Any) -> Any:
        """`value` with tensors of earlier stages replaced by those that were received."""
        known = self.known
        return tree_map(lambda x: known.get(id(x), x) if isinstance(x, Tensor) and x.is_meta else x, value)


class _Entering(torch.autograd.Function):
    """What was received, as the result of an operation: a layer may change it in place, which it may not a leaf."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _entering(received: Tensor) -> Tensor:
    entered: Tensor = _Entering.apply(received)  # type: ignore[no-untyped-call]
    return entered


class _Gate(Override):
    """The first module of a layer."""

    def __init__(self, stages: Stages, index: int, path: str, module: nn.Module) -> None:
        super().__init__(module)
        self._stages = stages
        self._index = index
        self._path = path
        self._outputs: dict[Any, tuple[Any, dict[str, int]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self._stages
        if not stages.running:
            return self.inner(*args, **kwargs)
        if self._index < stages.first:
            return self._skip(args, kwargs)
        if self._index == stages.end:
            # What only passes through this stage is what was received.
            tensors = [x for x in tree_leaves(stages.replaced((args, kwargs))) if isinstance(x, Tensor)]
            if any(x.is_meta for x in tensors):
                raise TaskError(
                    f"`{self._path}` is called with a value that an earlier pipeline stage did not hand on",
                    where="strategy.mesh.pipeline",
                    fix="Hand it from layer to layer as an argument, or choose other cut points by `pipeline_plan()`",
                )
            raise _Reached(tensors)
        if stages.before:
            args, kwargs = self._take(args, kwargs)
        elif stages.known:
            args, kwargs = stages.replaced(args), stages.replaced(kwargs)
        return self.inner(*args, **kwargs)

    def _take(self, args: Any, kwargs: Any) -> Any:
        """The call's arguments with what was received in the place of what is not here."""
        stages = self._stages
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if len(tensors) != len(stages.received):
            raise TaskError(
                f"`{self._path}` is called with {len(tensors)} tensors here and with {len(stages.received)} in the "
                "stage before",
                where="strategy.mesh.pipeline",
                fix="The forward pass may not differ between processes",
            )
        arrived = iter(stages.received)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value = next(arrived)
                if leaf.is_meta:
                    stages.known[id(leaf)] = value
                    stages._mode.keep.append(leaf)
                    leaves[place] = value
        stages.before = False
        return tree_unflatten(leaves, spec)

    def _skip(self, args: Any, kwargs: Any) -> Any:
        """An output of the right shapes; nothing is computed."""
        randomness = self._stages.randomness
        leaves, spec = tree_flatten((to_meta(args), to_meta(kwargs)))
        key = (spec, torch.is_grad_enabled(), self.module.training, *(_described(leaf) for leaf in leaves))
        if key not in self._outputs:
            if len(self._outputs) >= 64:
                self._outputs.clear()
            module = self.module
            before = randomness.uses() if randomness is not None else {}
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            module.forward = self.inner
            try:
                with torch.inference_mode(False), torch.no_grad(), standing_in(module, to_meta(tensors)):
                    args, kwargs = tree_unflatten(leaves, spec)
                    output = to_meta(module(*args, **kwargs))
            finally:
                module.forward = self
            after = randomness.uses() if randomness is not None else {}
            drawn = {name: count - before.get(name, 0) for name, count in after.items()}
            self._outputs[key] = output, {name: count for name, count in drawn.items() if count}
            return output
        output, drawn = self._outputs[key]
        if randomness is not None:
            randomness.skip(drawn)
        return output


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return type(leaf).__name__
    return leaf


class _Regions(OnMeta):
    """Before the stage: what meets the meta device goes there. Within: what was received takes its place."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages
        self.keep: list[Tensor] = []

    def __enter__(self) -> Any:
        self.keep.clear()
        for tensor in self._stages.received:
            self.device = tensor.device
        return super().__enter__()  # type: ignore[no-untyped-call]

    def meeting(self, func: Callable[..., Any], tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        stages = self._stages
        if stages.before:
            return super().meeting(func, tensors, args, kwargs)
        args, kwargs = stages.replaced(args), stages.replaced(kwargs)
        left = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        name = getattr(func, "__name__", "")
        if left and name not in WITHOUT_VALUES:
            shapes = ", ".join(str(list(x.shape)) for x in left)
            raise TaskError(
                f"`{name}` uses a value {shapes} that an earlier pipeline stage computed and that is not handed from "
                "layer to layer",
                where="strategy.mesh.pipeline",
                fix="Hand it to every layer as an argument, choose cut points by `pipeline_plan()` that do not lie "
                "between, or use another axis",
            )
        return func(*args, **kwargs)
