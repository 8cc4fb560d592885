"""The job: what to train, on what, how it is divided, and where it runs.

A job is a TOML file or the same frozen objects in Python. Unknown keys are refused with the nearest known one,
and all problems are reported at once. Every default of the product stands here.
"""

from __future__ import annotations

import copy
import ipaddress
import math
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from verbund.errors import InputError, JobError, Problem, nearest
from verbund.job_problems import problems, section_at, shown
from verbund.placement import place


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _paired(value: Any) -> Any:
    """TOML has arrays only; strict models want the tuple where one is meant. One number is a square."""
    return (value, value) if type(value) is int else tuple(value) if isinstance(value, list) else value


Positive = Annotated[int, Field(gt=0)]
Names = Annotated[list[str], BeforeValidator(_listed)]


class Section(BaseModel):
    """Base of all parts of a job: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None
    """The key that a bare value in place of the section stands for."""

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, value: Any) -> Any:
        if cls.shorthand is not None and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return {cls.shorthand: value}
        return value


class Data(Section):
    """Where the samples come from."""

    train: str | None = None
    """File, folder, glob, manifest, or `sklearn:NAME`. None: the task file has a `dataset()`."""
    validation: str | None = None
    """A second source of the same columns, for validation."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of `train` held out for validation, chosen by a seeded hash of the sample id."""
    input: str | list[str] | None = None
    """Column or columns that the model is called with, as float32. A number per sample becomes [B, 1]; several
    columns are
    concatenated along the last dimension."""
    target: str | list[str] | None = None
    """Column or columns that the loss compares with. Not needed for `next_token`."""
    scale: Annotated[dict[str, float], Field(examples=[{"image": 255.0}])] = {}
    """Divisor per input column, applied after the cast to float32."""
    loaders: Annotated[int, Field(ge=0, le=64)] = 0
    """Loader processes per worker; 0 prefetches in a thread of the worker."""
    prefetch: Annotated[int, Field(ge=1, le=64)] = 2
    """Global batches read ahead."""
    window: Annotated[int, Field(ge=1)] = 1024
    """Blocks of the data set that are shuffled together."""
    sequence: Annotated[int, Field(ge=1)] = 128
    """Text only: tokens per sample (one more is read, as the last target)."""
    tokenizer: str | None = None
    """Text only: `bytes`, or the path of a Hugging Face `tokenizer.json` (extra `text`). Default: that of the model
    where the task is `hf:PATH`, else `bytes`."""
    image_size: Annotated[tuple[Positive, Positive] | None, BeforeValidator(_paired), Field(examples=[[32, 32]])] = None
    """Folders of images only: height and width that every image is resized to."""
    placement: Literal["shared", "island"] = "shared"
    """`shared`: every island draws from all samples; `island`: each draws from its own run of rows only, as where data
    stay on the machine that has them."""
    cache: str | None = None
    """Folder of converted data; default `$XDG_CACHE_HOME/verbund` or `~/.cache/verbund`."""


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


class Validate(Section):
    """Validation during and after training."""

    every: Literal["epoch", "end"] | Positive = "epoch"
    """Steps between two validations, `epoch`, or `end`."""
    batch: Positive = 256
    """Samples of one evaluation batch; its composition never depends on the workers."""
    metrics: Annotated[Names | None, Field(examples=[["accuracy"]])] = None
    """Names; default: what fits the objective."""


class Checkpoint(Section):
    """What is kept on disk."""

    every: Literal["epoch", "end"] | Positive = "epoch"
    """Steps between two checkpoints, `epoch`, or `end`."""
    keep: Positive = 2
    """Checkpoints kept, the newest first; the best one (if a target or patience names a metric) is kept besides."""
    disk_budget_mb: Annotated[float, Field(gt=0)] | None = None
    """Older checkpoints are pruned until the rest fits; the newest always stays."""


class Compression(Section):
    """Gradients of the axis `data` travel in fewer bytes. What a method leaves out is kept by each worker and added to
    its gradients of the next step (error feedback)."""

    shorthand = "name"
    name: Literal["none", "fp16", "bf16", "int8", "int4", "sign", "top_k", "power_sgd"] = "none"
    """`fp16`, `bf16`: half the bytes; `int8`, `int4`: whole numbers with a scale per block; `sign`: one bit, and the
    mean size per block; `top_k`: the largest values alone; `power_sgd`: matrices as products of two narrow ones."""
    warmup: Annotated[int, Field(ge=0)] | None = None
    """Steps without compression at the beginning of the training; default 100 for `sign`, `top_k` and
    `power_sgd`, which leave out most, else 0."""
    density: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    """top_k: the share of the values that travels."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 4
    """power_sgd: columns of the two narrow matrices."""
    minimum_ratio: Annotated[float, Field(ge=1.0)] = 2.0
    """power_sgd: matrices that would shrink by less than this factor travel as they are, and so do vectors."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """int8, int4: up or down by a draw (keyed by the seed) whose mean is the value itself, or to the nearest."""

    @property
    def exact_steps(self) -> int:
        """Steps without compression at the beginning of the training."""
        if self.warmup is not None:
            return self.warmup
        return 100 if self.name in ("sign", "top_k", "power_sgd") else 0

    @model_validator(mode="after")
    def _of_the_method(self) -> Compression:
        problems = []
        for key, methods in _COMPRESSION_KEYS.items():
            changed = getattr(self, key) != type(self).model_fields[key].default
            if changed and self.name not in methods:
                problems.append(f"`{key}` belongs to {' and '.join(f'`{m}`' for m in methods)}, not to `{self.name}`")
        if problems:
            raise ValueError("\n".join(problems))
        return self


_COMPRESSION_KEYS = {
    "density": ("top_k",),
    "rank": ("power_sgd",),
    "minimum_ratio": ("power_sgd",),
    "rounding": ("int8", "int4"),
}
CASTS = ("fp16", "bf16")
"""The methods of compression that keep nothing from step to step."""


class Exchange(Section):
    """How islands combine what they learn."""

    shorthand = "name"
    name: Literal["all_reduce", "local_sgd", "diloco", "parameter_server", "federated"] = "all_reduce"
    """`all_reduce`: gradients are added up in every step, as along the axis `data`. `local_sgd`: islands train alone
    and average their parameters every so many steps. `diloco`: every so many steps an outer optimiser with Nesterov
    momentum steps along the averaged difference of the parameters. The others are not available in this version."""
    every: Positive | None = None
    """local_sgd, diloco: steps between two exchanges; default 16 and 64."""
    adaptive: bool = False
    """local_sgd, diloco: the steps between two exchanges become fewer as the loss falls; `every` is their first
    number, and after every 8 exchanges there is a new one."""
    outer_lr: Annotated[float, Field(gt=0.0)] = 0.7
    """diloco: learning rate of the outer optimiser."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """diloco: Nesterov momentum of the outer optimiser."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """local_sgd, diloco: parts of the model that are exchanged one after the other, evenly over `every` steps."""
    delay: Annotated[int, Field(ge=0)] = 0
    """local_sgd, diloco: steps for which training goes on while an exchange is under way."""
    mixing: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """local_sgd, diloco: the share of an island's own values that stays when an exchange arrives; default 0.5 with a
    `delay`, else 0."""
    compression: Annotated[Compression, Field(examples=["int4"])] = Compression()
    """local_sgd, diloco: what the differences of parameters are sent as."""

    @model_validator(mode="after")
    def _fits(self) -> Exchange:
        problems = []
        if self.name in ("parameter_server", "federated"):
            problems.append(f"exchange `{self.name}` is not available in this version; there are {', '.join(_READY)}")
        if not self.local:
            given = sorted(self.model_fields_set - {"name"} - {k for k, v in _EXCHANGE_DEFAULTS if self._is(k, v)})
            problems += [f"`{key}` is for the exchanges local_sgd and diloco, not `{self.name}`" for key in given]
        elif self.name == "local_sgd":
            outer = [key for key in ("outer_lr", "outer_momentum") if key in self.model_fields_set]
            given = [key for key in outer if not self._is(key, dict(_EXCHANGE_DEFAULTS)[key])]
            problems += [f"`{key}` is for the exchange diloco, not `local_sgd`" for key in given]
        if self.fragments > self.steps_between:
            problems.append(f"{self.fragments} fragments need `every` of at least as many steps")
        if self.delay >= self.steps_between:
            problems.append(f"`delay` of {self.delay} steps must be less than `every`, {self.steps_between}")
        if self.adaptive and (self.fragments > 1 or self.delay):
            problems.append("`adaptive` goes with neither `fragments` nor `delay`")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _is(self, key: str, value: Any) -> bool:
        return bool(getattr(self, key) == value)

    @property
    def local(self) -> bool:
        """Whether islands train alone between two exchanges."""
        return self.name in ("local_sgd", "diloco")

    @property
    def steps_between(self) -> int:
        """Steps between two exchanges of the same part of the model."""
        return self.every or {"local_sgd": 16, "diloco": 64}.get(self.name, 1)

    @property
    def kept(self) -> float:
        """The share of an island's own values that stays when an exchange arrives."""
        return self.mixing if self.mixing is not None else 0.5 if self.delay else 0.0


_READY = ("all_reduce", "local_sgd", "diloco")
_EXCHANGE_DEFAULTS = tuple(
    (key, field.default) for key, field in Exchange.model_fields.items() if key != "name" and field.default is not None
)


class Strategy(Section):
    """How the work is divided: a mesh inside an island, an exchange between islands."""

    mesh: Annotated[dict[str, int], Field(examples=[{"data": 2}])] = {}
    """Sizes of the axes `data` (replicas share the samples), `shard` (so do workers that hold a share of every
    parameter), `tensor` (workers share every large operation) and `pipeline` (workers share the layers)."""
    islands: int = 1
    """Groups of workers, each with a mesh of this size; they share the samples of every global batch."""
    exchange: Annotated[Exchange, Field(examples=["diloco", {"name": "diloco", "every": 50}])] = Exchange()
    """How islands combine what they learn."""
    zero: Literal[1, 2, 3] = 3
    """Axis `shard`: what is divided all the time: 1 optimiser states, 2 gradients too, 3 parameters too."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble"] = "1f1b"
    """Axis `pipeline`: the order in which a stage computes micro-batches."""
    chunks: Annotated[int, Field(ge=1, le=64)] | None = None
    """Axis `pipeline`: stages per worker; default 1, or 2 for the interleaved schedules."""
    balance: Literal["cost", "memory"] = "cost"
    """Axis `pipeline`: stages of equal work, counted from what each layer computes, or of equal bytes."""
    compression: Annotated[Compression, Field(examples=[{"name": "top_k", "density": 0.01}])] = Compression()
    """Axis `data` (casts: `shard` too): what gradients are sent as. Results are no longer those of one process."""

    @model_validator(mode="after")
    def _known(self) -> Strategy:
        problems = []
        for axis, size in self.mesh.items():
            if axis not in AXES:
                problems.append(f"`{axis}` is no axis of a mesh. {nearest(axis, AXES)}")
            elif size < 1:
                problems.append(f"axis `{axis}` has {size} workers; it needs at least 1")
        if self.islands < 1:
            problems.append(f"{self.islands} islands; at least 1 is needed")
        if self.mesh.get("shard", 1) > 1 and self.compression.name not in ("none", *CASTS):
            problems.append(
                f"compression `{self.compression.name}` does not work with the axis `shard`: every worker would have "
                "to keep what was left out of the whole gradient, which the axis is there to avoid. Use `fp16` or "
                "`bf16`, or the axis `data` alone"
            )
        if self.chunks is not None and self.chunks > 1 and not self.schedule.startswith("interleaved"):
            problems.append(
                f"`chunks` of {self.chunks} need a schedule `interleaved` or `interleaved_zero_bubble`, "
                f"not `{self.schedule}`"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def stages_per_worker(self) -> int:
        """Pipeline stages of each worker."""
        return self.chunks or (2 if self.schedule.startswith("interleaved") else 1)

    @property
    def world(self) -> int:
        """The number of workers."""
        return math.prod(self.mesh.values()) * self.islands


AXES = ("data", "shard", "tensor", "pipeline")


class Cluster(Section):
    """Where processes run, and how long anything may take."""

    kind: Literal["local", "hosts"] = "local"
    """`local`: this machine. `hosts`: several, over a network; what follows for it does nothing elsewhere."""
    hosts: Annotated[list[str], Field(examples=[["10.0.0.1", "10.0.0.2"]])] = []
    """Kind `hosts`: names or addresses. Workers fill them in the order of ranks; an island stays on one host where it
    fits. What a run reads and writes must have the same paths on all of them (a shared file system)."""
    slots: Annotated[Positive | list[Positive] | None, Field(examples=[4])] = None
    """Kind `hosts`: workers that a host takes, or a list with one number a host; default: an even share."""
    command: str = "ssh -o BatchMode=yes -o ConnectTimeout=20 {host}"
    """Kind `hosts`: what makes the command line that follows it run on a host. The machine of the command itself needs
    none."""
    trusted_network: Annotated[str | None, Field(examples=["10.0.0.0/24"])] = None
    """Kind `hosts`: a network that is yours alone. Workers exchange tensors there without encryption. Elsewhere only
    islands that each lie on one host and train alone (local_sgd, diloco) may have several hosts: their exchange is
    encrypted."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads per worker. 0: training shares the cores among the workers, and evaluation uses 1, so that its
    result is the same bit for bit for any number of workers."""
    heartbeat: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two signs of life of a worker."""
    lost_after: Annotated[float, Field(gt=0)] = 30.0
    """Seconds without a sign of life after which a worker counts as lost."""
    step_deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that any one step, batch or save may take before the run fails and names who is missing."""
    orphan_grace: Annotated[float, Field(gt=0)] = 30.0
    """Seconds after the loss of the supervisor within which all workers have ended."""
    stop_grace: Annotated[float, Field(gt=0)] = 10.0
    """Seconds a process gets to end when asked, before it is killed."""

    @model_validator(mode="after")
    def _hosts_fit(self) -> Cluster:
        problems = []
        if self.kind == "hosts" and not self.hosts:
            problems.append('kind `hosts` needs `hosts`, e.g. `hosts = ["10.0.0.1", "10.0.0.2"]`')
        if twice := sorted({host for host in self.hosts if self.hosts.count(host) > 1}):
            problems.append(f"`hosts` names {', '.join(twice)} more than once; `slots` says how many workers it takes")
        if any(not host.strip() or host.startswith("-") or any(map(str.isspace, host)) for host in self.hosts):
            problems.append("a host is a name or an address, without spaces and not beginning with `-`")
        if isinstance(self.slots, list) and len(self.slots) != len(self.hosts):
            problems.append(f"`slots` has {len(self.slots)} numbers for {len(self.hosts)} hosts")
        problems += _command_problems(self.command)
        if self.trusted_network is not None:
            try:
                network = ipaddress.ip_network(self.trusted_network)
            except ValueError as error:
                problems.append(f"`trusted_network` is no network such as 10.0.0.0/24: {error}")
            else:
                outside = [
                    host for host in self.hosts if _is_address(host) and ipaddress.ip_address(host) not in network
                ]
                if outside:
                    problems.append(f"{', '.join(outside)} does not lie in `trusted_network` {network}")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _command_problems(command: str) -> list[str]:
    try:
        words = shlex.split(command)
        [word.format(host="host") for word in words]
    except (ValueError, KeyError, IndexError) as error:
        return [f"`command` cannot be read: {error}; the host's name is `{{host}}`"]
    return [] if words else ["`command` is empty; it is what reaches a host, e.g. `ssh {host}`"]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Observe(Section):
    """What is recorded."""

    journal_mb: Annotated[float, Field(gt=0)] = 64.0
    """Upper bound of one process's journal; beyond it, spans are thinned and the report says so."""
    tensorboard: bool = False
    """Write TensorBoard event files to `tensorboard/` (extra `tensorboard`)."""


class Job(Section):
    """A description of work. `Job.read` reads a file; `resolved` is what a run's `job.toml` holds."""

    task: str = ""
    """A Python file with `model()`; or `hf:PATH`, a Hugging Face model's folder; or `hf:smollm2`, a small language
    model that a package carries (extra `text`). Paths are relative to the job file."""
    name: str | None = None
    """Name of the run's directory; default: that of the job file."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the initial weights, the order, the split and all that is drawn."""
    data: Data = Data()
    train: Train = Train()
    validate_: Validate = Field(default=Validate(), alias="validate")
    checkpoint: Checkpoint = Checkpoint()
    strategy: Strategy = Strategy()
    cluster: Cluster = Cluster()
    observe: Observe = Observe()
    folder: str = Field(default=".", exclude=True)
    """Folder that relative paths of this job start from; set by `read`, absolute in a run."""

    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="after")
    def _whole(self) -> Job:
        problems = []
        if not self.task:
            problems.append("`task` is missing: name a Python file with a function `model()`")
        train = self.train
        if not any((train.epochs, train.steps, train.seconds, train.target, train.patience)):
            problems.append("`train` has no end: give `epochs`, `steps`, `seconds`, `target` or `patience`")
        held_out = self.data.validation is not None or self.data.validation_fraction > 0
        if (train.target or train.patience) and not held_out and self.data.train is not None:
            problems.append(
                "`train.target` and `train.patience` need validation data: "
                "give `data.validation` or `data.validation_fraction`"
            )
        if train.compile and train.activation_checkpointing and train.randomness == "sample":
            problems.append(
                "`train.compile` with `train.activation_checkpointing` cannot key what is drawn by the sample: "
                'leave one of them out, or set `train.randomness = "worker"`'
            )
        if self.strategy.exchange.local and train.ema is not None:
            problems.append(
                f"`train.ema` averages the weights of every step, which islands of `{self.strategy.exchange.name}` do "
                "not share: leave it out"
            )
        if self.strategy.islands > train.global_batch:
            problems.append(
                f"a global batch of {train.global_batch} samples cannot be shared by {self.strategy.islands} islands: "
                "raise `train.global_batch`"
            )
        if self.data.validation is not None and self.data.validation_fraction > 0:
            problems.append("give `data.validation` or `data.validation_fraction`, not both")
        problems += self._placement_problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _placement_problems(self) -> list[str]:
        cluster, strategy = self.cluster, self.strategy
        if cluster.kind != "hosts" or strategy.world < 1:
            return []
        places = place(strategy.world, strategy.islands, len(cluster.hosts), cluster.slots)
        if places is None:
            return [f"`cluster.slots` has too little room for {strategy.world} workers on {len(cluster.hosts)} hosts"]
        if len(set(places)) == 1 or cluster.trusted_network is not None:
            return []
        what = "workers on several hosts exchange tensors without encryption or proof of who takes part"
        fix = 'if a network is yours alone, name it, e.g. `cluster.trusted_network = "10.0.0.0/24"`'
        size = strategy.world // strategy.islands
        if not strategy.exchange.local:
            alone = "islands that each lie on one host and train alone, whose exchange is encrypted"
            how = '`strategy.exchange = "diloco"` or "local_sgd"'
            return [f"{what}: {fix}; else take {alone} ({how}), or put all workers on one host by `cluster.slots`"]
        if any(len(set(places[first : first + size])) > 1 for first in range(0, strategy.world, size)):
            whole = f"take smaller islands, or hosts whose `cluster.slots` have room for {size} workers"
            return [f"{what}, and an island of {size} would lie on several: {whole}; or {fix}"]
        return []

    @staticmethod
    def read(path: str | Path, changes: dict[str, Any] | None = None) -> Job:
        """Reads a job file.

        Args:
            path: a TOML file.
            changes: dotted keys to values that replace the file's, e.g. `{"train.steps": 100}`.

        Raises:
            JobError: with all problems found.
        """
        path = Path(path)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise JobError([Problem(str(path), "no such job file", "`verbund init NAME` writes one")]) from None
        except IsADirectoryError:
            inside = path / "job.toml"
            fix = f"There is {inside}" if inside.is_file() else None
            raise JobError([Problem(str(path), "is a folder, not a job file", fix)]) from None
        except (OSError, UnicodeDecodeError) as error:
            raise JobError([Problem(str(path), f"cannot be read: {error}")]) from None
        except tomllib.TOMLDecodeError as error:
            raise JobError([Problem(str(path), f"is not TOML: {error}")]) from None
        raw.setdefault("name", path.stem)
        return Job.build(raw, changes or {}, source=path.name, folder=path.resolve().parent)

    @staticmethod
    def build(raw: dict[str, Any], changes: dict[str, Any], *, source: str, folder: Path) -> Job:
        """Checks `raw`, with `changes` applied, as a job whose paths are relative to `folder`."""
        raw = copy.deepcopy(raw)
        for key, value in changes.items():
            _change(raw, key, value)
        if "folder" in raw:
            raise JobError([Problem(f"{source}, folder", "unknown key", "Paths are relative to the job file's folder")])
        try:
            return Job.model_validate({**raw, "folder": str(folder)})
        except ValidationError as error:
            found = []
            for key, problem in problems(error, Job, raw):
                place = "arguments" if key and any(_touches(key, changed) for changed in changes) else source
                found.append(replace(problem, where=f"{place}, {key}" if key else place))
            raise JobError(found) from None

    def path(self, relative: str) -> Path:
        """A path of the job, relative to the job file's folder."""
        return Path(self.folder) / relative

    def resolved(self) -> dict[str, Any]:
        """All settings with their defaults as plain values; what is None is left out, as TOML has no null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def toml(self) -> str:
        """`resolved` as TOML."""
        return tomli_w.dumps(self.resolved())

    @property
    def world(self) -> int:
        """The number of workers."""
        return self.strategy.world

    @property
    def neighbours(self) -> int:
        """How many workers the fullest host has."""
        return max(map(self._places.count, self._places))

    @property
    def islands_apart(self) -> bool:
        """Whether islands lie on several hosts whose network is not trusted: each on one, and the wire joins them."""
        return len(set(self._places)) > 1 and self.cluster.trusted_network is None

    @property
    def _places(self) -> list[int]:
        """The host of each worker."""
        cluster, islands = self.cluster, self.strategy.islands
        places = place(self.world, islands, len(cluster.hosts), cluster.slots) if cluster.kind == "hosts" else None
        return places or [0] * self.world


def parse_value(text: str) -> Any:
    """The value of `--set KEY=VALUE`: a TOML value, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """`["train.steps=100"]` as `{"train.steps": 100}`.

    Raises:
        InputError: if one has no `=`.
    """
    changes = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(f"`{setting}` is no setting", where="--set", fix="Write KEY=VALUE, e.g. train.steps=100")
        changes[key.strip()] = parse_value(text.strip())
    return changes


def parse_strategy(text: str) -> dict[str, Any]:
    """`data=2,islands=3,exchange=diloco,exchange.every=50` as changes of the strategy. It says the whole division:
    axes and islands that are not named become 1, an exchange that is not named `all_reduce`.

    Raises:
        InputError: on a word that is neither an axis nor a key of the strategy.
    """
    changes: dict[str, Any] = {"strategy.mesh": {}, "strategy.islands": 1, "strategy.exchange": "all_reduce"}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise InputError(f"`{word}` is not NAME=VALUE", where="--strategy", fix="E.g. data=2")
        if key in AXES:
            if not value.lstrip("-").isdigit():
                raise InputError(f"axis `{key}` has size `{value}`", where="--strategy", fix="Give a whole number")
            changes["strategy.mesh"][key] = int(value)
        elif key.partition(".")[0] in Strategy.model_fields:
            changes[f"strategy.{key}"] = parse_value(value)
        else:
            known = [*AXES, *(k for k in Strategy.model_fields if k != "mesh")]
            raise InputError(f"`{key}` is no axis or key of a strategy", where="--strategy", fix=nearest(key, known))
    return changes


def _change(raw: dict[str, Any], key: str, value: Any) -> None:
    """Puts `value` at the dotted `key` of `raw`.

    Raises:
        JobError: if the key leads through something that is no table.
    """
    *path, last = key.split(".")
    place = raw
    for depth, part in enumerate(path, start=1):
        inner = place.setdefault(part, {})
        if isinstance(inner, Section):
            inner = inner.model_dump(by_alias=True, exclude_none=True)
        elif not isinstance(inner, dict):
            whole = ".".join(path[:depth])
            short = getattr(section_at(Job, path[:depth]), "shorthand", None)
            if short is None:
                what = f"`{whole}` is {shown(inner)}, which has no keys"
                raise JobError([Problem(f"arguments, {key}", what, f"Set `{whole}` as a whole")])
            inner = {short: inner}
        place[part] = inner
        place = inner
    place[last] = copy.deepcopy(value)  # a later change may go below it, and it is the caller's


def _touches(key: str, changed: str) -> bool:
    """Whether one of the dotted keys is the other, or a part of it."""
    return f"{key}.".startswith(f"{changed}.") or f"{changed}.".startswith(f"{key}.")
