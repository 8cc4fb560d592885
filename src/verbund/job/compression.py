"""The keys `strategy.compression` and `strategy.exchange.compression`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verbund.job.section import Section


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
