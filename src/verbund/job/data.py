"""The section `data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from verbund.job.section import Positive, Section


def _paired(value: Any) -> Any:
    """TOML has arrays only; strict models want the tuple where one is meant. One number is a square."""
    return (value, value) if type(value) is int else tuple(value) if isinstance(value, list) else value


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
    columns are concatenated along the last dimension."""
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
