"""The keys `strategy.exchange.rule` and `.partition`, and what goes with what in federated learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from verbund.job.federated_privacy import privacy_problems
from verbund.job.section import Names, Positive, Section

if TYPE_CHECKING:
    from verbund.job.exchange import Exchange
    from verbund.job.train import Train

Share = Annotated[float, Field(gt=0.0, le=1.0)]

ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
ROBUST = ("median", "trimmed_mean", "krum", "multi_krum", "bulyan", "geometric_median")
PERSONAL = ("ditto", "fedbn", "fedper", "fedrep")
"""Rules under which a client keeps something of the model for itself."""
NEEDS_PLAIN_SGD = ("scaffold",)
"""Rules whose clients must take steps of plain SGD: they reckon back from the parameters to the gradients."""
NEEDS_SGD = ("scaffold", "fednova")
AVERAGED = ("fedavg", "fedavgm", *ADAPTIVE, "fedprox", "ditto", "fedbn", "fedper", "fedrep")
"""Rules that need nothing of the updates but the mean of their differences."""
UNIFORM = ("scaffold", *ROBUST)
"""Rules under which every client of the cohort counts the same."""


class Rule(Section):
    """How a round's updates become new parameters."""

    shorthand = "name"
    name: Literal[
        "fedavg",
        "fedavgm",
        "fedadagrad",
        "fedadam",
        "fedyogi",
        "fedprox",
        "scaffold",
        "fednova",
        "fedbuff",
        "median",
        "trimmed_mean",
        "krum",
        "multi_krum",
        "bulyan",
        "geometric_median",
        "ditto",
        "fedbn",
        "fedper",
        "fedrep",
    ] = "fedavg"
    """`fedavg`: the weighted mean. `fedavgm`, `fedadagrad`, `fedadam`, `fedyogi`: an optimiser of the server steps
    along it. `fedprox`: clients are held near the server's parameters. `scaffold`: control variates take the clients'
    drift away. `fednova`: differences count per local step. `fedbuff`: asynchronous, a step for every `buffer` updates.
    `median`, `trimmed_mean`, `krum`, `multi_krum`, `bulyan`, `geometric_median`: withstand clients that send anything.
    `ditto`, `fedbn`, `fedper`, `fedrep`: each client has a model of its own besides."""
    server_lr: Annotated[float, Field(gt=0.0)] | None = None
    """The server's learning rate; default 1, for `fedadagrad`, `fedadam` and `fedyogi` 0.01."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """fedavgm: the server's momentum; fedadagrad, fedadam, fedyogi: β₁."""
    second_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.99
    """fedadam, fedyogi: β₂."""
    adaptivity: Annotated[float, Field(gt=0.0)] = 1e-3
    """fedadagrad, fedadam, fedyogi: τ, which bounds how much small differences are enlarged."""
    proximal: Annotated[float, Field(ge=0.0)] = 0.01
    """fedprox: μ; ditto: λ: how strongly the distance from the server's parameters counts."""
    faulty: Annotated[int, Field(ge=0)] | Share = 0.2
    """trimmed_mean, krum, multi_krum, bulyan: clients of a round, or their share of it, that may send anything."""
    kept: Positive | None = None
    """multi_krum: updates that are averaged; default all but those that may be faulty."""
    buffer: Positive | None = None
    """fedbuff: updates that make a step; default: as many as train at a time, so that rounds are synchronous."""
    staleness_power: Annotated[float, Field(ge=0.0)] = 0.5
    """fedbuff: an update that is s steps old counts (1 + s) to the power of minus this."""
    personal: Annotated[Names, Field(examples=[["head.*"]])] = []
    """fedper, fedrep: glob patterns of the parameters and buffers that stay with each client; fedbn: by default those
    of the normalisation layers."""
    head_epochs: Positive = 1
    """fedrep: local epochs in which the personal part alone is trained, before the rest is."""
    weights: Literal["samples", "uniform"] | None = None
    """What an update counts: the samples that it was trained on (default), or all alike (scaffold and those that
    withstand faulty clients)."""
    max_weight: Annotated[float, Field(gt=0.0)] | None = None
    """Upper bound of what an update counts, as clients say themselves how many samples they have."""
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    """Differences of a larger norm are shortened to this one."""
    refuse_beyond: Annotated[float, Field(gt=1.0)] | None = None
    """Updates are refused whose norm is more than so many times the median of their round."""

    @model_validator(mode="after")
    def _fits(self) -> Rule:
        problems = []
        for key in sorted(self.model_fields_set & _RULE_KEYS.keys()):
            if (
                self.name not in (for_ := _RULE_KEYS[key])
                and getattr(self, key) != type(self).model_fields[key].default
            ):
                problems.append(f"`{key}` is for {', '.join(for_)}, not for `{self.name}`")
        if self.name in ("fedper", "fedrep") and not self.personal:
            problems.append(f"`{self.name}` needs `personal`, the patterns of what stays with each client")
        if self.name in UNIFORM and self.weights == "samples":
            problems.append(f"under `{self.name}` all clients count the same: leave `weights` out")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def by_samples(self) -> bool:
        """Whether an update counts by the samples that it was trained on."""
        return self.weights != "uniform" and self.name not in UNIFORM

    @property
    def rate(self) -> float:
        """The server's learning rate."""
        return self.server_lr if self.server_lr is not None else 0.01 if self.name in ADAPTIVE else 1.0

    def faulty_of(self, updates: int) -> int:
        """How many of so many updates may be faulty."""
        return self.faulty if isinstance(self.faulty, int) else int(self.faulty * updates)


_RULE_KEYS: dict[str, tuple[str, ...]] = {
    "momentum": ("fedavgm", *ADAPTIVE),
    "second_momentum": ("fedadam", "fedyogi"),
    "adaptivity": ADAPTIVE,
    "proximal": ("fedprox", "ditto"),
    "faulty": ("trimmed_mean", "krum", "multi_krum", "bulyan"),
    "kept": ("multi_krum",),
    "buffer": ("fedbuff",),
    "staleness_power": ("fedbuff",),
    "personal": ("fedbn", "fedper", "fedrep"),
    "head_epochs": ("fedrep",),
}


class Partition(Section):
    """In a simulation: which client has which samples. A function of the seed."""

    shorthand = "name"
    name: Literal["iid", "dirichlet", "shards", "pathological", "column", "power", "exponential"] = "iid"
    """`iid`: even and random. `dirichlet`: each label is divided in proportions drawn with `alpha`. `shards`: sorted by
    label and dealt out in runs. `pathological`: each client has `labels` labels. `column`: by what a column says, e.g.
    the hospital. `power`, `exponential`: random, sizes by a power law or exponentially falling."""
    alpha: Annotated[float, Field(gt=0.0)] = 0.5
    """dirichlet: the smaller, the more the clients differ. power: the exponent; exponential: the rate."""
    labels: Positive = 2
    """pathological: labels of a client; shards: runs of a client."""
    column: str | None = None
    """column: the one whose values tell the clients apart; dirichlet, shards, pathological: the one that has the
    labels, by default `data.target`."""
    minimum: Annotated[int, Field(ge=0)] = 1
    """dirichlet, power, exponential: samples that each client has at least."""

    @model_validator(mode="after")
    def _fits(self) -> Partition:
        if self.name == "column" and self.column is None:
            raise ValueError("`column` needs `column`, the name of the column that tells the clients apart")
        return self


def exchange_problems(exchange: Exchange) -> list[str]:
    """What in the exchange `federated` does not go together; this, `job_problems` and `privacy_problems` alone say what
    excludes what."""
    problems, rule = [*_protection_problems(exchange), *_compression_problems(exchange)], exchange.rule
    if exchange.local_epochs is not None and exchange.local_steps is not None:
        problems.append("give `local_epochs` or `local_steps`, not both")
    if exchange.clients is not None and exchange.cohort_size(exchange.clients) > exchange.clients:
        problems.append(f"a cohort of {exchange.cohort} is more than the {exchange.clients} clients")
    if exchange.clients is not None and (lack := too_few(rule, exchange.cohort_size(exchange.clients))):
        problems.append(lack)
    if rule.buffer is not None and exchange.clients and rule.buffer > exchange.cohort_size(exchange.clients):
        problems.append(f"`rule.buffer` of {rule.buffer} updates is more than the clients that train at a time")
    return problems


def _protection_problems(exchange: Exchange) -> list[str]:
    """What the server cannot do that has protected sums of differences alone."""
    rule, privacy, secure = exchange.rule, exchange.privacy, exchange.secure
    problems = _example_problems(rule) if privacy.kind == "examples" else []
    if not exchange.protected:
        return problems
    problems += privacy_problems(privacy, secure)
    what = f"the privacy `{privacy.kind}`" if privacy.of_updates else "`secure`"
    if rule.name not in AVERAGED:
        problems.append(f"{what} protects means of differences; `{rule.name}` needs more. Use {', '.join(AVERAGED)}")
    if rule.refuse_beyond is not None:
        problems.append(f"`rule.refuse_beyond` compares single updates, which {what} hides: leave one of them out")
    if secure is not None and rule.max_weight is not None:
        problems.append(
            "under `secure` clients count by public whole numbers: give `secure.max_weight`, not the rule's"
        )
    if privacy.of_updates and rule.by_samples:
        problems.append(f"under {what} all clients count the same: set `rule.weights` to `uniform`")
    elif secure is not None and rule.by_samples and secure.max_weight == 1:
        problems.append(
            "with `secure.max_weight` of 1 all clients count the same: set `rule.weights` to `uniform`, or raise it to "
            "the most samples that a client counts"
        )
    cohort = exchange.cohort_size(exchange.clients) if exchange.clients else exchange.cohort
    if secure is not None and isinstance(cohort, int) and cohort < secure.minimum:
        problems.append(f"a cohort of {cohort} is less than `secure.minimum`, {secure.minimum}")
    if privacy.of_updates and rule.clip_norm is not None:
        problems.append("differential privacy shortens updates itself: give `privacy.clip`, not `rule.clip_norm`")
    return problems


def _compression_problems(exchange: Exchange) -> list[str]:
    """What does not go with updates in fewer bytes."""
    compression, rule, problems = exchange.compression, exchange.rule, []
    if compression.name == "none":
        if not exchange.error_feedback:
            problems.append("`error_feedback` is for updates with `compression`, and there is none")
        return problems
    method = f"the compression `{compression.name}`"
    if compression.name == "power_sgd":
        problems.append("`power_sgd` needs workers that add up its factors, which clients do not do: use `top_k`")
    if compression.warmup is not None:
        problems.append("federated updates are compressed from the first round on: leave out `compression.warmup`")
    if exchange.secure is not None:
        problems.append(f"`secure` adds up whole numbers of `secure.bits`, in place of {method}: leave one of them out")
    elif exchange.privacy.kind == "local":
        problems.append(f"under the privacy `local` an update is mostly noise, of which {method} would leave out most")
    if rule.name == "scaffold":
        problems.append(f"`scaffold` also sends control variates, which {method} does not reach")
    if rule.name == "fedbuff" and exchange.error_feedback:
        problems.append(
            "under `fedbuff` a client may send again before it knows whether its last update counts: set "
            "`error_feedback = false`"
        )
    return problems


def _example_problems(rule: Rule) -> list[str]:
    if rule.name == "ditto":
        return [
            "under `ditto` each client trains a second model, which the privacy `examples` would have to pay for too"
        ]
    if rule.name == "fedbuff":
        return ["the privacy `examples` is accounted for round by round, which `fedbuff` does not have"]
    return []


def too_few(rule: Rule, updates: int) -> str | None:
    """Why so many updates of a round are not enough for a rule; None if they are. The bounds are those of the papers:
    Yin et al. 2018 (trimmed mean), Blanchard et al. 2017 (Krum), El Mhamdi et al. 2018 (Bulyan)."""
    faulty = rule.faulty_of(updates)
    need = {"trimmed_mean": 2 * faulty + 1, "krum": 2 * faulty + 3, "multi_krum": 2 * faulty + 3}.get(rule.name, 1)
    need = 4 * faulty + 3 if rule.name == "bulyan" else need
    if updates < need:
        return f"`{rule.name}` needs {need} updates a round where {faulty} may be faulty, and there are {updates}"
    if rule.kept is not None and rule.kept > updates:
        return f"`kept` of {rule.kept} is more than the {updates} updates of a round"
    return None


def job_problems(exchange: Exchange, train: Train, mesh: dict[str, int], islands: int) -> list[str]:
    """What in a job does not go with the exchange `federated`.

    Args:
        exchange: the exchange.
        train: the clients' training.
        mesh: of the strategy.
        islands: of the strategy.
    """
    problems, rule, optimizer = [], exchange.rule, train.optimizer
    if islands > 1:
        problems.append("under `federated` the clients are the islands: leave `strategy.islands` at 1")
    if divided := [axis for axis, size in mesh.items() if axis != "data" and size > 1]:
        problems.append(f"`federated` divides clients, or a client's samples, over the axis `data`, not `{divided[0]}`")
    if train.ema is not None:
        problems.append("`train.ema` averages the weights of every step, which clients do not share: leave it out")
    if train.precision == "fp16":
        problems.append("`train.precision` `fp16` needs a loss scale that clients do not share: use `bf16`")
    if train.batch_norm == "global":
        problems.append("`train.batch_norm` `global` needs samples that no client shares: use `group`")
    if rule.name in NEEDS_SGD and optimizer.name.lower() != "sgd":
        problems.append(f"the rule `{rule.name}` reckons with steps of SGD: set `train.optimizer.name` to `sgd`")
    arguments = optimizer.arguments()
    if rule.name in NEEDS_PLAIN_SGD and (arguments.get("momentum") or train.clip_norm is not None):
        problems.append(f"the rule `{rule.name}` needs plain SGD: leave out `momentum` and `train.clip_norm`")
    if exchange.privacy.kind == "examples":
        if train.clip_norm is not None:
            problems.append("the privacy `examples` clips each sample's gradient: leave out `train.clip_norm`")
        if train.objective is not None and train.objective.class_weights is not None:
            problems.append("the privacy `examples` bounds all samples alike: leave out `class_weights`")
    if rule.name == "fednova" and (arguments.get("nesterov") or arguments.get("dampening")):
        problems.append("the rule `fednova` knows SGD with heavy-ball momentum: leave out `nesterov` and `dampening`")
    return problems
