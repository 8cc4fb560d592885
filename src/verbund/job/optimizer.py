"""The keys `train.optimizer` and `train.schedule`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from verbund.job.section import Positive, Section


class Group(Section):
    """Parameters whose names match, with optimiser arguments of their own."""

    model_config = ConfigDict(extra="allow")
    match: str | list[str]
    """Glob patterns over parameter names, e.g. `*.bias`. The first group that matches takes the parameter."""
    scale_lr: Annotated[float, Field(ge=0.0)] | None = None
    """Factor on the optimiser's learning rate."""


class Optimizer(Section):
    """A `torch.optim` optimiser by name, or `ftrl` (FTRL-proximal, with the arguments `beta` 1, `l1` 0 and `l2` 0);
    every other key is one of its arguments."""

    model_config = ConfigDict(extra="allow")
    shorthand = "name"
    name: str = "adamw"
    lr: Annotated[float, Field(ge=0.0)] = 1e-3
    groups: Annotated[list[Group], Field(examples=[[{"match": "*.bias", "weight_decay": 0.0}]])] = []

    def arguments(self) -> dict[str, Any]:
        """The arguments besides `lr` and `groups`, as given."""
        return dict(self.model_extra or {})


class Schedule(Section):
    """The learning rate as a function of the optimiser step alone."""

    shorthand = "name"
    name: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly from 0."""
    steps: Positive | None = None
    """Steps until the end of the decay; default: those of the whole training."""
    final: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Linear and cosine: the last rate as a share of the first."""
    every: Positive | None = None
    """Step: the rate is multiplied by `factor` every so many steps."""
    factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Step: see `every`."""

    @model_validator(mode="after")
    def _step_needs_every(self) -> Schedule:
        if self.name == "step" and self.every is None:
            raise ValueError("schedule `step` needs `every`, the steps between two drops")
        return self
