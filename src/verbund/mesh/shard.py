"""The axis `shard`: workers with different samples hold a share of every parameter each, and gather the whole ones
while they compute with them.

The three stages of Rajbhandari et al., "ZeRO" (2020), section 5: optimiser states are divided (1), gradients are added
up and divided after every backward pass (2), and parameters are given back after a block's forward pass and gathered
again for its backward pass (3). Each parameter is divided by rows, as in FSDP2, so that a share is a box of the global
tensor. Gathering runs one block ahead (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.3).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from verbund.comm.collectives import Group, Work
from verbund.comm.compression.casts import Casts
from verbund.mesh.held import Held, become
from verbund.mesh.traffic import Traffic
from verbund.randomness.override import Override

# Blocks whose gradients are added up at the same time.
_UNDER_WAY = 2


class _Share:
    """One parameter: the whole memory that comes and goes, and this worker's rows."""

    def __init__(self, held: Held, group: Group) -> None:
        self.held = held
        self.parameter = parameter = held.parameter
        count = parameter.shape[0] if parameter.dim() else 1
        self.width = parameter.numel() // max(count, 1)
        self.rows = -(-count // group.world)
        self.low, self.high = min(self.rows * group.rank, count), min(self.rows * (group.rank + 1), count)
        self.size = self.rows * self.width
        device = group.device
        self.nothing = torch.empty((0,) * max(parameter.dim(), 1), dtype=parameter.dtype, device=device)
        rows = self.high - self.low
        shape = (rows, *parameter.shape[1:]) if parameter.dim() else (() if rows else (0,))
        self.values = nn.Parameter(self.nothing.new_empty(shape), requires_grad=parameter.requires_grad)
        if parameter.is_meta:
            self.whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            self.bytes = self.whole.untyped_storage().nbytes()
            self.whole.untyped_storage().resize_(0)
            become(parameter, self.nothing.clone())
        else:
            self.whole = parameter.data.contiguous()
            if not self.whole.untyped_storage().resizable():  # mapped from a file
                self.whole = self.whole.clone()
            self.bytes = self.whole.untyped_storage().nbytes()
            self.load(self.whole)
        self.used = False

    def load(self, whole: Tensor) -> None:
        """Takes this worker's rows of the parameter's first values."""
        with torch.no_grad():
            self.values.copy_(whole[self.low : self.high] if whole.dim() else whole.expand(self.values.shape))

    def free(self) -> None:
        self.parameter.data = self.nothing
        self.whole.untyped_storage().resize_(0)

    def allocate(self) -> None:
        self.whole.untyped_storage().resize_(self.bytes)
        self.parameter.data = self.whole


class _Unit:
    """Parameters that are gathered, reduced and freed together.

    Args:
        shares: the parameters, of one dtype.
        gathers: the workers, for gathering.
        sums: the same workers once more, for gradients: the two never wait for each other.
        traffic: takes note of the time blocked.
        casts: what gradients are sent as.
    """

    def __init__(self, shares: list[_Share], gathers: Group, sums: Group, traffic: Traffic, casts: Casts) -> None:
        self.shares = shares
        self.gathered = True
        self._gathers, self._sums = gathers, sums
        self._traffic = traffic
        self._casts = casts
        self._size = sum(share.size for share in shares)
        self._arriving: tuple[Work | None, Tensor, Tensor, int] | None = None
        self._leaving: tuple[Work | None, Tensor, Tensor | None, Any, int] | None = None
        self._trained = [share for share in shares if share.parameter.requires_grad]
        # A gradient goes through frozen parameters after those of the trained ones are there.
        self.partly_frozen = len(self._trained) < len(shares)
        self._missing = len(self._trained)
        self.kept = False
        """Whether something outside of the block uses a parameter: then they stay between its passes."""

    def keep(self) -> None:
        """Gathers them for a use outside of the block."""
        self.kept = True
        self.gather()

    def ask(self) -> None:
        """Starts gathering."""
        if self.gathered or self._arriving is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            first = self.shares[0].values
            own = first.new_zeros(self._size)
            at = 0
            for share in self.shares:
                own[at : at + share.values.numel()].copy_(share.values.data.reshape(-1))
                at += share.size
            whole = first.new_empty(self._gathers.world * self._size)
            self._arriving = (self._gathers.start_all_gather(whole, own), whole, own, time.monotonic_ns())

    def gather(self) -> None:
        """The whole parameters are there when this returns."""
        if self.gathered:
            return
        self.ask()
        assert self._arriving is not None
        work, whole, _, begun = self._arriving
        with self._traffic.timed(begun):
            self._gathers.finish(work, "the gathering of parameters")
        self._arriving = None
        with torch.inference_mode(False), torch.no_grad():
            rows = whole.view(self._gathers.world, self._size)
            at = 0
            for share in self.shares:
                share.allocate()
                part = rows[:, at : at + share.size].reshape(-1)[: share.whole.numel()]
                share.whole.data.view(-1).copy_(part)
                at += share.size
        self.gathered = True

    def free(self) -> None:
        """Gives the whole parameters' memory back."""
        if self._arriving is not None:
            self.gather()
        if self.gathered:
            for share in self.shares:
                share.free()
            self.gathered = False

    def begin(self) -> None:
        """A new step: no gradients."""
        for share in self.shares:
            share.parameter.grad = None
            share.values.grad = None
            share.used = False
        self._missing = len(self._trained)

    def expect(self) -> None:
        """A backward pass begins: all gradients are still to come."""
        self._missing = len(self._trained)

    def arrived(self) -> bool:
        """One more gradient is there; whether all are."""
        self._missing -= 1
        return self._missing == 0

    def reduce(self) -> None:
        """Starts adding up the gradients and dividing them. All workers do so, those without a gradient too."""
        self.collect()
        self._missing = len(self._trained)
        if not self._trained:
            return
        with torch.no_grad():
            sent = self.shares[0].values.new_zeros(self._sums.world, self._size)
            at = 0
            for share in self.shares:
                if share.parameter.grad is not None:
                    _lay_out(sent[:, at : at + share.size], share.parameter.grad.reshape(-1), share.size)
                    share.parameter.grad = None
                    share.used = True
                at += share.size
            cast = self._casts.encoded(sent)
            total = sent.new_empty(self._size)
            received = torch.empty_like(cast) if cast is not sent else None
        if received is None:
            work = self._sums.start_reduce_scatter(total, sent)
        else:
            work = self._sums.start_all_to_all(received, cast)
        self._leaving = (work, total, received, (sent, cast), time.monotonic_ns())

    def collect(self) -> None:
        """Waits for the sums under way and adds them to this worker's gradients."""
        if self._leaving is None:
            return
        work, total, received, _, begun = self._leaving
        self._leaving = None
        with self._traffic.timed(begun):
            self._sums.finish(work, "the reduce-scatter of gradients")
        with torch.no_grad():
            if received is not None:
                rows = self._casts.decoded(received, total.new_empty(self._sums.world, self._size))
                torch.sum(rows, 0, out=total)
            at = 0
            for share in self.shares:
                values = share.values
                if share.parameter.requires_grad:
                    part = total[at : at + values.numel()].view_as(values)
                    values.grad = part if values.grad is None else values.grad.add_(part)
                at += share.size


def _lay_out(target: Tensor, flat: Tensor, size: int) -> None:
    """Writes `flat` into the rows of `target`, `size` elements each; the last may not be filled."""
    full = flat.numel() // size if size else 0
    target[:full].copy_(flat[: full * size].view(full, size))
    if rest := flat.numel() - full * size:
        target[full, :rest].copy_(flat[full * size :])


class _Watch(Override):
    """Gathers a block's parameters before it computes, forward and backward."""

    def __init__(self, module: nn.Module, unit: _Unit, shards: Shards) -> None:
        super().__init__(module)
        self._unit = unit
        self._shards = shards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shards, unit = self._shards, self._unit
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors):
            return self.inner(*args, **kwargs)
        unit.gather()
        shards.ahead(unit, 1)
        output = self.inner(*args, **kwargs)  # if it ends early, the parameters stay until the step's end
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._before_backward())  # type: ignore[no-untyped-call]
        if not unit.kept and (shards.level == 3 or not torch.is_grad_enabled()):
            unit.free()
        return output

    def _before_backward(self) -> None:
        self._unit.gather()
        self._shards.ahead(self._unit, -1)


class _Parameters(dict[str, Any]):
    """The parameters of a module in a block, which sees when one is asked for while it is not there: outside of the
    block's own forward pass. All workers ask for the same.

    Args:
        own: the module's parameters.
        units: where each belongs, by its identity.
        shards: whether a pass is under way.
    """

    def __init__(self, own: dict[str, Any], units: dict[int, _Unit], shards: Shards) -> None:
        super().__init__(own)
        self._units = units
        self._shards = shards

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if self._shards.active:
            unit = self._units.get(id(parameter))
            # Not for those that look at the dictionary itself, such as `functional_call`.
            if unit is not None and not unit.gathered and sys._getframe(1).f_code.co_name == "__getattr__":
                unit.keep()
        return parameter


class Shards:
    """Divides parameters over the axis `shard`.

    Args:
        model: its parameters are whole on this worker now, and not afterwards.
        held: what this worker holds; each entry is replaced by one whose `values` are some rows.
        group: the workers.
        level: ZeRO's stage.
        traffic: takes note of what the exchanges cost.
        casts: what gradients are sent as.
    """

    def __init__(
        self, model: nn.Module, held: Sequence[Held], group: Group, level: int, traffic: Traffic, casts: Casts
    ) -> None:
        self.casts = casts
        self.level = level
        self.traffic = traffic
        self._gathers = group.part("shard gathers", list(range(group.world)))
        self._sums = group
        self._last = True
        self._running = False
        self.active = False
        shares = {id(h.parameter): _Share(h, group) for h in held}
        self._by_name = {share.held.name: share for share in shares.values()}
        self.held = [h.sharded((s := shares[id(h.parameter)]).values, (s.low, s.high)) for h in held]
        self._of_block: list[_Unit] = []
        tied = {key for key, count in _registrations(model).items() if count > 1}
        for block in blocks(model):
            mine = []
            for parameter in block.parameters():
                # What several modules have is whole all the time, wherever it is used.
                if id(parameter) not in tied and (share := shares.pop(id(parameter), None)) is not None:
                    mine.append(share)
            units: dict[int, _Unit] = {}
            for unit in self._by_dtype(mine):
                _Watch(block, unit, self).install()
                self._of_block.append(unit)
                units |= {id(share.parameter): unit for share in unit.shares}
            for module in block.modules():
                if any(id(parameter) in units for parameter in module._parameters.values()):
                    module._parameters = _Parameters(module._parameters, units, self)
        self._rest = list(self._by_dtype(list(shares.values())))
        # The backward pass makes gradients in about this order, and all workers add them up in it.
        self._order = [*reversed(self._of_block), *self._rest]
        self._launched = 0
        self._complete: set[int] = set()
        self._places = {id(unit): place for place, unit in enumerate(self._of_block)}
        for place, unit in enumerate(self._order):
            for share in unit.shares:
                if share.parameter.requires_grad:
                    self._hook(share.parameter, unit, place)
            unit.free()

    def _by_dtype(self, shares: list[_Share]) -> Iterator[_Unit]:
        kinds: dict[torch.dtype, list[_Share]] = {}
        for share in shares:
            kinds.setdefault(share.values.dtype, []).append(share)
        for members in kinds.values():
            yield _Unit(members, self._gathers, self._sums, self.traffic, self.casts)

    def _hook(self, parameter: nn.Parameter, unit: _Unit, place: int) -> None:
        def arrived(_: Tensor) -> None:
            if unit.arrived():
                self._complete.add(place)
                while self._launched in self._complete and self._launched < len(self._of_block):
                    self._launch()

        parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def _launch(self) -> None:
        unit = self._order[self._launched]
        if self._launched >= _UNDER_WAY:
            self._order[self._launched - _UNDER_WAY].collect()  # else the gradients of all blocks would be here at once
        self._launched += 1
        if self._last or self.level > 1:
            unit.reduce()
            if self.level == 3 and id(unit) in self._places and not (unit.partly_frozen and self._running):
                unit.free()

    def load(self, name: str, whole: Tensor) -> None:
        """Takes this worker's rows of a parameter's first values, where the model was built without any."""
        self._by_name[name].load(whole)

    def begin(self) -> None:
        """A new step: no gradients."""
        for unit in self._order:
            unit.begin()

    def gather_rest(self, training: bool) -> None:
        """What belongs to no block is whole from now until `free`; in training below level 3, all is."""
        self.active = True
        units = self._rest if self.level == 3 or not training else self._of_block + self._rest
        for unit in units:
            unit.ask()
        for unit in units:
            unit.gather()

    def ahead(self, unit: _Unit, step: int) -> None:
        """Starts gathering the next block's parameters, or in the backward pass the former one's."""
        place = self._places[id(unit)] + step
        if 0 <= place < len(self._of_block):
            self._of_block[place].ask()

    def before_backward(self, last: bool) -> None:
        """A backward pass begins; `last`: the step has no other."""
        self._last = last
        self._running = True
        self._launched = 0
        self._complete.clear()
        for unit in self._order:
            unit.expect()

    def after_backward(self) -> None:
        """Adds up what the backward pass left: parameters that it did not use, and those of no block."""
        self._running = False
        if self.level == 3:
            for unit in self._of_block[::-1]:
                if unit.partly_frozen:
                    unit.free()
        while self._launched < len(self._order):
            self._launch()

    def finish(self) -> None:
        """All gradients are in `values.grad`, and no parameter is whole any more. What no worker used has none."""
        self.active = False
        for unit in self._order:
            unit.collect()
            unit.free()
        shares = [share for unit in self._order for share in unit.shares]
        used = torch.tensor([share.used for share in shares], dtype=torch.float32)
        with self.traffic.timed():
            self._sums.all_reduce(used, "the count of used parameters")
        for share, count in zip(shares, used.tolist(), strict=True):
            if not count:
                share.values.grad = None

    def free(self) -> None:
        """No parameter is whole any more."""
        self.active = False
        for unit in self._order:
            unit.free()


def _registrations(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its identity."""
    modules = model.modules()
    return Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: children with parameters of its outermost ModuleLists and Sequentials, in order."""
    found: list[nn.Module] = []
    _collect(model, found)
    return found


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            if next(child.parameters(), None) is not None:
                found.append(child)
        else:
            _collect(child, found)
