"""The writing side of a checkpoint: a process's pieces to safetensors shards, hashed as they are written."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint import durable
from verbund.checkpoint.manifest import DTYPES
from verbund.checkpoint.piece import Piece, dtype_name
from verbund.checkpoint.sparse import StoredRows
from verbund.comm.files import Location, new_file
from verbund.errors import CheckpointError

SHARD_BYTES = 1 << 30
_CHUNK = 4 << 20


def write_part(folder: Location, part: int, pieces: Iterable[Piece], shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Writes what this process owns to `part-00000-0.safetensors` and following, and syncs them.

    Hashing and writing release the interpreter's lock, so this runs in a thread beside training.

    Args:
        folder: what `partial_folder` gave.
        part: this process's number among those that save.
        pieces: all pieces of this process; those it does not own are only noted, so that `commit` finds one
            without any owner.
        shard_bytes: a new file begins when the next tensor would exceed this; one tensor is never split.

    Returns:
        JSON values for `commit`: `files` (name, sha256, bytes), `tensors` (kind, name, shape, dtype, offset,
        length, file, key, and rows of sparse pieces) and `held` (names by kind of what was not owned). About 250
        bytes a tensor.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written.
        VerbundError: if the folder lies at the run's owner, who cannot write it or is not reached.
    """
    owned: list[Piece] = []
    held: dict[str, list[str]] = {}
    for piece in pieces:
        if not piece.owner:
            held.setdefault(piece.kind, []).append(piece.name)
        elif piece.box.volume or 0 in piece.shape:  # an empty share of a tensor that is not empty is no box
            owned.append(piece)
    files: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    for index, shard in enumerate(_shards(owned, shard_bytes)):
        name = f"part-{part:05d}-{index}.safetensors"
        path = folder / name
        try:
            sha256, size, keys = _write_shard(path, shard)
        except OSError as error:
            if isinstance(path, Path):
                path.unlink(missing_ok=True)
            raise CheckpointError(
                durable.reason(error),
                where=str(path),
                fix=durable.remedy(error),
            ) from None
        files.append({"name": name, "sha256": sha256, "bytes": size})
        tensors += [
            {
                "kind": piece.kind,
                "name": piece.name,
                "shape": list(piece.shape),
                "dtype": dtype_name(piece.dtype),
                "offset": list(piece.offset),
                "length": list(piece.length),
                "file": name,
                "key": key,
                **_rows_record(piece, key),
            }
            for piece, key in zip(shard, keys, strict=True)
        ]
    return {"part": part, "files": files, "tensors": tensors, "held": held}


def _shards(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    shard: list[Piece] = []
    size = 0
    for piece in pieces:
        more = piece.values.nbytes + (0 if piece.rows is None else piece.rows.nbytes)
        if shard and size + more > limit:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += more
    if shard:
        yield shard


def _write_shard(path: Location, shard: Sequence[Piece]) -> tuple[str, int, list[str]]:
    """Writes one file in the safetensors format: u64 length of the header, JSON header, tensors without gaps.

    The library would write and leave the hash to a second pass over the file.
    """
    keys = [_key(piece) for piece in shard]
    if len(set(keys)) != len(keys):
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is given twice")
    tensors = dict(zip(keys, (piece.values for piece in shard), strict=True))
    tensors |= {_rows_key(key): p.rows for key, p in zip(keys, shard, strict=True) if p.rows is not None}
    contents = list(tensors.values())
    head, order = header([(key, dtype_name(tensor.dtype), tensor.shape) for key, tensor in tensors.items()])
    digest = hashlib.sha256()
    size = 0
    with new_file(path) as file:
        for content in (
            memoryview(head),
            *(raw_bytes(contents[i]) for i in order),
        ):
            for at in range(0, len(content), _CHUNK):
                chunk = content[at : at + _CHUNK]
                digest.update(chunk)
                file.write(chunk)
            size += len(content)
        file.finish(digest.hexdigest())
    return digest.hexdigest(), size, keys


def header(
    entries: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The beginning of a safetensors file that holds tensors of these keys, dtypes and shapes.

    Returns:
        the bytes up to the first tensor, and the order in which the tensors follow.
    """
    # Wide dtypes first, as the library does: every tensor is then aligned in the mapped file.
    order = sorted(range(len(entries)), key=lambda i: -DTYPES[entries[i][1]][1])
    described: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for i in order:
        key, dtype, shape = entries[i]
        code, width = DTYPES[dtype]
        start, end = end, end + width * math.prod(shape)
        described[key] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(described, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded, order


def _rows_key(key: str) -> str:
    return f"{key}/rows"


def _rows_record(piece: Piece, key: str) -> dict[str, Any]:
    if piece.rows is None:
        return {}
    return {"rows": StoredRows(_rows_key(key), len(piece.rows), piece.filler).record()}


def _key(piece: Piece) -> str:
    whole = f"{piece.kind}/{piece.name}"
    return whole if tuple(piece.length) == tuple(piece.shape) else f"{whole}{piece.box}"


def raw_bytes(values: Tensor) -> memoryview:
    """A tensor's values as they lie in a file."""
    if not values.numel():
        return memoryview(b"")
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
