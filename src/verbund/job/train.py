"""The section `train`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbund.job.optimizer import Optimizer, Schedule
from verbund.job.section import Names, Positive, Section


class Objective(Section):
    """A loss by name."""

    shorthand = "name"
    name: Literal["cross_entropy", "binary_cross_entropy", "mean_squared_error", "next_token"]
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """cross_entropy and next_token: share of the target that goes to all classes alike."""
    class_weights: list[float] | None = None
    """cross_entropy and next_token: a weight per class."""
    ignore_index: int = -100
    """cross_entropy and next_token: targets of this class do not count."""


class Target(Section):
    """Training ends when a validation metric reaches `value`."""

    metric: str
    value: float


class Patience(Section):
    """Training ends when a validation metric has not improved for `validations` validations."""

    shorthand = "validations"
    metric: str = "loss"
    validations: Positive = 5
    minimum_gain: Annotated[float, Field(ge=0.0)] = 0.0
    """What a metric must gain at least to have improved."""


class Train(Section):
    """The training itself. It ends by whichever of epochs, steps, seconds, target, patience comes first."""

    objective: Annotated[Objective | None, Field(examples=["cross_entropy"])] = None
    """None: the task file has its own `loss`."""
    global_batch: Positive = 128
    """Samples of one optimiser step, whatever the number of workers."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Samples of one forward pass in a worker; 0: the worker's whole share. Never changes the result."""
    epochs: Positive | None = None
    steps: Positive | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    target: Annotated[Target | None, Field(examples=[{"metric": "accuracy", "value": 0.9}])] = None
    patience: Annotated[Patience | None, Field(examples=[{"metric": "loss", "validations": 5}])] = None
    optimizer: Annotated[Optimizer, Field(examples=[{"name": "adamw", "lr": 1e-3}])] = Optimizer()
    schedule: Annotated[Schedule, Field(examples=[{"name": "cosine", "warmup": 100}])] = Schedule()
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of the global norm of the gradients."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Type of the forward and backward pass; weights and optimiser stay in float32. `fp64`: all in float64, to tell
    rounding from error."""
    loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    """fp16 only: first loss scale; halved when gradients overflow, doubled after 2000 steps without."""
    activation_checkpointing: Names | bool = False
    """True: every child of a `ModuleList` or `Sequential`; or glob patterns of module names."""
    compile: bool = False
    """`torch.compile` the model."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of an exponential moving average of the weights, which is what is validated."""
    randomness: Literal["sample", "worker"] = "sample"
    """`sample`: dropout and augmentation are keyed by the sample; `worker`: torch's own generator."""
    batch_norm: Literal["group", "global"] = "group"
    """Statistics over groups of fixed composition, or over the whole global batch."""
    group: Positive = 32
    """Samples that a model with batch statistics, or a task that couples samples, always sees together."""
    check_replicas: Annotated[int, Field(ge=0)] = 100
    """Steps between two comparisons of all replicas' checksums; 0: never."""
