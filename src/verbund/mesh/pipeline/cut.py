"""Where a model is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from verbund.errors import InputError, nearest
from verbund.mesh.pipeline.balance import balance
from verbund.mesh.pipeline.trace import Crossing, Trace, trace

_WHERE = "strategy.mesh.pipeline"
_PLAN = "Give `pipeline_plan()` in the task file: the paths of the modules at which stages may begin"


@dataclass(frozen=True)
class Layers:
    """The runs of work between which a model may be cut.

    Args:
        paths: of the modules at which they begin, in the order of their calls; the first also has what comes before.
        used: per name of a parameter or buffer, the layers that use it.
        work: of each layer's forward and backward pass, in no unit.
        barred: layers before which the model cannot be cut, and the value that prevents it.
    """

    paths: list[str]
    used: dict[str, set[int]]
    work: list[float]
    barred: dict[int, Crossing]

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
        InputError: if a module of `pipeline_plan()` is not called exactly once, or after one that comes later there.
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
    if given is not None and found.calls != sorted(found.calls):
        late = next(index for before, index in pairwise(found.calls) if index < before)
        raise InputError(
            f"`{paths[late]}` is called after modules that come later in the plan",
            where="pipeline_plan()",
            fix=f"Name them in the order of their calls: {_few([paths[index] for index in found.calls], 8)}",
        )
    return _between(paths, found)


def _between(paths: list[str], found: Trace) -> Layers:
    """Layers begin at modules that are called once; others belong to the layer that is under way."""
    once = [index for index in dict.fromkeys(found.calls) if found.calls.count(index) == 1]
    # The place in the trace at which each layer begins; the first one begins with the forward pass.
    begins = [found.calls.index(index) + 1 for index in once]

    def layer(place: int) -> int:
        return max((n for n, begin in enumerate(begins) if begin <= place), default=0)

    used = {name: {layer(place) for place in places} for name, places in found.used.items()}
    work = [0.0] * len(once)
    for place, amount in found.work.items():
        if once:
            work[layer(place)] += amount
    barred = {
        n: replace(crossing, made=layer(crossing.made), used=layer(crossing.used))
        for n, begin in enumerate(begins)
        if n and (crossing := found.crossings.get(begin)) is not None
    }
    return Layers([paths[index] for index in once], used, work, barred)


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


def starts(layers: Layers, costs: Sequence[float], workers: int, chunks: int) -> list[int]:
    """The first layer of every stage: of the places at which the model can be cut those that make the work even.

    Args:
        layers: of the model.
        costs: of each layer.
        workers: along the axis.
        chunks: stages of each.

    Raises:
        InputError: if there are fewer such places, naming what prevents more.
    """
    stages = workers * chunks
    begins = [0, *(n for n in range(1, len(layers.paths)) if n not in layers.barred)]
    if len(begins) < stages or not layers.paths:
        raise _too_few(layers, len(begins), workers, chunks)
    runs = [sum(costs[low:high]) for low, high in pairwise([*begins, len(layers.paths)])]
    return [begins[n] for n in balance(runs, stages)]


def _too_few(layers: Layers, parts: int, workers: int, chunks: int) -> InputError:
    wanted = f"{workers * chunks} stages are wanted ({workers} workers, {chunks} each)"
    if len(layers.paths) < workers * chunks:
        most = max(len(layers.paths), 1)
        fewer = "fewer `strategy.chunks`" if chunks > 1 and workers <= most else f"at most {most} stages"
        shown = f" ({_few(layers.paths, 4)})" if layers.paths else ""
        return InputError(
            f"the model has {len(layers.paths)} layers{shown} at which it can be cut, and {wanted}",
            where=_WHERE,
            fix=f"Use {fewer}. {_PLAN}",
        )
    layer, value = next(iter(sorted(layers.barred.items())))
    how = f"`{value.function}` in" if value.function else "the model's output after"
    return InputError(
        f"the model can be cut into {parts} part{'s' if parts != 1 else ''}, and {wanted}: not before "
        f"`{layers.paths[layer]}`, as a value {value.shape} of `{layers.paths[value.made]}` is used by {how} "
        f"`{layers.paths[value.used]}`{value.line} but is no argument of `{layers.paths[layer]}`",
        where=_WHERE,
        fix="Hand it from layer to layer as an argument, name other modules in `pipeline_plan()`, before and after "
        "which nothing passes them by, or use another axis",
    )


def _few(names: Sequence[str], count: int) -> str:
    return f"{', '.join(names[:count])}{', …' if len(names) > count else ''}"


def memory_costs(layers: Layers, sizes: dict[str, int]) -> list[float]:
    """Bytes of parameters per layer; one that several use counts for each."""
    costs = [1.0] * len(layers.paths)
    for name, size in sizes.items():
        for layer in layers.used.get(name, {len(costs) - 1}):
            costs[layer] += size
    return costs
