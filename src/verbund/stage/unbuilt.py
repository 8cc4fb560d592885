"""A training pass of a model without values: its shapes, and the memory that its activations would take."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from verbund.data.batch import Batch
from verbund.mesh.divide import example_call
from verbund.mesh.pipeline.trace import on_meta, run_on_meta, to_meta
from verbund.mesh.replica import Replica
from verbund.randomness import SampleRandomness
from verbund.task import Task


def follow(replica: Replica, task: Task, batch: Batch) -> int:
    """Runs a forward pass and the loss on the meta device, as far as they do without values.

    Returns:
        the bytes that are kept for the backward pass.

    Raises:
        InputError: if the forward pass needs values.
    """
    model = replica.model
    tensors = on_meta(model)
    for name, parameter in model.named_parameters():
        tensors[name].requires_grad_(parameter.requires_grad)
    call = with_loss(example_call(task, batch.columns), task, batch)
    own = {_memory(tensor) for tensor in tensors.values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_meta and _memory(tensor) not in own:
            kept[_memory(tensor)] = tensor
        return tensor

    model.train()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        if isinstance(replica.randomness, SampleRandomness):
            replica.randomness.probe(lambda: run_on_meta(model, tensors, call))
        else:
            run_on_meta(model, tensors, call)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def with_loss(call: Any, task: Task, batch: Batch) -> Any:
    """Calls a model, and what computes the loss of its output as far as that does without values."""
    targets = task.targets(batch.columns)

    def called(model: nn.Module) -> Any:
        output = call(model)
        try:
            task.loss(output, to_meta(targets))
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
        return output

    return called


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
