"""The job as a whole: its own keys, what its sections must have in common, reading and writing."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import ConfigDict, Field, ValidationError, model_validator

from verbund.errors import JobError, Problem
from verbund.job.checkpoint import Checkpoint
from verbund.job.cluster import Cluster
from verbund.job.data import Data
from verbund.job.federated import job_problems
from verbund.job.observe import Observe
from verbund.job.problems import problems, section_at, shown
from verbund.job.section import Section
from verbund.job.strategy import Strategy
from verbund.job.train import Train
from verbund.job.validate import Validate
from verbund.placement import place


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
        problems += self._server_problems()
        if self.strategy.stragglers.rebalances and train.batch_norm == "global" and train.micro_batch:
            problems.append(
                "`train.batch_norm` `global` needs each worker's share in one forward pass, and `strategy.stragglers` "
                "`rebalance` makes some shares larger: leave out `train.micro_batch`"
            )
        if self.strategy.exchange.federated:
            problems += job_problems(self.strategy.exchange, train, self.strategy.mesh, self.strategy.islands)
            if self.data.loaders:
                problems.append("`data.loaders` cannot know what clients read: leave it at 0")
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

    def _server_problems(self) -> list[str]:
        exchange, train, problems = self.strategy.exchange, self.train, []
        if not exchange.served:
            return []
        if train.ema is not None:
            problems.append("`train.ema` averages the weights of every step, which servers do not keep: leave it out")
        if exchange.backup >= self.strategy.islands:
            problems.append(
                f"`strategy.exchange.backup` of {exchange.backup} leaves none of {self.strategy.islands} islands"
            )
        if train.batch_norm == "global" and self.strategy.islands > 1:
            problems.append(
                "`train.batch_norm` `global` needs islands that compute a global batch together; use `group`"
            )
        if self.data.loaders:
            problems.append("`data.loaders` cannot know early enough which tickets come: leave it at 0")
        if self.strategy.compression.name != "none":
            problems.append(
                "`strategy.compression` is for gradients that workers add up: what is pushed to servers is compressed "
                "by `strategy.exchange.compression`"
            )
        if self.data.placement == "island" and not exchange.divided:
            problems.append(
                "`data.placement` `island` goes with islands that share every global batch, not `asynchronous`"
            )
        return problems

    def _placement_problems(self) -> list[str]:
        cluster, strategy = self.cluster, self.strategy
        # Of machines that come by themselves some jobs say how many there are at least; on Ray each share is a host.
        hosts = len(cluster.hosts) or cluster.nodes or (strategy.islands if cluster.kind == "ray" else 0)
        if not cluster.spread or not hosts or strategy.world < 1:
            return []
        places = place(strategy.world, strategy.islands, hosts, cluster.slots if cluster.hosts else None)
        if places is None:
            return [f"`cluster.slots` has too little room for {strategy.world} workers on {len(cluster.hosts)} hosts"]
        if len(set(places)) == 1 or cluster.trusted_network is not None:
            return []
        what = "workers on several hosts exchange tensors without encryption or proof of who takes part"
        fix = 'if a network is yours alone, name it, e.g. `cluster.trusted_network = "10.0.0.0/24"`'
        size = strategy.world // strategy.islands
        if not strategy.exchange.local and not strategy.exchange.served:
            alone = "islands that each lie on one host and train alone, whose exchange is encrypted"
            how = '`strategy.exchange = "diloco"`, "local_sgd" or "parameter_server"'
            one = "by `cluster.slots`" if cluster.hosts else "by leaving out `cluster.nodes`"
            if cluster.kind == "ray" and not cluster.nodes:
                one = "by one island"
            return [f"{what}: {fix}; else take {alone} ({how}), or put all workers on one host {one}"]
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
    def together(self) -> int:
        """How many workers must lie on one host, so that no tensor crosses a network without encryption: all, an
        island's where islands train alone, or 1 where a network is trusted."""
        strategy = self.strategy
        if self.cluster.trusted_network is not None:
            return 1
        alone = strategy.exchange.local or strategy.exchange.served
        return strategy.world // strategy.islands if alone else strategy.world

    @property
    def islands_apart(self) -> bool:
        """Whether islands lie on several hosts whose network is not trusted: each on one, and the wire joins them."""
        several = self.strategy.islands > 1 and len(set(self._places)) > 1
        return several and self.cluster.trusted_network is None

    @property
    def _spread(self) -> bool:
        return self.cluster.spread and bool(self.cluster.hosts)

    @property
    def _places(self) -> list[int]:
        """The host of each worker."""
        cluster, islands = self.cluster, self.strategy.islands
        places = place(self.world, islands, len(cluster.hosts), cluster.slots) if self._spread else None
        return places or [0] * self.world


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
