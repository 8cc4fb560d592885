"""Notes down what a constructor does to tensors, and answers with tensors that have no memory."""

from __future__ import annotations

import weakref
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verbund.mesh.initial import geometry
from verbund.mesh.initial.generators import Generators
from verbund.mesh.initial.hollow import ASKED_OF_ALL, META, Hollow, hollow, refused
from verbund.mesh.initial.replay import Store, plan
from verbund.mesh.initial.signature import Signature, signature
from verbund.mesh.initial.tape import NotRecordable, Operation, Ref, convert, flat_refs, tensors

_LIFT = torch.ops.aten.lift_fresh.default
# What may be computed while recording, where the constructor asks for values that no draw enters.
_EVALUATED_BYTES = 2**28


class Recorder(TorchDispatchMode):
    """Notes down the operations of the code it is active for, and answers with hollow tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators = Generators()
        self.refusal: str | None = None
        """The first; a constructor that catches it is not recorded either."""
        self.operations: list[Operation] = []
        self.storages: list[torch.UntypedStorage] = []
        """On the meta device, by number."""
        self.hollows: list[weakref.ref[Hollow]] = []
        """All tensors that were given out."""
        self._numbers: dict[int, int] = {}
        self._shared: list[tuple[Tensor, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler, which takes a second, to tell it not to trace this.
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in ASKED_OF_ALL:
            return Hollow.__torch_dispatch__(function, types, args, kwargs)
        try:
            return self._call(function, args, kwargs or {})
        except NotRecordable as error:
            self.refusal = self.refusal or str(error)
            raise

    # -- one operation -------------------------------------------------------------------------------------------

    def _call(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        traits = signature(function)
        device = named.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise refused(str(function), f"makes a tensor on {device}")
        given = [*tensors(arguments), *tensors(list(named.values()))]
        if given and not any(isinstance(tensor, Hollow) for tensor in given):
            if function is _LIFT:
                return self.constant(given[0])
            if not traits.random:
                return function(*arguments, **named)
        if not all(isinstance(tensor, Hollow) for tensor in tensors(traits.changed(arguments, named))):
            raise refused(str(function), "changes a tensor that is not the constructor's own")
        refs = convert(arguments, Tensor, self._ref)
        named_refs = {key: convert(value, Tensor, self._ref) for key, value in named.items()}
        if traits.by_value or (traits.shaped_by_value and not _picks_by_number(traits, refs)):
            return self._evaluated(function, refs, named_refs)
        return self._noted(function, traits, arguments, named, refs, named_refs)

    def overwrite(self, function: Any, tensor: Hollow, *numbers: float, generator: torch.Generator | None) -> None:
        """Notes a Python function that draws all of a tensor's values anew, as one operation.

        It can look at values, which operations of their own could not.
        """
        ref = self._ref(tensor)
        assert isinstance(ref, Ref)
        draw = self.generators.draw(generator or torch.default_generator)
        named = {"generator": generator}
        self.operations.append(Operation(function, [ref, *numbers], named, [], [ref], [None], True, draw))

    def _noted(
        self,
        function: Any,
        traits: Signature,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        refs: list[Any],
        named_refs: dict[str, Any],
    ) -> Any:
        """Runs it on the meta device, and keeps it on the tape unless it only looks at memory differently."""
        metas: dict[int, Tensor] = {}

        def meta(ref: Ref) -> Tensor:
            if id(ref) not in metas:
                metas[id(ref)] = ref.on(self.storages[ref.storage])
            return metas[id(ref)]

        written = flat_refs(traits.changed(tuple(refs), named_refs))
        # Most often all that it returns is what it is given to write to.
        ask = traits.reshapes or not all(traits.returned) or any(0 in ref.size for ref in written)
        results: Any = None
        if ask:
            given = convert(refs, torch.UntypedStorage, self._foreign)
            results = geometry.results(function, traits, given, named_refs, meta)
        parts = results if ask and len(traits.returned) > 1 else [results] * len(traits.returned)

        now = {id(ref): self._ref_of(metas[id(ref)]) if id(ref) in metas else ref for ref in written}
        for tensor, ref in zip(tensors(traits.changed(arguments, named)), written, strict=True):
            if now[id(ref)] != ref:
                tensor.data = self._hollow(metas[id(ref)])
        made: list[Ref | None] = []

        def result(tensor: Tensor) -> Tensor:
            count = len(self.storages)
            ref = self._ref_of(tensor)
            made.append(ref if ref.storage == count else None)
            return self._hollow(tensor)

        own = dict(zip(traits.written, traits.changed(arguments, named), strict=True))
        answers = []
        for part, name in zip(parts, traits.returned, strict=True):
            made += [None] if name else []
            answers.append(own[name] if name else convert(part, Tensor, result))
        if not (traits.empty or traits.reshapes or (made and not any(made) and not written)):
            draw = None
            if traits.random:
                draw = self.generators.draw(named.get("generator") or torch.default_generator)
            read = flat_refs([refs, list(named_refs.values())])
            if traits.overwrites:
                read = [ref for ref in read if id(ref) not in now]
            refs = convert(refs, Ref, lambda ref: now.get(id(ref), ref))
            named_refs = {key: convert(v, Ref, lambda ref: now.get(id(ref), ref)) for key, v in named_refs.items()}
            self.operations.append(
                Operation(function, refs, named_refs, read, list(now.values()), made, traits.overwrites, draw)
            )
        return (tuple(answers) if len(answers) > 1 else answers[0]) if answers else None

    def _evaluated(self, function: Any, refs: list[Any], named: dict[str, Any]) -> Any:
        """What it returns for the values that its tensors have now."""
        store = self._computed(flat_refs([refs, list(named.values())]), str(function))
        arguments, named = store.arguments(refs, named)
        return convert(function(*arguments, **named), Tensor, self.constant)

    def values(self, tensor: Hollow, name: str) -> Tensor:
        """The values of a tensor as they are now; `name` is what asks for them."""
        ref = Ref.of(tensor, self.number(tensor))
        return self._computed([ref], name).tensor(ref)

    def _computed(self, refs: list[Ref], name: str) -> Store:
        """Storages with the values of `refs`, computed anew.

        Raises:
            NotRecordable: if random numbers are among what they come from, or large tensors.
        """
        sizes = self.sizes()
        steps = [self.operations[step.operation] for step in plan(self.operations, refs, sizes, draws=False)]
        if any(operation.draw for operation in steps):
            raise refused(name, "asks for values that are drawn at random")
        if sum(sizes[n] for n in {ref.storage for op in steps for ref in op.touched}) > _EVALUATED_BYTES:
            raise refused(name, "asks for the values of large tensors")
        store = Store(sizes)
        for operation in steps:
            store.run(operation)
        return store

    # -- tensors -------------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        return [storage.nbytes() for storage in self.storages]

    def number(self, tensor: Tensor) -> int:
        number = self._numbers.get(Tensor.untyped_storage(tensor)._cdata)
        if number is None:
            raise refused("a tensor", "came about in a way that cannot be followed")
        return number

    def _register(self, storage: torch.UntypedStorage) -> int:
        """Gives a storage its number. It is kept, so that no other gets its address."""
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number

    def _ref(self, tensor: Tensor) -> Ref | Tensor:
        """The reference of an argument. A scalar from elsewhere stays: it may be a number in a tensor's guise."""
        if isinstance(tensor, Hollow):
            return Ref.of(tensor, self.number(tensor))
        if tensor.dim() == 0:
            return tensor
        return Ref.of(tensor, self.number(self.constant(tensor.detach().clone())))

    def _ref_of(self, tensor: Tensor) -> Ref:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise refused("a tensor", f"of layout {tensor.layout} or of quantised numbers cannot be followed")
        return Ref.of(tensor, self._register(tensor.untyped_storage()))

    def _hollow(self, tensor: Tensor) -> Hollow:
        made = hollow(tensor)
        self.hollows.append(weakref.ref(made))
        return made

    def constant(self, tensor: Tensor) -> Hollow:
        """A tensor that has values already: from Python numbers, from numpy, from a file."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise refused("a tensor", f"on {tensor.device} of layout {tensor.layout} cannot be followed")
        storage = self._foreign(tensor.untyped_storage())
        return self._hollow(Ref.of(tensor, self._numbers[storage._cdata]).on(storage))

    def _foreign(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The meta storage that stands for one with values."""
        if storage.device.type != "cpu":
            return storage
        content = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        if not storage.resizable():
            # Numpy, or whoever made it, can still change it.
            self._shared.append((content, _checksum(content)))
        on_meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
        whole = Ref(self._register(on_meta), torch.uint8, (storage.nbytes(),), (1,), 0)
        self.operations.append(Operation(content.clone, [], {}, [], [], [whole], overwrites=False))
        return on_meta

    def check_shared(self) -> None:
        """That memory which others can change is as it was when it became a tensor.

        Raises:
            NotRecordable: if it is not.
        """
        if any(_checksum(content) != checksum for content, checksum in self._shared):
            raise NotRecordable("an array was changed after it had become a tensor")


def _picks_by_number(traits: Signature, refs: list[Any]) -> bool:
    """Whether it is indexing with integers: that alone among its like has a shape that no value decides."""
    return traits.name == "index" and not any(ref.dtype in (torch.bool, torch.uint8) for ref in flat_refs(refs[1:]))


def _checksum(content: Tensor) -> int:
    array: Any = content.numpy()
    return crc32(array)
