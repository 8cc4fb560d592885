"""One global batch through the pipeline: this worker's actions, one after the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from verbund.comm.collectives import Group
from verbund.data.loader import Batch
from verbund.errors import TaskError
from verbund.mesh.pipeline.schedule import Action
from verbund.mesh.pipeline.stages import Boundary, Stages
from verbund.mesh.pipeline.transfer import Transfer, tag
from verbund.observe.events import Journal

Forward = Callable[[int, Batch, list[Tensor] | None], Any]
"""Runs a stage on a micro-batch with what was received: a `Boundary`, or of the last stage the loss to go back from."""
Around = tuple[Callable[[bool], None], Callable[[], None]]


@dataclass
class _Pass:
    """What a micro-batch's backward pass through a stage needs."""

    received: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    later: Any = None


class Pipeline:
    """The stages of this worker, and its neighbours.

    Args:
        stages: of the model.
        group: the workers of the axis.
    """

    def __init__(self, stages: Stages, group: Group) -> None:
        self.stages = stages
        self.group = group
        self._transfer = Transfer(group)

    def holds_last(self) -> bool:
        """Whether the model's output arises here."""
        return (self.stages.count - 1) % self.group.world == self.group.rank

    def mine(self) -> list[int]:
        """The stages of this worker."""
        return list(range(self.group.rank, self.stages.count, self.group.world))

    def train(
        self,
        actions: list[Action],
        batches: Iterator[Batch],
        forward: Forward,
        parameters: list[Tensor],
        around: Around,
        step: int,
        journal: Journal,
    ) -> None:
        """Forward and backward passes of all micro-batches; gradients are added to the parameters' `grad`.

        Args:
            actions: in order.
            batches: yields this step's micro-batches in order.
            forward: runs a stage.
            parameters: what a backward pass for the weights alone is for.
            around: called before a backward pass, with whether it is the step's last, and after it.
            step: for the journal.
            journal: gets a span per action.
        """
        loaded: list[Batch] = []
        passes: dict[tuple[int, int], _Pass] = {}
        uses = Counter(action.micro_batch for action in actions if action.kind == "F")
        backwards = [index for index, action in enumerate(actions) if action.kind in "BW"]
        for index, action in enumerate(actions):
            key = (action.stage, action.micro_batch)
            if action.kind == "F":
                before = time.monotonic_ns()
                while len(loaded) <= action.micro_batch:
                    loaded.append(next(batches))
                journal.add("data", step, before, time.monotonic_ns())
                batch = loaded[action.micro_batch]
                passes[key] = self._forward(action, batch, forward, step, journal)
                uses[action.micro_batch] -= 1
                if not uses[action.micro_batch]:
                    loaded[action.micro_batch] = batch.with_columns({})  # its data are done with
                continue
            if action.kind in "BI":
                self._gradients(action, passes[key], step, journal)
            start = time.monotonic_ns()
            around[0](index == backwards[-1])
            self._backward(action, passes[key], parameters)
            if action.kind in "BW":
                around[1]()
                del passes[key]
            journal.action(step, action.kind, action.stage, action.micro_batch, start, time.monotonic_ns())
        self._transfer.finish()

    def evaluate(self, number: int, call: Callable[[], Any]) -> Any:
        """One batch through the stages without gradients; its output on the worker of the last stage, else None."""
        output = None
        for stage in self.mine():
            received = self._received(stage, number)[0] if stage else None
            result = self.stages.run(stage, call, received)
            if isinstance(result, Boundary):
                self._transfer.send(list(result.tensors), self._owner(stage + 1), tag(stage + 1, number, False))
            else:
                output = result
        return output

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        self._transfer.finish()

    def _owner(self, stage: int) -> int:
        return stage % self.group.world

    def _received(self, stage: int, micro_batch: int) -> tuple[list[Tensor], tuple[int, int]]:
        what = f"the activations of stage {stage - 1}"
        found, blocked = self._transfer.receive(self._owner(stage - 1), tag(stage, micro_batch, False), what)
        return [tensor for tensor in found if tensor is not None], blocked

    def _forward(self, action: Action, batch: Batch, forward: Forward, step: int, journal: Journal) -> _Pass:
        received: list[Tensor] = []
        if action.stage:
            received, blocked = self._received(action.stage, action.micro_batch)
            journal.received(step, action.stage, action.micro_batch, *blocked)
        start = time.monotonic_ns()
        result = forward(action.stage, batch, received if action.stage else None)
        if isinstance(result, Boundary):
            outputs = list(result.tensors)
            target = self._owner(action.stage + 1)
            self._transfer.send(list(outputs), target, tag(action.stage + 1, action.micro_batch, False))
            done = _Pass(received, outputs, [])
        else:
            done = _Pass(received, [result], [None])
        journal.action(step, "F", action.stage, action.micro_batch, start, time.monotonic_ns())
        return done

    def _gradients(self, action: Action, state: _Pass, step: int, journal: Journal) -> None:
        """What the next stage sends back; the last one's loss needs nothing."""
        if action.stage == self.stages.count - 1:
            return
        where = tag(action.stage + 1, action.micro_batch, True)
        what = f"the gradients of stage {action.stage + 1}"
        state.gradients, blocked = self._transfer.receive(self._owner(action.stage + 1), where, what)
        journal.received(step, action.stage, action.micro_batch, *blocked)

    def _backward(self, action: Action, state: _Pass, parameters: list[Tensor]) -> None:
        if action.kind == "W":
            if state.later is not None:
                try:
                    _weights(parameters, state.later)
                except RuntimeError as error:
                    raise TaskError(
                        f"the backward pass of stage {action.stage} cannot be done in two halves: {error}",
                        where="strategy.schedule",
                        fix="A parameter that is used twice within a stage goes with `1f1b`, `interleaved` or `gpipe`",
                    ) from error
            return
        pairs = [
            (output, gradient)
            for output, gradient in zip(state.outputs, state.gradients, strict=True)
            if output.requires_grad and (gradient is not None or output.dim() == 0)
        ]
        outputs = [output for output, _ in pairs]
        gradients = [g if g is not None else torch.ones_like(output) for output, g in pairs]
        inputs = [tensor for tensor in state.received if tensor.requires_grad]
        if action.kind == "I" and inputs and outputs:
            state.later = _inputs(outputs, gradients, inputs, parameters)
        elif outputs:
            _engine_run_backward(
                tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        if action.stage:
            # The graph is done with: what goes back must not keep it.
            sent = [tensor.grad if tensor.requires_grad else None for tensor in state.received]
            self._transfer.send(list(sent), self._owner(action.stage - 1), tag(action.stage, action.micro_batch, True))
        state.outputs, state.received, state.gradients = [], [], []


def _inputs(outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor], parameters: list[Tensor]) -> Any:
    """The backward pass for the inputs alone; returns what the one for the weights needs."""
    from torch.distributed.pipelining._backward import stage_backward_input

    found, groups = stage_backward_input(outputs, gradients, inputs, iter(parameters))  # type: ignore[arg-type]
    for tensor, gradient in zip(inputs, found, strict=True):
        if tensor.grad is None:
            tensor.grad = gradient
    return groups


def _weights(parameters: list[Tensor], groups: Any) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), groups)  # type: ignore[arg-type]
