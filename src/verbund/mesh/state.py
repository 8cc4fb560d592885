"""What a worker holds of a model and its optimiser between steps, as pieces of global tensors: for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.mesh.axes import Mesh
from verbund.mesh.divide import Divided
from verbund.mesh.ema import ExponentialMovingAverage
from verbund.mesh.held import Held

Tensors = dict[tuple[str, str], Tensor]
"""By kind and name."""


@dataclass(frozen=True)
class State:
    """A replica's state.

    Args:
        model: as this worker has it.
        divided: which parts of the whole model it holds.
        optimizer: of those.
        ema: their moving average, if the job keeps one.
        mesh: this worker's place.
    """

    model: nn.Module
    divided: Divided
    optimizer: torch.optim.Optimizer
    ema: ExponentialMovingAverage | None
    mesh: Mesh

    def pieces(self, kind: str) -> Iterator[Piece]:
        """What this replica holds of `kind`: parameters, buffers, optimizer, ema or gradients, as boxes of global
        tensors.

        Of what several workers of a data replica hold one is the owner; replicas share a save among them.
        """
        if kind == "buffers":
            persistent = self.model.state_dict().keys()
            for name, buffer in self.model.named_buffers():
                if name in persistent and not buffer.is_meta:
                    yield Piece.whole(kind, name, buffer, name in self.divided.buffers)
            return
        averages = dict(self.ema.named_tensors()) if self.ema is not None else {}
        alone = self.mesh.place("shard") == 0
        for held in self.divided.held:
            if kind == "parameters":
                yield from held.pieces(kind, held.name, held.values.detach(), held.primary)
            elif kind == "ema" and held.name in averages:
                yield from held.pieces(kind, held.name, averages[held.name], held.primary)
            elif kind == "gradients" and held.values.grad is not None:
                yield from held.pieces(kind, held.name, held.values.grad, held.primary)
            elif kind == "optimizer":
                for key, value in self.optimizer.state.get(held.values, {}).items():
                    if not isinstance(value, Tensor):
                        continue
                    if key != "step" and value.shape == held.values.shape and (value.dim() or not held.shape):
                        yield from held.pieces(kind, f"{held.name}/{key}", value, held.primary)
                    else:
                        # Of a tensor in several boxes too there is one such number.
                        yield Piece.whole(
                            kind, f"{held.name}/{key}", value, held.primary and alone and _first_share(held)
                        )

    def tensors(self) -> Tensors:
        """All that this worker holds between steps, by kind and name, as it lies here: of a divided tensor its part.

        Whoever has the same place in a mesh of this shape has the same names and shapes; of optimiser states only
        those that there are. The tensors are the replica's own, not copies.
        """
        persistent = self.model.state_dict().keys()
        found: Tensors = {("parameters", held.name): held.values.detach() for held in self.divided.held}
        found |= {
            ("buffers", name): buffer
            for name, buffer in self.model.named_buffers()
            if name in persistent and not buffer.is_meta
        }
        if self.ema is not None:
            found |= {("ema", name): values for name, values in self.ema.named_tensors()}
        for held in self.divided.held:
            for key, value in self.optimizer.state.get(held.values, {}).items():
                if isinstance(value, Tensor):
                    found["optimizer", f"{held.name}/{key}"] = value
        return found

    def give(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """Takes the values of what `tensors` gave, here or at the same place of a mesh of this shape.

        Optimiser states become the given tensors themselves where they lie on the same device; all else is copied.

        Raises:
            KeyError: if a tensor of the model's is not among them.
        """
        states: dict[str, dict[str, Tensor]] = {}
        for (kind, full), values in tensors.items():
            if kind == "optimizer":
                name, _, key = full.rpartition("/")
                states.setdefault(name, {})[key] = values
        self.give_optimizer(states)
        with torch.no_grad():
            for (kind, name), target in self.tensors().items():
                if kind != "optimizer":
                    target.copy_(tensors[kind, name])

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors that this worker keeps between steps, by kind, and under `whole` those of a single process.

        Optimiser states count once there are any.
        """
        held = self.divided.held
        states = {h.name: self.optimizer.state.get(h.values, {}).values() for h in held}
        like = {h.name: sum(isinstance(v, Tensor) and v.shape == h.values.shape for v in states[h.name]) for h in held}
        averages = dict(self.ema.named_tensors()) if self.ema is not None else {}
        mine = {
            "parameters": sum(h.values.nbytes for h in held),
            "gradients": sum(h.values.nbytes for h in self.divided.trained),
            "optimizer": sum(v.nbytes for values in states.values() for v in values if isinstance(v, Tensor)),
            "ema": sum(v.nbytes for v in averages.values()),
            "buffers": sum(b.nbytes for b in self.model.buffers() if not b.is_meta),
        }
        copies = max(like.values(), default=0) + 2 + bool(averages)
        mine["whole"] = self.divided.whole_bytes * copies + mine["buffers"]
        return mine

    def all_names(self, kind: str) -> set[str]:
        """The names of all parameters, or saved buffers, of the whole model."""
        if kind == "parameters":
            return {name for name, _ in self.model.named_parameters()}
        persistent = self.model.state_dict().keys()
        return {name for name, _ in self.model.named_buffers() if name in persistent}

    def give_optimizer(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces the optimiser's state, by parameter and key; each value is of the shape of what is held here."""
        self.optimizer.state.clear()
        for held in self.divided.trained:
            for key, values in states.get(held.name, {}).items():
                here = values if values.dim() == 0 else values.to(held.values.device)
                self.optimizer.state[held.values][key] = here

    def load_optimizer(self, checkpoint: Checkpoint, kind: str = "optimizer", prefix: str = "") -> None:
        """Restores the optimiser's state from tensors named `PREFIX` `PARAMETER/KEY`."""
        known = {held.name: held for held in self.divided.trained}
        for full in checkpoint.names(kind):
            if not full.startswith(prefix):
                continue
            name, _, key = full.removeprefix(prefix).rpartition("/")
            if (held := known.get(name)) is None:
                continue
            if key != "step" and checkpoint.shape(kind, full) == held.shape:
                values = torch.empty_like(held.values)
                held.fill(values, checkpoint, kind, full)
            else:
                # Step counters stay where the optimiser keeps them; moments lie beside their parameter.
                values = checkpoint.read(kind, full)
                values = values if values.dim() == 0 else values.to(held.values.device)
            self.optimizer.state[held.values][key] = values


def _first_share(held: Held) -> bool:
    return held.tensor_cut is None or held.tensor_cut.worker == 0
