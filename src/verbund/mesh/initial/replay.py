"""Which recorded operations are needed, in which order, and running them with few tensors at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verbund.mesh.initial.tape import NotRecordable, Operation, Ref, convert, tensors

Spans = list[tuple[int, int]]


@dataclass(slots=True)
class Step:
    """One operation of a plan."""

    operation: int
    aside: bool = False
    """Only the generator's state is wanted: it runs on storages of its own."""
    final: list[int] = field(default_factory=list)
    """Storages that have their last values after it."""
    free: list[int] = field(default_factory=list)
    """Storages that nothing needs after it."""


def plan(operations: list[Operation], ends: Iterable[Ref], sizes: list[int], draws: bool = True) -> list[Step]:
    """The operations that give the tensors `ends` their values, such that few of them are held at a time.

    What draws random numbers keeps its place among its like. Everything else runs as soon as that finishes one of
    the `ends`, and not before: a cast of the whole model, which a constructor makes at its end, happens tensor by
    tensor here.

    Args:
        operations: in the order they were recorded in.
        ends: tensors whose last values are wanted.
        sizes: the bytes of each storage.
        draws: whether every random draw is wanted, for the generators' sake, and every check.
    """
    ends = list(ends)
    needed = _needed(operations, ends, draws)
    return _lifetimes(_ordered(operations, needed, {ref.storage for ref in ends}), operations, sizes)


def _needed(operations: list[Operation], ends: list[Ref], draws: bool) -> dict[int, bool]:
    """The operations that must run, last first; True for those that only a generator needs."""
    live: dict[int, Spans] = {}
    for ref in ends:
        _join(live, ref)
    needed: dict[int, bool] = {}
    for index in range(len(operations) - 1, -1, -1):
        if not live and not draws:
            break
        operation = operations[index]
        if not any(_meets(live, ref) for ref in operation.touched):
            checks = not operation.touched
            if not draws or not (operation.draw or checks):
                continue
            if not checks and not operation.reads:
                needed[index] = True
                continue
            # What it reads may decide how much it draws.
        needed[index] = False
        for made in operation.made:
            if made is not None:
                live.pop(made.storage, None)
        if operation.overwrites:
            for ref in operation.writes:
                if ref.is_dense():
                    _cut(live, ref)
        for ref in operation.reads:
            _join(live, ref)
    return needed


def _ordered(operations: list[Operation], needed: dict[int, bool], ends: set[int]) -> list[Step]:
    """The needed operations in the order they shall run."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    before: dict[int, set[int]] = {}
    # After how many draws an operation can run.
    ready: dict[int, int] = {}
    drawing: list[int] = []
    wanted: dict[int, list[int]] = {}
    for index in reversed(needed):
        operation = operations[index]
        if needed[index]:
            drawing.append(index)
            continue
        earlier = {writer[ref.storage] for ref in operation.reads if ref.storage in writer}
        for ref in operation.touched:
            earlier.update(readers.pop(ref.storage, ()))
            if ref.storage in writer:
                earlier.add(writer[ref.storage])
        for ref in operation.reads:
            readers.setdefault(ref.storage, []).append(index)
        for ref in operation.touched:
            writer[ref.storage] = index
        earlier.discard(index)
        before[index] = earlier
        ready[index] = max((ready[i] for i in earlier), default=0)
        if operation.draw:
            drawing.append(index)
            ready[index] = len(drawing)
        if not operation.touched:
            wanted.setdefault(ready[index], []).append(index)
    for index in sorted({writer[storage] for storage in ends if storage in writer}):
        wanted.setdefault(ready[index], []).append(index)
    followers: dict[int, list[int]] = {}
    for indices in wanted.values():
        for index in indices:
            for other in before[index]:
                followers.setdefault(other, []).append(index)

    steps: list[Step] = []
    done: set[int] = set()

    def run(index: int) -> None:
        """Appends an operation, after all that must come before it."""
        found, stack = {index}, [index]
        while stack:
            for other in before.get(stack.pop(), ()):
                if other not in done and other not in found:
                    found.add(other)
                    stack.append(other)
        for other in sorted(found - done):
            done.add(other)
            steps.append(Step(other, aside=needed[other]))

    for count in range(len(drawing) + 1):
        if count:
            run(drawing[count - 1])
        for first in wanted.get(count, ()):
            # A copy follows at once on what it copies.
            stack = [first]
            while stack:
                index = stack.pop()
                if index not in done:
                    run(index)
                    stack += [other for other in reversed(followers.get(index, ())) if ready[other] <= count]
    return steps


def _lifetimes(steps: list[Step], operations: list[Operation], sizes: list[int]) -> list[Step]:
    """Fills in when a storage has its last values, and when it can go."""
    held: set[int] = set()
    written: set[int] = set()
    for step in reversed(steps):
        if step.aside:
            continue
        operation = operations[step.operation]
        changed = dict.fromkeys(ref.storage for ref in operation.touched)
        step.final = [storage for storage in changed if storage not in written]
        written.update(changed)
        used = changed | dict.fromkeys(ref.storage for ref in operation.reads)
        step.free = [storage for storage in used if storage not in held]
        held.update(used)
        held.difference_update(storage for storage in changed if operation.replaces(storage, sizes[storage]))
    return steps


class Store:
    """The storages that are held, by number."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._held: dict[int, torch.UntypedStorage] = {}

    def tensor(self, ref: Ref, replaced: bool = False) -> Tensor:
        """`ref` upon its storage, which comes into being with its first use.

        What no operation has written is zero: were it left to chance, every process would have other values.
        """
        storage = self._held.get(ref.storage)
        if storage is None:
            size = self._sizes[ref.storage]
            # Through a tensor: only that tells torch's memory profiler.
            make = torch.empty if replaced else torch.zeros
            storage = self._held[ref.storage] = make(size, dtype=torch.uint8).untyped_storage()
        return ref.on(storage)

    def free(self, storage: int) -> None:
        self._held.pop(storage, None)

    def run(self, operation: Operation) -> None:
        """Calls it on the storages that are held.

        Raises:
            NotRecordable: if it fails, or returns another geometry than it did when it was recorded.
        """
        replaced = {r.storage for r in operation.writes if operation.replaces(r.storage, self._sizes[r.storage])}

        def tensor(ref: Ref) -> Tensor:
            return self.tensor(ref, ref.storage in replaced)

        arguments, named = self.arguments(operation.arguments, operation.named, tensor)
        default = torch.get_default_dtype()
        torch.set_default_dtype(operation.default)
        try:
            results = operation.call(*arguments, **named)
        except Exception as error:
            raise NotRecordable(f"`{operation.call}` fails: {error}") from error
        finally:
            torch.set_default_dtype(default)
        for result, ref in zip(tensors(results), operation.made, strict=False):
            if ref is None:
                continue
            if not ref.fits(result):
                raise NotRecordable(
                    f"`{operation.call}` returns another layout than foreseen: {ref} is {result.stride()}"
                )
            self._held[ref.storage] = result.untyped_storage()

    def arguments(self, arguments: list[Any], named: dict[str, Any], tensor: Any = None) -> tuple[Any, dict[str, Any]]:
        """The arguments of an operation with tensors in their references' places."""
        tensor = tensor or self.tensor
        return convert(arguments, Ref, tensor), {key: convert(value, Ref, tensor) for key, value in named.items()}


def _join(live: dict[int, Spans], ref: Ref) -> None:
    low, high = ref.span()
    if low == high:
        return
    spans: Spans = []
    for a, b in live.get(ref.storage, ()):
        if b < low or high < a:
            spans.append((a, b))
        else:
            low, high = min(a, low), max(b, high)
    live[ref.storage] = [*spans, (low, high)]


def _cut(live: dict[int, Spans], ref: Ref) -> None:
    low, high = ref.span()
    left = [part for a, b in live.get(ref.storage, ()) for part in ((a, min(b, low)), (max(a, high), b))]
    spans = [(a, b) for a, b in left if a < b]
    if spans:
        live[ref.storage] = spans
    else:
        live.pop(ref.storage, None)


def _meets(live: dict[int, Spans], ref: Ref) -> bool:
    low, high = ref.span()
    return any(a < high and low < b for a, b in live.get(ref.storage, ()))
