"""The key `strategy.exchange`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verbund.job.compression import Compression
from verbund.job.federated import Partition, Rule, Share, exchange_problems
from verbund.job.federated_privacy import Privacy, Secure
from verbund.job.federated_round import Round
from verbund.job.section import Positive, Section


class Exchange(Section):
    """How islands combine what they learn."""

    shorthand = "name"
    name: Literal["all_reduce", "local_sgd", "diloco", "parameter_server", "federated"] = "all_reduce"
    """`all_reduce`: gradients are added up in every step, as along the axis `data`. `local_sgd`: islands train alone
    and average their parameters every so many steps. `diloco`: every so many steps an outer optimiser with Nesterov
    momentum steps along the averaged difference of the parameters. `parameter_server`: processes of their own hold the
    parameters; islands pull them and push gradients. `federated`: clients train on what only they have, and a server
    makes new parameters of what they have learnt; `train.steps` counts its rounds, a step of `train.optimizer` with
    `train.global_batch` samples is a client's own, and an epoch has as many rounds as let each client train once."""
    every: Positive | None = None
    """local_sgd, diloco: steps between two exchanges; default 16 and 64."""
    adaptive: bool = False
    """local_sgd, diloco: the steps between two exchanges become fewer as the loss falls; `every` is their first
    number, and after every 8 exchanges there is a new one."""
    outer_lr: Annotated[float, Field(gt=0.0)] = 0.7
    """diloco: learning rate of the outer optimiser."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.6
    """diloco: Nesterov momentum of the outer optimiser. The usual 0.9 was worse in all that was measured."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """local_sgd, diloco: parts of the model that are exchanged one after the other, evenly over `every` steps."""
    delay: Annotated[int, Field(ge=0)] = 0
    """local_sgd, diloco: steps for which training goes on while an exchange is under way."""
    mixing: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """local_sgd, diloco: the share of an island's own values that stays when an exchange arrives; default 0.5 with a
    `delay`, else 0."""
    compression: Annotated[Compression, Field(examples=["int4"])] = Compression()
    """local_sgd, diloco: what the differences of parameters are sent as. parameter_server: what gradients are pushed
    as, by any method but `power_sgd`; rows of tables are cast (`fp16`, `bf16`) or travel as they are."""

    servers: Positive = 1
    """parameter_server: processes that hold the parameters, each a part of them."""
    consistency: Literal["bulk_synchronous", "bounded_staleness", "asynchronous"] = "bulk_synchronous"
    """parameter_server: `bulk_synchronous`: the islands share every global batch, and its step is taken when all have
    pushed: the result is that of one process. `bounded_staleness`: they share it too, but each share is a step at once,
    by its part of the learning rate, and an island waits only for those that are more than `staleness` global batches
    behind. `asynchronous`: each island computes whole global batches, and what it pushes is a step at once: nobody
    waits for anybody."""
    staleness: Positive | None = None
    """parameter_server, bounded_staleness: the bound; default 3."""
    backup: Annotated[int, Field(ge=0)] = 0
    """parameter_server, bulk_synchronous: so many islands that a step does not wait for; what they push late is not
    used, and steps that they have missed they leave out, so that the result is no longer that of one process."""
    staleness_aware: bool = False
    """parameter_server, asynchronous: the learning rate of a step is divided by its staleness (the steps taken since
    its parameters were pulled)."""
    delay_compensation: Annotated[float, Field(ge=0.0)] = 0.0
    """parameter_server, asynchronous: λ of delay-compensated SGD, which estimates from a late gradient what it
    would be now; 0: none."""
    replicas: Annotated[int, Field(ge=0)] | None = None
    """parameter_server: servers that have each part besides the one that serves it; a push counts once all have it.
    Default 1, with a single server 0. Without replicas servers write a log on disk, and a push counts once it is
    there."""
    log: bool = True
    """parameter_server: without replicas: whether there is that log. Without it the loss of a server ends the run."""
    row_cache: Annotated[int, Field(ge=0)] = 0
    """parameter_server: tickets for which an island may use a row of a table again that it has pulled."""
    block_bytes: Annotated[int, Field(ge=1024, le=1 << 28)] = 1 << 20
    """parameter_server: tensors are cut into runs of rows of at most so many bytes, which the servers divide."""

    clients: Positive | None = None
    """federated: how many clients there are, in a simulation; with `partition` `column` its values say that."""
    cohort: Positive | Share = 1.0
    """federated: clients that train in a round, or their share of all. Which ones is a function of seed and round."""
    local_epochs: Positive | None = None
    """federated: times that a client goes through its samples in a round; default 1."""
    local_steps: Positive | None = None
    """federated: optimiser steps of a client in a round, instead of `local_epochs`."""
    rule: Annotated[Rule, Field(examples=["fedadam", {"name": "fedprox", "proximal": 0.1}])] = Rule()
    """federated: how updates become new parameters."""
    partition: Annotated[Partition, Field(examples=["iid", {"name": "dirichlet", "alpha": 0.3}])] = Partition()
    """federated, in a simulation: which client has which samples."""
    round: Round = Round()
    """federated, with real clients: what a server's rounds go by."""
    privacy: Annotated[Privacy, Field(examples=["central", {"kind": "central", "noise": 1.0}])] = Privacy()
    """federated: differential privacy."""
    secure: Annotated[Secure, Field(examples=[{"threshold": 0.7}])] | None = None
    """federated: secure aggregation; a table, which may be empty."""

    @model_validator(mode="after")
    def _fits(self) -> Exchange:
        problems = []
        for key in sorted(self.model_fields_set - {"name"}):
            if self.name not in (for_ := _KEYS[key]) and getattr(self, key) != type(self).model_fields[key].default:
                problems.append(
                    f"`{key}` is for the exchange{'s' * (len(for_) > 1)} {' and '.join(for_)}, not `{self.name}`"
                )
        if self.fragments > self.steps_between:
            problems.append(f"{self.fragments} fragments need `every` of at least as many steps")
        if self.delay >= self.steps_between:
            problems.append(f"`delay` of {self.delay} steps must be less than `every`, {self.steps_between}")
        if self.adaptive and (self.fragments > 1 or self.delay):
            problems.append("`adaptive` goes with neither `fragments` nor `delay`")
        if self.served:
            problems += self._server_problems()
        if self.federated:
            problems += exchange_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _server_problems(self) -> list[str]:
        problems = []
        for key, mode in _MODES.items():
            if self.consistency != mode and getattr(self, key) != type(self).model_fields[key].default:
                problems.append(f"`{key}` is for the consistency `{mode}`, not `{self.consistency}`")
        if self.replicas is not None and self.replicas >= self.servers:
            problems.append(f"{self.replicas} replicas need more than {self.servers} server{'s' * (self.servers > 1)}")
        if self.compression.name == "power_sgd":
            problems.append(
                "`compression` `power_sgd` adds up matrices between workers, and each push travels by itself: use "
                "`top_k`, `sign`, `int4` or another method"
            )
        return problems

    @property
    def local(self) -> bool:
        """Whether islands train alone between two exchanges."""
        return self.name in ("local_sgd", "diloco")

    @property
    def served(self) -> bool:
        """Whether servers hold the parameters."""
        return self.name == "parameter_server"

    @property
    def federated(self) -> bool:
        """Whether clients train on what only they have."""
        return self.name == "federated"

    @property
    def protected(self) -> bool:
        """federated: whether there is privacy or secure aggregation."""
        return self.secure is not None or self.privacy.kind != "none"

    def cohort_size(self, clients: int) -> int:
        """federated: how many of so many clients train in a round."""
        return self.cohort if isinstance(self.cohort, int) else max(round(self.cohort * clients), 1)

    def asynchronous(self, clients: int) -> bool:
        """federated: whether a step has fewer updates than clients train at a time."""
        return self.rule.buffer is not None and self.rule.buffer < self.cohort_size(clients)

    def rounds_per_epoch(self, clients: int) -> int:
        """federated: rounds in which each of so many clients trains once on average."""
        return -(-clients // (self.rule.buffer or self.cohort_size(clients)))

    @property
    def divided(self) -> bool:
        """parameter_server: whether all islands share each ticket."""
        return self.consistency != "asynchronous"

    @property
    def copies(self) -> int:
        """parameter_server: the replicas of each part."""
        return self.replicas if self.replicas is not None else int(self.servers > 1)

    @property
    def bound(self) -> int:
        """parameter_server: how many steps a reader may be behind."""
        return (self.staleness or 3) if self.consistency == "bounded_staleness" else 0

    @property
    def steps_between(self) -> int:
        """Steps between two exchanges of the same part of the model."""
        return self.every or {"local_sgd": 16, "diloco": 64}.get(self.name, 1)

    @property
    def kept(self) -> float:
        """The share of an island's own values that stays when an exchange arrives."""
        return self.mixing if self.mixing is not None else 0.5 if self.delay else 0.0


_LOCAL = ("local_sgd", "diloco")
_SERVED = ("parameter_server",)
_KEYS = {
    **dict.fromkeys(("every", "adaptive", "fragments", "delay", "mixing"), _LOCAL),
    "compression": (*_LOCAL, *_SERVED),
    **dict.fromkeys(("outer_lr", "outer_momentum"), ("diloco",)),
    **dict.fromkeys(
        ("clients", "cohort", "local_epochs", "local_steps", "rule", "partition", "privacy", "secure", "round"),
        ("federated",),
    ),
    **dict.fromkeys(
        (
            "servers",
            "consistency",
            "staleness",
            "backup",
            "staleness_aware",
            "delay_compensation",
            "replicas",
            "log",
            "row_cache",
            "block_bytes",
        ),
        _SERVED,
    ),
}
"""For which exchanges a key is."""
_MODES = {
    "staleness": "bounded_staleness",
    "backup": "bulk_synchronous",
    "staleness_aware": "asynchronous",
    "delay_compensation": "asynchronous",
}
"""For which consistency a key is."""
