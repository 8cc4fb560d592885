"""The key `strategy.stragglers`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verbund.job.section import Section


class Stragglers(Section):
    """What is done about workers that are slower than others."""

    shorthand = "name"
    name: Literal["none", "rebalance", "backup"] = "none"
    """`rebalance`: each worker's share of a global batch goes by how fast it has been; the numbers stay those of even
    shares, within rounding. `backup` (steps that do not wait for the slowest) there is with parameter servers only."""
    every: Annotated[int, Field(ge=2)] = 10
    """rebalance: steps after which the shares are looked at again, if they have taken half a second at least."""

    @model_validator(mode="after")
    def _there(self) -> Stragglers:
        if self.name == "backup":
            raise ValueError(
                "`backup` is not there where gradients are added up by collectives: all members must take part in "
                "each, the late ones too, so a step cannot go on without them. "
                'Use `exchange = { name = "parameter_server", backup = 1 }`, which leaves out the late ones, '
                '`stragglers = "rebalance"`, or `exchange = "local_sgd"`, where islands seldom wait'
            )
        if self.name == "none" and self.every != type(self).model_fields["every"].default:
            raise ValueError('`every` is for `name = "rebalance"`')
        return self

    @property
    def rebalances(self) -> bool:
        """Whether shares go by speed."""
        return self.name == "rebalance"
