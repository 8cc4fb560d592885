"""The key `strategy.exchange`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verbund.job.compression import Compression
from verbund.job.section import Positive, Section


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
