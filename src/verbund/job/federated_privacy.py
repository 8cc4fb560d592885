"""The keys `strategy.exchange.privacy` and `strategy.exchange.secure`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verbund.job.section import Positive, Section


class Privacy(Section):
    """Differential privacy of federated learning. Every release is accounted for, and no round begins that would
    exceed the budget."""

    shorthand = "kind"
    kind: Literal["none", "central", "local", "distributed", "examples"] = "none"
    """`central`: updates are clipped and the server adds noise to their sum; it protects clients, and the server is
    trusted. `local`: each client adds all the noise to its own update and trusts nobody. `distributed`: each client
    adds a share of the noise, and secure aggregation shows the sum alone. `examples` (DP-SGD): it protects each sample
    of each client, from everybody: batches are drawn by Poisson sampling, a sample's gradient is clipped by itself, and
    each local step has noise; each client keeps account for itself."""
    noise: Annotated[float, Field(gt=0.0)] = 1.0
    """Standard deviation of the noise, as a multiple of `clip`; under `distributed` that of the sum of the fewest
    clients with which a round succeeds; under `examples` that of each local step."""
    clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Updates, under `examples` gradients of single samples, of a larger L2 norm are shortened to this one; with
    `adaptive` the norm of the first round."""
    adaptive: bool = False
    """central: the clipping norm follows a quantile of the updates' norms, estimated with noise of its own (Andrew et
    al., 2021), which costs nothing beyond `noise`."""
    quantile: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """adaptive: the share of the updates that should not be shortened."""
    clip_rate: Annotated[float, Field(gt=0.0)] = 0.2
    """adaptive: how fast the norm follows."""
    count_noise: Annotated[float, Field(gt=0.0)] | None = None
    """adaptive: standard deviation of the noise on how many updates were not shortened; default a twentieth of the
    cohort, but at least `noise`."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """central: how cohorts are drawn. `poisson`: each client joins each round by a draw of its own, so that cohorts
    differ in size; only then does the accounting count on sampling."""
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """δ, the probability with which ε may be exceeded; below one over the number of those who are protected."""
    budget: Annotated[float, Field(gt=0.0)] | None = None
    """ε at which training ends; under `examples` a client's part in it."""

    @property
    def of_updates(self) -> bool:
        """Whether it is updates that are clipped and have noise, rather than gradients or nothing."""
        return self.kind in ("central", "local", "distributed")

    @model_validator(mode="after")
    def _fits(self) -> Privacy:
        problems = []
        for key in sorted(self.model_fields_set & _KEYS.keys()):
            if self.kind != _KEYS[key] and getattr(self, key) != type(self).model_fields[key].default:
                problems.append(f"`{key}` is for the privacy `{_KEYS[key]}`, not `{self.kind}`")
        for key in ("quantile", "clip_rate", "count_noise"):
            if not self.adaptive and getattr(self, key) != type(self).model_fields[key].default:
                problems.append(f"`{key}` is for adaptive clipping: set `adaptive = true`")
        if self.count_noise is not None and 2 * self.count_noise <= self.noise:
            problems.append(f"`count_noise` of {self.count_noise:g} must be more than half of `noise`, {self.noise:g}")
        if problems:
            raise ValueError("\n".join(problems))
        return self


_KEYS = {"adaptive": "central", "sampling": "central"}
"""For which kind a key is."""


class Secure(Section):
    """Secure aggregation: the server learns the sum of the clients' updates and nothing else of them."""

    shorthand = "threshold"
    threshold: Annotated[float, Field(gt=0.5, le=1.0)] = 0.7
    """The share of a round's clients with which it still succeeds; if fewer remain, nothing is revealed."""
    neighbours: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = "auto"
    """How many of the others each client draws, to share masks and keys with. `all`: the complete graph. `auto`: as few
    as keep the masks secure against a cheating server but for a probability of 2⁻⁴⁰."""
    colluding: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """The share of the clients that may work together with the server."""
    minimum: Annotated[int, Field(ge=3)] = 3
    """Clients that a round must have; each refuses a smaller one, in which it might be among strangers."""
    bits: Annotated[int, Field(ge=2, le=24)] = 16
    """Bits of each value of an update."""
    range: Annotated[float, Field(gt=0.0)] = 1.0
    """Values lie between minus and plus this; a larger one is an error of that client, and never clipped silently."""
    max_weight: Positive = 1
    """Clients count by whole numbers from 1 to this, which are public; with 1 all count the same."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Values are rounded to the nearest step of the range, or up or down by a draw whose mean is the value itself."""

    @model_validator(mode="after")
    def _fits(self) -> Secure:
        if self.colluding >= 2 * self.threshold - 1:
            raise ValueError(
                f"with {self.colluding:g} of the clients `colluding`, `threshold` must be more than "
                f"{(1 + self.colluding) / 2:g}: else a cheating server could ask half of the honest clients for one "
                "share of a client's secrets, and the other half for the other"
            )
        return self


def privacy_problems(privacy: Privacy, secure: Secure | None) -> list[str]:
    """What does not go together."""
    problems = []
    if privacy.kind == "distributed" and secure is None:
        problems.append("the privacy `distributed` needs secure aggregation: add `secure = {}`")
    if privacy.sampling == "poisson" and secure is not None:
        problems.append(
            "`privacy.sampling` `poisson` draws cohorts of any size, and secure aggregation needs a least one, which "
            "would tell who came: leave one of them out"
        )
    if privacy.kind == "local" and secure is not None:
        problems.append("under the privacy `local` updates carry all their noise: use `distributed` with `secure`")
    if privacy.kind in ("central", "distributed") and secure is not None and secure.max_weight > 1:
        problems.append("under differential privacy all clients count the same: leave `secure.max_weight` at 1")
    return problems
