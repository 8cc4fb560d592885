"""Tensors from a checkpoint to safetensors files, one at a time: the whole model is never in memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from verbund.checkpoint.manifest import DTYPES
from verbund.checkpoint.read import Checkpoint
from verbund.checkpoint.write import header, raw_bytes


@dataclass(frozen=True)
class Source:
    """Where in a checkpoint the tensor lies that is to be called `name`."""

    name: str
    kind: str
    stored: str


def size_of(checkpoint: Checkpoint, source: Source) -> int:
    """The tensor's bytes."""
    tensor = checkpoint.manifest.tensor(source.kind, source.stored)
    return DTYPES[tensor.dtype][1] * math.prod(tensor.shape)


def write_files(checkpoint: Checkpoint, sources: Sequence[Source], folder: Path, limit: int | None) -> dict[str, str]:
    """Writes `model.safetensors`, or `model-00001-of-00002.safetensors` and so on where one would exceed `limit` bytes.

    Returns:
        the file of each name.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        OSError: if a file cannot be written.
    """
    shards = list(_shards(checkpoint, sources, limit))
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(checkpoint, shard, folder / file)
        placed |= dict.fromkeys((source.name for source in shard), file)
    return placed


def _shards(checkpoint: Checkpoint, sources: Iterable[Source], limit: int | None) -> Iterator[list[Source]]:
    shard: list[Source] = []
    total = 0
    for source in sources:
        size = size_of(checkpoint, source)
        if shard and limit is not None and total + size > limit:
            yield shard
            shard, total = [], 0
        shard.append(source)
        total += size
    yield shard


def _write(checkpoint: Checkpoint, shard: Sequence[Source], path: Path) -> None:
    tensors = [checkpoint.manifest.tensor(source.kind, source.stored) for source in shard]
    entries = [(source.name, tensor.dtype, tensor.shape) for source, tensor in zip(shard, tensors, strict=True)]
    head, order = header(entries, {"format": "pt"})
    with open(path, "wb") as file:
        file.write(head)
        for index in order:
            file.write(raw_bytes(read(checkpoint, shard[index])))
        file.flush()
        os.fsync(file.fileno())


def read(checkpoint: Checkpoint, source: Source) -> Tensor:
    """The whole tensor."""
    return checkpoint.read(source.kind, source.stored)
