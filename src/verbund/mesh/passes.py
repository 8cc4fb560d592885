"""The forward and backward passes of a step: one micro-batch after the other, or through a pipeline's stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from verbund.data.loader import Batch
from verbund.job import Strategy
from verbund.mesh import batch_statistics
from verbund.mesh.axes import Mesh
from verbund.mesh.divide import Divided
from verbund.mesh.forward import ForwardPass, call
from verbund.mesh.pipeline.run import Pipeline
from verbund.mesh.pipeline.schedule import actions
from verbund.mesh.pipeline.stages import Boundary
from verbund.observe.events import Journal


class Passes:
    """What a worker does with its micro-batches.

    Args:
        model: as this worker has it.
        divided: which parts of the whole model it holds.
        forward: computes the loss of a micro-batch.
        buffers: gets the samples of each pass.
        mesh: this worker's place.
        strategy: of the job.
        before_last: is called before the last backward pass, after which all gradients are there.
    """

    def __init__(
        self,
        model: nn.Module,
        divided: Divided,
        forward: ForwardPass,
        buffers: batch_statistics.BufferDeltas,
        mesh: Mesh,
        strategy: Strategy,
        before_last: Callable[[], None],
    ) -> None:
        self._divided, self._forward, self._buffers = divided, forward, buffers
        self._mesh, self._strategy, self._before_last = mesh, strategy, before_last
        self._running_statistics = batch_statistics.running_statistics(model)

    def run(
        self, batches: Iterator[Batch], count: int, step: int, scale: float, journal: Journal
    ) -> tuple[float | Tensor, float, int]:
        """All of them forward and backward.

        Args:
            batches: where the micro-batches come from.
            count: how many of them belong to this step.
            step: the optimiser step.
            scale: of the loss, for the backward pass.
            journal: gets the spans.

        Returns:
            the loss, its weight, and when the last pass began that the journal does not have yet.
        """
        if self._divided.pipeline is not None:
            return self._pipelined(self._divided.pipeline, batches, count, step, scale, journal)
        return self._in_turn(batches, count, step, scale, journal)

    def _in_turn(
        self, batches: Iterator[Batch], count: int, step: int, scale: float, journal: Journal
    ) -> tuple[float | Tensor, float, int]:
        """Each micro-batch forward and backward; the loss, the weight, and when the last one began."""
        clock, shards = time.monotonic_ns, self._divided.shards
        loss: float | Tensor = 0.0
        weight = 0.0
        start = clock()
        for index in range(count):
            before = clock()
            batch = next(batches)
            start = clock()
            journal.add("data", step, before, start)
            sums = self._forward.loss(batch, step)
            total = sums.total.sum()
            last = index == count - 1
            if last:
                self._before_last()
            if shards is not None:
                shards.before_backward(last)
            # A scalar: for anything else torch imports its symbolic shapes first, which takes half a second.
            (total * scale).backward()
            if shards is not None:
                shards.after_backward()
            self._buffers.add(0 if batch.phantom else len(batch.ids))
            loss = loss + total.detach()
            weight += float(sums.weight.sum())
            if not last:
                journal.add("compute", step, start, clock())
        return loss, weight, start

    def _pipelined(
        self, pipeline: Pipeline, batches: Iterator[Batch], count: int, step: int, scale: float, journal: Journal
    ) -> tuple[float | Tensor, float, int]:
        """All micro-batches through the pipeline's stages of this worker."""
        shards = self._divided.shards
        losses: list[Tensor] = []
        weights: list[float] = []

        def forward(stage: int, batch: Batch, received: list[Tensor] | None) -> Any:
            def run(inputs: Any) -> Any:
                return pipeline.stages.run(stage, lambda: call(self._forward.model, inputs), received)

            result = self._forward.loss(batch, step, run)
            # The backward passes of batch statistics are still to come; what they saved of the running ones they do
            # not read.
            with _unsafe_preserve_version_counter(self._running_statistics):
                self._buffers.add(0 if batch.phantom else len(batch.ids))
            if isinstance(result, Boundary):
                return result
            total = result.total.sum()
            losses.append(total.detach())
            weights.append(float(result.weight.sum()))
            return total * scale

        def before_backward(last: bool) -> None:
            if shards is not None:
                shards.before_backward(last)

        def after_backward() -> None:
            if shards is not None:
                shards.after_backward()

        lists = actions(self._strategy.schedule, self._mesh.pipeline, self._strategy.stages_per_worker, count)
        pipeline.train(
            lists[self._mesh.place("pipeline")],
            batches,
            forward,
            [held.parameter for held in self._divided.trained],
            (before_backward, after_backward),
            step,
            journal,
        )
        return sum(losses) if losses else 0.0, sum(weights), time.monotonic_ns()
