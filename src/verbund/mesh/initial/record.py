"""Runs a model's constructor without memory for its tensors, and gives them their values later, one by one."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbund.mesh.initial.hollow import META, Hollow, refused
from verbund.mesh.initial.recorder import Recorder
from verbund.mesh.initial.replay import Store, plan
from verbund.mesh.initial.seeds import seed_everything
from verbund.mesh.initial.tape import NotRecordable, Operation, Ref
from verbund.mesh.users_line import users_line


def record(build: Callable[[], nn.Module], seed: int) -> Recorded:
    """Runs `build` as `seed_everything(seed); build()`, but gives its tensors neither memory nor values.

    Python and numpy code runs as ever, with its draws; torch's operations are noted down. The constructor may ask for
    values (`item()`, `tolist()`, conditions) as long as nothing random is in them.

    Raises:
        NotRecordable: if the constructor needs values that only the ordinary construction has, or fails.
    """
    seed_everything(seed)
    recorder = Recorder()
    recorder.generators.start(torch.default_generator)
    try:
        with _plain_parameters(), _truncated_normal(recorder), recorder:
            model = build()
        if recorder.refusal is None:
            return _finished(recorder, model, seed)
        reason = recorder.refusal
    except NotRecordable as error:
        reason = recorder.refusal or str(error)
    except Exception as error:
        reason = recorder.refusal or f"{type(error).__name__}: {error}{users_line(error.__traceback__)}"
    finally:
        torch.default_generator.manual_seed(seed)
    _release(recorder)
    raise NotRecordable(reason)


@dataclass(slots=True, eq=False)
class _Target:
    """A tensor of the model that waits for its values."""

    tensor: Tensor
    ref: Ref
    name: str | None
    """None for tensors that are neither parameters nor buffers, but which something holds."""

    def __str__(self) -> str:
        return f"`{self.name}`" if self.name else "a tensor that is neither parameter nor buffer"


class Recorded:
    """A model without values, and what its constructor did to give it some.

    `model` is on the meta device: all parameters and buffers, tied ones tied.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        operations: list[Operation],
        targets: list[_Target],
        sizes: list[int],
        ends: list[tuple[torch.Generator, int | Tensor]],
    ) -> None:
        self.model = model
        self._seed = seed
        self._operations: list[Any] = operations
        self._targets = targets
        self._sizes = sizes
        self._ends = ends

    def fill(self, keep: Callable[[str, Tensor], Tensor | None]) -> None:
        """Gives the model its values, those of the ordinary construction bit for bit; can be called once.

        Few tensors are held at any time: what `keep` returned, and about two of the largest. In the end torch's
        generators stand where they would after the ordinary construction.

        Args:
            keep: gets the name and the values of each parameter and buffer, once for tied ones; returns what takes
                their place (the values themselves, or a copy of a part), or None to leave the tensor on meta.

        Raises:
            NotRecordable: if an operation fails, or its result has another layout than was foreseen. The model is
                of no use then.
        """
        if self._operations is None:
            raise RuntimeError("a recording can be filled once")
        operations, self._operations = self._operations, None  # type: ignore[assignment]
        targets: dict[int, list[_Target]] = {}
        for target in self._targets:
            targets.setdefault(target.ref.storage, []).append(target)
        steps = plan(operations, [target.ref for target in self._targets], self._sizes)
        self._targets = []
        store = Store(self._sizes)
        torch.default_generator.manual_seed(self._seed)
        starts = [operation.draw.start for operation in operations if operation.draw]
        wanted = {start for start in [*starts, *(end for _, end in self._ends)] if isinstance(start, int)}
        states: dict[int, Tensor] = {}

        def go(generator: torch.Generator, state: int | Tensor | None) -> None:
            if state is not None:
                generator.set_state(states[state] if isinstance(state, int) else state)

        def place(storage: int) -> None:
            for target in targets.pop(storage, ()):
                _place(target, store.tensor(target.ref), keep)

        with torch.no_grad():
            for storage in set(targets) - {storage for step in steps for storage in step.final}:
                place(storage)
                store.free(storage)
            for step in steps:
                operation = operations[step.operation]
                operations[step.operation] = None
                draw = operation.draw
                if draw is not None:
                    go(draw.generator, draw.start)
                (Store(self._sizes) if step.aside else store).run(operation)
                if draw is not None and draw.number in wanted:
                    states[draw.number] = draw.generator.get_state()
                for storage in step.final:
                    place(storage)
                for storage in step.free:
                    store.free(storage)
        for generator, state in self._ends:
            go(generator, state)


def _place(target: _Target, values: Tensor, keep: Callable[[str, Tensor], Tensor | None]) -> None:
    """Puts what is kept of the values in the place of the model's tensor, for all who hold it."""
    kept = values if target.name is None else keep(target.name, values)
    if kept is not None:
        _become(target.tensor, kept.detach())


def _finished(recorder: Recorder, model: nn.Module, seed: int) -> Recorded:
    """Makes the model a plain one on the meta device.

    Raises:
        NotRecordable: if its tensors could not be given values one by one.
    """
    names: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names.setdefault(id(tensor), (name, tensor))
    held: list[tuple[str | None, Tensor]] = [*names.values()]
    held += [(None, tensor) for tensor in _held_elsewhere(recorder, names)]
    targets = []
    for label, tensor in held:
        ours = tensor if isinstance(tensor, Hollow) else recorder.constant(tensor.detach())
        target = _Target(tensor, Ref.of(ours, recorder.number(ours)), label)
        if tensor.grad_fn is not None:
            raise NotRecordable(f"{target} is computed from parameters, with a gradient")
        if tensor.grad is not None or tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise NotRecordable(f"{target} has a gradient, or a hook on it")
        targets.append(target)
    _check_apart(targets)
    recorder.check_shared()
    for target in targets:
        plain = target.ref.on(recorder.storages[target.ref.storage])
        if isinstance(target.tensor, Hollow):
            _become(target.tensor, plain)
        else:
            target.tensor = _exchanged(model, target.tensor, plain)
    return Recorded(model, seed, recorder.operations, targets, recorder.sizes(), list(recorder.generators.ends()))


def _exchanged(model: nn.Module, tensor: Tensor, plain: Tensor) -> Tensor:
    """Puts `plain` into the places that a tensor from outside has in the model; outside it stays as it is."""
    is_parameter = isinstance(tensor, nn.Parameter)
    made = nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain.requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name in [name for name, held in places.items() if held is tensor]:
                places[name] = made  # type: ignore[assignment]
    return made


def _become(tensor: Tensor, plain: Tensor) -> None:
    """Gives a tensor the memory of `plain`, for all who hold it; a hollow one becomes plain."""
    torch._C._swap_tensor_impl(tensor, plain.requires_grad_(tensor.requires_grad))
    if isinstance(tensor, Hollow):
        tensor.__class__ = nn.Parameter if tensor.__dict__.pop("_is_param", False) else Tensor  # type: ignore[assignment]


def _held_elsewhere(recorder: Recorder, names: dict[int, Any]) -> list[Tensor]:
    """The tensors that Python code holds without their being parameters or buffers."""
    # One that only others' bases or gradients keep alive is out of the reach of Python code.
    probe = torch.empty(0, device=META)
    unheld = _holders(weakref.ref(probe)) - 1

    def found() -> list[weakref.ref[Hollow]]:
        held = [ref for ref in recorder.hollows if _holders(ref) > unheld]
        return [ref for ref in held if id(ref()) not in names]

    if found():
        gc.collect()
    return [tensor for tensor in (ref() for ref in found()) if tensor is not None]


def _release(recorder: Recorder) -> None:
    """Gives what outlives a recording that failed (a table in a cache, say) its values, where it can."""
    if not any(ref() is not None for ref in recorder.hollows):
        return
    gc.collect()
    for tensor in [tensor for tensor in (ref() for ref in recorder.hollows) if tensor is not None]:
        try:
            _become(tensor, recorder.values(tensor, "release").clone())
        except NotRecordable:
            continue


def _holders(reference: weakref.ref[Any]) -> int:
    tensor = reference()
    # Torch's own references count as one.
    return 0 if tensor is None else sys.getrefcount(tensor) - (tensor._use_count() > 1)


def _check_apart(targets: list[_Target]) -> None:
    """That no two tensors share memory: once each has values of its own, they could not."""
    ends: dict[int, tuple[int, _Target]] = {}
    for target in sorted(targets, key=lambda target: target.ref.span()):
        low, high = target.ref.span()
        end, other = ends.get(target.ref.storage, (0, target))
        if low < end:
            names = [
                f"`{one.name}`" if one.name else "a tensor that is no parameter or buffer" for one in (other, target)
            ]
            raise NotRecordable(f"{' and '.join(names)} share memory without being the same tensor")
        ends[target.ref.storage] = max(end, high), target


@contextmanager
def _plain_parameters() -> Iterator[None]:
    """Refuses subclasses of `nn.Parameter`: torch makes none of them from hollow tensors, but says nothing."""
    original = nn.Parameter.__new__

    def new(cls: Any, *arguments: Any, **named: Any) -> Any:
        if cls is not nn.Parameter:
            raise refused(cls.__name__, "is a parameter of another class")
        return original(cls, *arguments, **named)

    nn.Parameter.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = original  # type: ignore[method-assign]


@contextmanager
def _truncated_normal(recorder: Recorder) -> Iterator[None]:
    """Has torch's initialiser noted as one operation: it draws again and again until it likes all values."""
    original = nn.init._no_grad_trunc_normal_

    def noted(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        if not isinstance(tensor, Hollow):
            return original(tensor, mean, std, a, b, generator)
        recorder.overwrite(original, tensor, mean, std, a, b, generator=generator)
        return tensor

    nn.init._no_grad_trunc_normal_ = noted
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
