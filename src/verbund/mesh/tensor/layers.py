"""Modules of which each worker holds and computes a share. Classes, names and states stay as they are; parameters
become this worker's share of the whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verbund.errors import InputError
from verbund.mesh.held import Cut, cut
from verbund.mesh.tensor.attention import Attention
from verbund.mesh.tensor.exchange import Axis
from verbund.mesh.tensor.plan import Entry
from verbund.randomness.override import Override

_WHERE = "strategy.mesh.tensor"


def apply(model: nn.Module, entries: list[Entry], axis: Axis) -> tuple[dict[int, Cut], set[int], list[Column]]:
    """Cuts the modules of a plan.

    Args:
        model: its parameters are still whole; on the meta device or any other.
        entries: the plan.
        axis: the workers.

    Returns:
        The cut of every parameter that was cut, by its identity (the new parameter is what `share_of` makes); the
        identities of parameters that stay whole but get only a part of their gradient here; and the columns that
        gather their outputs.

    Raises:
        InputError: naming the module that cannot be cut so.
    """
    cutter = _Cutter(model, axis)
    for entry in sorted(entries, key=lambda entry: entry.cut != "gather"):
        cutter.cut(entry)
    cutter.check_ties()
    return cutter.cuts, cutter.partial, cutter.gathering


class _Cutter:
    """What is cut so far. A tied parameter is cut once."""

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self._model = model
        self._axis = axis
        self._shared = _Shared(axis)
        self.cuts: dict[int, Cut] = {}
        self.partial: set[int] = set()
        self.gathering: list[Column] = []
        self._gathered: list[str] = []
        self._names: set[str] = set()

    def check_ties(self) -> None:
        """That whoever shares a cut parameter is cut too.

        Raises:
            InputError: naming the module that is not.
        """
        for path, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self.cuts and f"{path}.{name}" not in self._names:
                    raise InputError(
                        f"`{path}.{name}` is tied to a parameter that is cut, and `{path}` is not in the plan",
                        where="tensor_plan()",
                        fix=f"Give `{path}` an entry too, or leave both out",
                    )

    def cut(self, entry: Entry) -> None:
        module = self._model.get_submodule(entry.path)
        if entry.cut == "divide":
            self._divide(entry, module)
        elif entry.cut == "attention":
            self._attention(entry, module)
        elif entry.cut == "gather":
            self._gathered.append(f"{entry.path}.")
            Gathered(module, self._axis, entry.dim).install_within()
        elif entry.cut in ("sequence", "partial"):
            self.partial |= {id(parameter) for parameter in module.parameters()}
        elif entry.cut == "embedding":
            self._needs(entry, module, nn.Embedding)
            assert isinstance(module, nn.Embedding)
            table = self._parameter(entry, module, "weight", 0)
            Embedding(module, self._axis, table, entry).install_within()
        else:
            self._needs(entry, module, nn.Linear)
            assert isinstance(module, nn.Linear)
            if entry.cut == "column":
                outputs = self._parameter(entry, module, "weight", 0)
                if module.bias is not None:
                    self._parameter(entry, module, "bias", 0)
                inside = entry.path.startswith(tuple(self._gathered))
                column = Column(module, None if inside else self._shared, outputs, entry, self._axis)
                column.install_within()
                if entry.gather:
                    self.gathering.append(column)
            else:
                if type(module).forward is not nn.Linear.forward:
                    raise InputError(
                        f"`{entry.path}` has a forward of its own ({type(module).__name__}), which `row` would pass by",
                        where="tensor_plan()",
                        fix="Leave it out, and it stays whole on every worker",
                    )
                self._parameter(entry, module, "weight", 1)
                if entry.scatter and module.bias is not None:
                    self.partial.add(id(module.bias))  # it is added to a share of the sequence
                Row(module, self._axis, entry).install_within()

    def _needs(self, entry: Entry, module: nn.Module, kind: type[nn.Module]) -> None:
        if not isinstance(module, kind):
            raise InputError(
                f"`{entry.path}` is a {type(module).__name__}; `{entry.cut}` cuts an nn.{kind.__name__}",
                where="tensor_plan()",
                fix="Leave it out, and it stays whole on every worker",
            )

    def _parameter(self, entry: Entry, module: nn.Module, name: str, dim: int) -> Cut:
        parameter = getattr(module, name)
        parts = list(entry.parts) if isinstance(entry.parts, tuple) else entry.parts
        path = f"{entry.path}.{name}"
        self._names.add(path)
        axis = self._axis
        made = cut(path, parameter.shape[dim], dim, parts, entry.units, axis.worker, axis.workers)
        known = self.cuts.setdefault(id(parameter), made)
        if known != made:
            raise InputError(
                f"`{path}` is tied to a parameter that is cut in another way",
                where=_WHERE,
                fix="Cut both along the same dimension, or leave both out",
            )
        return made

    def _attention(self, entry: Entry, module: nn.Module) -> None:
        self._needs(entry, module, nn.MultiheadAttention)
        assert isinstance(module, nn.MultiheadAttention)
        if module.bias_k is not None or module.add_zero_attn:
            raise InputError(
                f"`{entry.path}` has add_bias_kv or add_zero_attn, which cannot be cut",
                where=_WHERE,
                fix="Leave it out by a `tensor_plan()` of your own",
            )
        heads = Entry(entry.path, "attention", 1, module.num_heads)
        if module.in_proj_weight is not None:
            packed = Entry(entry.path, "attention", 3, module.num_heads)
            self._parameter(packed, module, "in_proj_weight", 0)
            if module.in_proj_bias is not None:
                self._parameter(packed, module, "in_proj_bias", 0)
        else:
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self._parameter(heads, module, name, 0)
            if module.in_proj_bias is not None:
                self._parameter(Entry(entry.path, "attention", 3, module.num_heads), module, "in_proj_bias", 0)
        out = Entry(f"{entry.path}.out_proj", "attention", 1, module.num_heads)
        made = self._parameter(out, module.out_proj, "weight", 1)
        Attention(module, self._axis, made).install_within()

    def _divide(self, entry: Entry, module: nn.Module) -> None:
        for name in entry.attributes:
            whole = getattr(module, name, None)
            if not isinstance(whole, int):
                raise InputError(f"`{entry.path}.{name}` is no whole number", where="tensor_plan()")
            made = cut(f"{entry.path}.{name}", whole, 0, 1, entry.units or whole, self._axis.worker, self._axis.workers)
            setattr(module, name, made.length())


class _Shared:
    """Lets modules that are called with the same tensor (query, key and value) enter the divided part once."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.last: tuple[Tensor, bool, Tensor] | None = None

    def enter(self, x: Tensor, entry: Entry) -> Tensor:
        last = self.last
        if last is not None and last[0] is x and last[1] == entry.scatter:
            return last[2]
        entered = self.axis.enter_sequence(x, entry.dim) if entry.scatter else self.axis.enter(x)
        self.last = (x, entry.scatter, entered) if torch.is_grad_enabled() else None
        return entered


class Column(Override):
    """A Linear of whose outputs each worker computes some.

    `local` leaves the outputs divided even if the plan says `gather`: for a loss that is computed so. Without `shared`
    the input was made ready for all columns of a module at once.
    """

    def __init__(self, module: nn.Linear, shared: _Shared | None, outputs: Cut, entry: Entry, axis: Axis) -> None:
        super().__init__(module)
        self._shared = shared
        self._axis = axis
        self._entry = entry
        self.outputs = outputs
        self.local = False
        self.last: Tensor | None = None
        """What it gave in a run on the meta device."""

    def forget(self) -> None:
        """Lets go of the tensor it was last called with."""
        if self._shared is not None:
            self._shared.last = None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x if self._shared is None else self._shared.enter(x, self._entry))
        if not self._entry.gather or self.local:
            return y
        outputs = self.outputs
        lengths = [outputs.length(worker) for worker in range(outputs.workers)]
        whole = self._axis.gather(y, y.dim() - 1, lengths)
        whole = whole if len(outputs.sections) == 1 else _in_order(whole, outputs)
        if whole.is_meta:
            self.last = whole
        return whole


class Gathered(Override):
    """A module whose first input is this worker's share of the sequence: all get the whole, once for what is inside."""

    def __init__(self, module: nn.Module, axis: Axis, dim: int) -> None:
        super().__init__(module)
        self._axis = axis
        self._dim = dim

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(self._axis.enter_sequence(x, self._dim), *args, **kwargs)


class Row(Override):
    """A Linear of whose inputs each worker has some; the outputs are added up."""

    def __init__(self, module: nn.Linear, axis: Axis, entry: Entry) -> None:
        super().__init__(module)
        self._axis = axis
        self._entry = entry

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, nn.Linear)
        y = functional.linear(x, module.weight)
        y = self._axis.leave_sequence(y, self._entry.dim) if self._entry.scatter else self._axis.leave(y)
        return y if module.bias is None else y + module.bias


class Embedding(Override):
    """An Embedding of whose rows each worker holds some."""

    def __init__(self, module: nn.Embedding, axis: Axis, rows: Cut, entry: Entry) -> None:
        super().__init__(module)
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise InputError(
                f"`{entry.path}` has max_norm or scale_grad_by_freq, which cannot be cut",
                where=_WHERE,
                fix="Leave it out by a `tensor_plan()` of your own",
            )
        self._axis = axis
        self._entry = entry
        (self._low, self._high), *rest = rows.ranges()
        assert not rest

    def __call__(self, ids: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, nn.Embedding)
        mine = (ids >= self._low) & (ids < self._high)
        local = torch.where(mine, ids - self._low, 0)
        padding = module.padding_idx
        if padding is not None:
            padding = padding - self._low if self._low <= padding < self._high else None
        # Where the row is another worker's, zero stands in: of the value, and so of the gradient.
        y = functional.embedding(local, module.weight) * mine.unsqueeze(-1)
        if padding is not None:
            # A padding row gets no gradient.
            kept = (local != padding).unsqueeze(-1)
            y = torch.where(kept, y, y.detach())
        return self._axis.leave_sequence(y, self._entry.dim) if self._entry.scatter else self._axis.leave(y)


def _in_order(whole: Tensor, outputs: Cut) -> Tensor:
    """Gathered shares of several sections, worker by worker, as sections."""
    pieces: list[tuple[int, Tensor]] = []
    at = 0
    for worker in range(outputs.workers):
        for low, high in outputs.ranges(worker):
            pieces.append((low, whole.narrow(-1, at, high - low)))
            at += high - low
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], -1)


def replace_parameters(model: nn.Module, shares: dict[int, nn.Parameter]) -> None:
    """Puts each parameter's share in its place, wherever it is registered."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in shares:
                module._parameters[name] = shares[id(parameter)]


def forget(model: nn.Module) -> None:
    """Nothing of a finished step is kept by the layers."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        while isinstance(forward, Override):
            if isinstance(forward, Column):
                forward.forget()
            forward = forward.inner
