"""Where a model is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from verbund.errors import InputError, nearest
from verbund.mesh.pipeline.balance import balance
from verbund.mesh.pipeline.trace import Trace, trace

_WHERE = "strategy.mesh.pipeline"
_PLAN = "Give `pipeline_plan()` in the task file: the paths of the modules at which stages may begin"


@dataclass(frozen=True)
class Layers:
    """The runs of work between which a model may be cut.

    Args:
        paths: of the modules at which they begin, in the order of their calls; the first also has what comes before.
        used: per name of a parameter or buffer, the layers that use it.
    """

    paths: list[str]
    used: dict[str, set[int]]

    def stages_of(self, name: str, starts: Sequence[int]) -> list[int]:
        """The stages that need a parameter; one that nothing uses belongs to the last."""
        last = len(starts) - 1
        layers = self.used.get(name)
        if not layers:
            return [last]
        return sorted({max(s for s, start in enumerate(starts) if start <= layer) for layer in layers})


def layers(model: nn.Module, given: Sequence[str] | None, call: Callable[[nn.Module], Any]) -> Layers:
    """Finds where a model may be cut.

    Args:
        model: on any device.
        given: what the task's `pipeline_plan()` returned; None: the children of the model's outermost ModuleLists and
            Sequentials.
        call: calls the model with inputs on the meta device.

    Raises:
        InputError: if there is no place to cut, or a module at one is not called exactly once.
    """
    modules = dict(model.named_modules())
    if given is not None:
        for path in given:
            if path not in modules or not path:
                known = [p for p in modules if p]
                raise InputError(
                    f"`{path}` is no module of the model", where="pipeline_plan()", fix=nearest(path, known)
                )
        paths = list(given)
    else:
        paths = _outermost(model)
    found = trace(model, [modules[path] for path in paths], call)
    for index, path in enumerate(paths):
        times = found.calls.count(index)
        if times != 1 and given is not None:
            raise InputError(
                f"`{path}` is called {times} times in a forward pass",
                where="pipeline_plan()",
                fix="A stage begins at a module that is called exactly once",
            )
    return _between(paths, found)


def _between(paths: list[str], found: Trace) -> Layers:
    """Layers begin at modules that are called once; others belong to the layer that is under way."""
    once = [index for index in dict.fromkeys(found.calls) if found.calls.count(index) == 1]
    # The place in the trace at which each layer begins; the first one begins with the forward pass.
    begins = [found.calls.index(index) + 1 for index in once]
    used = {
        name: {max((n for n, begin in enumerate(begins) if begin <= at), default=0) for at in places}
        for name, places in found.used.items()
    }
    return Layers([paths[index] for index in once], used)


def _outermost(model: nn.Module) -> list[str]:
    found: list[str] = []

    def collect(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                if next(child.parameters(), None) is not None:  # what has none goes with what is before it
                    found.append(path)
            else:
                collect(f"{path}.", child)

    collect("", model)
    return found


def starts(layers: Layers, costs: Sequence[float], stages: int) -> list[int]:
    """The first layer of every stage.

    Args:
        layers: of the model.
        costs: of each layer.
        stages: how many are wanted.

    Raises:
        InputError: if there are fewer layers.
    """
    if len(layers.paths) < stages:
        shown = f" ({', '.join(layers.paths[:4])}{', …' if len(layers.paths) > 4 else ''})" if layers.paths else ""
        raise InputError(
            f"the model has {len(layers.paths)} layers{shown} at which it can be cut, and {stages} stages are wanted",
            where=_WHERE,
            fix=f"Use at most {max(len(layers.paths), 1)} stages. {_PLAN}",
        )
    return balance(list(costs), stages)


def memory_costs(layers: Layers, sizes: dict[str, int]) -> list[float]:
    """Bytes of parameters per layer; one that several use counts for each."""
    costs = [1.0] * len(layers.paths)
    for name, size in sizes.items():
        for layer in layers.used.get(name, {len(costs) - 1}):
            costs[layer] += size
    return costs
