"""The job: what to train, on what, how it is divided, and where it runs.

A job is a TOML file or the same frozen objects in Python. Unknown keys are refused with the nearest known one,
and all problems are reported at once. Every default of the product stands here.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from verbund.errors import InputError, JobError, Problem, nearest

Scalar = bool | int | float | str
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of all parts of a job: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


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
    scale: dict[str, float] = {}
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
    image_size: tuple[Positive, Positive] | None = None
    """Folders of images only: height and width that every image is resized to."""
    cache: str | None = None
    """Folder of converted data; default `$XDG_CACHE_HOME/verbund` or `~/.cache/verbund`."""


class Group(Section):
    """Parameters whose names match, with optimiser arguments of their own."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")
    match: str | list[str]
    """Glob patterns over parameter names, e.g. `*.bias`. The first group that matches takes the parameter."""
    scale_lr: Annotated[float, Field(ge=0.0)] | None = None
    """Factor on the optimiser's learning rate."""


class Optimizer(Section):
    """A `torch.optim` optimiser by name; every other key is one of its arguments."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")
    name: str = "adamw"
    lr: Annotated[float, Field(ge=0.0)] = 1e-3
    groups: list[Group] = []

    def arguments(self) -> dict[str, Any]:
        """The arguments besides `lr` and `groups`, as given."""
        return dict(self.model_extra or {})


class Objective(Section):
    """A loss by name."""

    name: Literal["cross_entropy", "binary_cross_entropy", "mean_squared_error", "next_token"]
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    class_weights: list[float] | None = None
    ignore_index: int = -100


class Schedule(Section):
    """The learning rate as a function of the optimiser step alone."""

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

    metric: str = "loss"
    validations: Positive = 5
    minimum_gain: Annotated[float, Field(ge=0.0)] = 0.0


class Train(Section):
    """The training itself. It ends by whichever of epochs, steps, seconds, target, patience comes first."""

    objective: Objective | None = None
    """None: the task file has its own `loss`."""
    global_batch: Positive = 128
    """Samples of one optimiser step, whatever the number of workers."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Samples of one forward pass in a worker; 0: the worker's whole share. Never changes the result."""
    epochs: Positive | None = None
    steps: Positive | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    target: Target | None = None
    patience: Patience | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of the global norm of the gradients."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the forward and backward pass; weights and optimiser stay in float32."""
    loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    """fp16 only: first loss scale; halved when gradients overflow, doubled after 2000 steps without."""
    activation_checkpointing: list[str] | bool = False
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
    metrics: list[str] | None = None
    """Names; default: what fits the objective."""


class Checkpoint(Section):
    """What is kept on disk."""

    every: Literal["epoch", "end"] | Positive = "epoch"
    """Steps between two checkpoints, `epoch`, or `end`."""
    keep: Positive = 2
    """Checkpoints kept, the newest first; the best one (if a target or patience names a metric) is kept besides."""
    disk_budget_mb: Annotated[float, Field(gt=0)] | None = None
    """Older checkpoints are pruned until the rest fits; the newest always stays."""


class Strategy(Section):
    """How the work is divided: a mesh inside an island, an exchange between islands."""

    mesh: dict[str, int] = {}
    """Sizes of the axes `data` (replicas share the samples), `shard` (so do workers that hold a share of every
    parameter), `tensor` (workers share every large operation) and `pipeline` (workers share the layers)."""
    islands: int = 1
    exchange: str = "all_reduce"
    zero: Literal[1, 2, 3] = 3
    """Axis `shard`: what is divided all the time: 1 optimiser states, 2 gradients too, 3 parameters too."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble"] = "1f1b"
    """Axis `pipeline`: the order in which a stage computes micro-batches."""
    chunks: Annotated[int, Field(ge=1, le=64)] | None = None
    """Axis `pipeline`: stages per worker; default 1, or 2 for the interleaved schedules."""
    balance: Literal["cost", "memory"] = "cost"
    """Axis `pipeline`: stages of equal measured time, or of equal bytes."""

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
        elif self.islands > 1:
            problems.append("more than one island is not available in this version; use the mesh axis `data`")
        if self.exchange not in EXCHANGES:
            problems.append(f"`{self.exchange}` is no exchange. {nearest(self.exchange, EXCHANGES)}")
        elif self.exchange != "all_reduce":
            problems.append(f"exchange `{self.exchange}` is not available in this version; use `all_reduce`")
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
EXCHANGES = ("all_reduce", "local_sgd", "diloco", "parameter_server", "federated")


class Cluster(Section):
    """Where processes run, and how long anything may take."""

    kind: Literal["local"] = "local"
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
    data: Data = Data()
    train: Train = Train()
    validate_: Validate = Field(default=Validate(), alias="validate")
    checkpoint: Checkpoint = Checkpoint()
    strategy: Strategy = Strategy()
    cluster: Cluster = Cluster()
    observe: Observe = Observe()
    folder: str = Field(default=".", exclude=True)
    """Folder that relative paths of this job start from; set by `read`, absolute in a run."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True)

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
        if self.data.validation is not None and self.data.validation_fraction > 0:
            problems.append("give `data.validation` or `data.validation_fraction`, not both")
        if problems:
            raise ValueError("\n".join(problems))
        return self

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
            raise JobError([Problem(str(path), "is a folder, not a job file")]) from None
        except (OSError, UnicodeDecodeError) as error:
            raise JobError([Problem(str(path), f"cannot be read: {error}")]) from None
        except tomllib.TOMLDecodeError as error:
            raise JobError([Problem(str(path), f"is not TOML: {error}")]) from None
        raw.setdefault("name", path.stem)
        return Job.build(raw, changes or {}, source=path.name, folder=path.resolve().parent)

    @staticmethod
    def build(raw: dict[str, Any], changes: dict[str, Any], *, source: str, folder: Path) -> Job:
        """Checks `raw`, with `changes` applied, as a job whose paths are relative to `folder`."""
        for key, value in changes.items():
            _change(raw, key, value)
        if isinstance(objective := raw.get("train", {}).get("objective"), str):
            raw["train"]["objective"] = {"name": objective}
        _tuples(raw)
        try:
            return Job.model_validate({**raw, "folder": str(folder)})
        except ValidationError as error:
            raise JobError(_problems(error, source)) from None

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
        if not equals or not key.strip():
            raise InputError(f"`{setting}` is no setting", where="--set", fix="Write KEY=VALUE, e.g. train.steps=100")
        changes[key.strip()] = parse_value(text.strip())
    return changes


def parse_strategy(text: str) -> dict[str, Any]:
    """`data=2,exchange=all_reduce` as changes of the job's strategy; axes that are not named become 1.

    Raises:
        InputError: on a word that is neither an axis nor a key of the strategy.
    """
    changes: dict[str, Any] = {"strategy.mesh": {}}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise InputError(f"`{word}` is not NAME=VALUE", where="--strategy", fix="E.g. data=2")
        if key in AXES:
            if not value.lstrip("-").isdigit():
                raise InputError(f"axis `{key}` has size `{value}`", where="--strategy", fix="Give a whole number")
            changes["strategy.mesh"][key] = int(value)
        elif key in Strategy.model_fields:
            changes[f"strategy.{key}"] = parse_value(value)
        else:
            known = [*AXES, *(k for k in Strategy.model_fields if k != "mesh")]
            raise InputError(f"`{key}` is no axis or key of a strategy", where="--strategy", fix=nearest(key, known))
    return changes


def _change(raw: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    place = raw
    for part in path:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = place[part] = {"name": inner}
        place = inner
    place[last] = value


def _tuples(raw: dict[str, Any]) -> None:
    """TOML has arrays only; strict models want the tuple where one is meant."""
    data = raw.get("data")
    if isinstance(data, dict) and isinstance(data.get("image_size"), list):
        data["image_size"] = tuple(data["image_size"])


def _problems(error: ValidationError, source: str) -> list[Problem]:
    problems: list[Problem] = []
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        fields = _fields(location[:-1])
        if item["type"] == "extra_forbidden":
            key = ".".join(location)
            problems.append(Problem(f"{source}, {key}", "unknown key", nearest(location[-1], fields)))
            continue
        # A union reports each of its members below the field's own name; the user wants the field once.
        key = ".".join(_known(location))
        message = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
        if key in seen:
            continue
        seen.add(key)
        if item["type"] not in ("value_error", "missing"):
            message = f"{message[0].lower()}{message[1:]}, but is {item['input']!r}"
        for part in message.splitlines():
            problems.append(Problem(f"{source}, {key}" if key else source, part))
    return problems


def _section(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _fields(location: list[str]) -> list[str]:
    """The known keys of the section at `location`."""
    section: type[Section] = Job
    for part in location:
        for name, field in section.model_fields.items():
            if part == (field.alias or name):
                section = _section(field.annotation) or section
    return [field.alias or name for name, field in section.model_fields.items() if not field.exclude]


def _known(location: list[str]) -> list[str]:
    """The part of a location that names keys, without the names of a union's members."""
    known = []
    fields = _fields([])
    for part in location:
        if part in fields:
            known.append(part)
            fields = _fields(known)
        elif part.isdigit() or not known or known[0] not in ("data", "train", "validate", "checkpoint", "strategy"):
            known.append(part)
    return known
