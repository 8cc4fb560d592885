"""What operations have to compute, counted from their shapes: the same on every machine, however busy it is.

Seconds would depend on what else a machine does at the moment; two starts of a run would cut a model in two ways. Only
how the layers compare with each other matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Multiplications and additions that a processor does in the time in which it reads or writes a byte of memory: about
# that many on current CPUs and GPUs, within a factor of three.
_PER_BYTE = 10.0


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of the operations within the block.

    Args:
        place: where the model is; `found` has a sum for each place.
    """

    def __init__(self, place: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place
        self.found: dict[int, float] = {}
        self.passes = 1
        """How often the operations under way count: the gradient of the parameters, and that of the inputs, cost about
        as much as the operation itself each."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        output = func(*args, **kwargs)
        if not func.is_view and not _leaves_its_device(output, args):
            operations = float(count(*args, **kwargs, out_val=output)) if count is not None else 0.0
            moved = sum(x.nbytes for x in tree_leaves((args, kwargs, output)) if isinstance(x, Tensor))
            place = self._place()
            self.found[place] = self.found.get(place, 0.0) + self.passes * (operations + _PER_BYTE * moved)
        return output


def _leaves_its_device(output: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is a copy to the meta device, which belongs to the counting."""
    return isinstance(output, Tensor) and output.is_meta and any(isinstance(x, Tensor) and x.is_cpu for x in args)
