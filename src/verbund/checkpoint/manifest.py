"""The manifest of a checkpoint: which box of which global tensor lies in which file, with content hashes.

A checkpoint is a folder:

    manifest.json              format version, step, state, tensors and their boxes, files with sha256
    manifest.sha256            the manifest's own hash, as `sha256sum -c` reads it
    part-00000-0.safetensors   what process 0 owns, in shards

Of a sparse box its file has some rows and their numbers; the manifest says what the others hold (`sparse`).

Nothing here imports torch: the process that supervises a run commits, verifies and prunes without it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund.checkpoint.box import Box, uncovered
from verbund.checkpoint.sparse import StoredRows
from verbund.comm.files import Location
from verbund.errors import CheckpointError

FORMAT = "verbund checkpoint"
VERSIONS = 1, 2
"""Those that are read; 2 has sparse boxes, and is written only if there are some."""
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
MANIFEST_LIMIT = 64 << 20
"""Bytes that a manifest may have; far more than 100,000 boxes need."""

KINDS = ("parameters", "buffers", "optimizer", "ema", "gradients", "exchange")

DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
}
"""dtypes that are saved: name to safetensors code and bytes per element."""

_FILE = re.compile(r"part-[0-9]{5,9}-[0-9]{1,9}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME_LIMIT = 4096
_DIMENSIONS = 64
_SIZE = 1 << 48


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A shard: its content hash and size in bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor and the file and safetensors key it lies under; of a sparse one which rows lie there."""

    box: Box
    file: str
    key: str
    rows: StoredRows | None = None

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        found = {"offset": self.box.offset, "length": self.box.length, "file": self.file, "key": self.key}
        return found if self.rows is None else {**found, "rows": self.rows.record()}

    def places(self, itemsize: int) -> dict[str, int]:
        """The bytes that it has in its file, by key."""
        if self.rows is None:
            return {self.key: self.box.volume * itemsize}
        width = self.box.volume // max(self.box.length[0], 1)
        return {self.key: self.rows.count * width * itemsize, self.rows.key: self.rows.count * 8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A global tensor and the boxes that cover it exactly once."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


class Manifest:
    """What a checkpoint holds. `Manifest.open` reads one, `Manifest.gather` makes one of what was saved."""

    def __init__(self, folder: Location, raw: dict[str, Any]) -> None:
        """Checks `raw` whole; nothing in it is trusted.

        Raises:
            ValueError: with what is wrong.
        """
        if raw.get("format") != FORMAT:
            raise ValueError("is not the manifest of a checkpoint")
        if type(raw.get("version")) is not int or raw["version"] not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ValueError(f"has format version {raw.get('version')!r}; this program reads {known}")
        step, state, files, tensors = (raw.get(key) for key in ("step", "state", "files", "tensors"))
        if type(step) is not int or step < 0:
            raise ValueError("has no valid `step`")
        if not isinstance(state, dict) or not isinstance(files, dict) or not isinstance(tensors, list):
            raise ValueError("lacks `state`, `files` or `tensors`")
        self.folder = folder
        self.step: int = step
        self.state: dict[str, Any] = state
        self.files = {name: _file(name, described) for name, described in files.items()}
        self.tensors: dict[tuple[str, str], StoredTensor] = {}
        for item in tensors:
            tensor = _tensor(item)
            if (tensor.kind, tensor.name) in self.tensors:
                raise ValueError(f"lists {tensor.kind} `{tensor.name}` twice")
            self.tensors[tensor.kind, tensor.name] = tensor
        self._check_places()

    @staticmethod
    def open(folder: Location, verify: bool = True) -> Manifest:
        """Reads a checkpoint's manifest and checks that all its files are there, of the right size.

        Args:
            folder: the checkpoint; of one at the run's owner, who has done so, files are not looked at.
            verify: also compare the content of every file with its hash.

        Raises:
            CheckpointError: naming the file that is missing or damaged.
        """
        if isinstance(folder, Path) and not folder.is_dir():
            raise CheckpointError("there is no such checkpoint", where=str(folder))
        path = folder / MANIFEST
        content = _read_limited(path, MANIFEST_LIMIT)
        written = _read_limited(folder / MANIFEST_HASH, 1024)
        if written != hash_line(content):
            raise _damaged(path, f"its content differs from the hash in {MANIFEST_HASH}")
        try:
            raw = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"is not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise _damaged(path, "is not a JSON object")
        try:
            manifest = Manifest(folder, raw)
        except ValueError as error:
            raise _damaged(path, str(error)) from None
        if isinstance(folder, Path):
            for name, file in manifest.files.items():
                check_file(folder / name, file)
            if verify:
                manifest.verify()
        return manifest

    @staticmethod
    def gather(folder: Path, step: int, parts: Sequence[dict[str, Any]], state: dict[str, Any]) -> Manifest:
        """The manifest of what `parts` (records of `write_part`) say was written to `folder`.

        Raises:
            CheckpointError: if a tensor has a hole, is saved twice, or differs between parts.
        """
        files: dict[str, Any] = {}
        tensors: dict[tuple[str, str], dict[str, Any]] = {}
        held: set[tuple[str, str]] = set()
        try:
            for part in parts:
                for file in part["files"]:
                    if file["name"] in files:
                        raise ValueError(f"two parts wrote {file['name']}")
                    files[file["name"]] = {"sha256": file["sha256"], "bytes": file["bytes"]}
                held |= {(kind, name) for kind, names in part["held"].items() for name in names}
                for item in part["tensors"]:
                    first = tensors.setdefault(
                        (item["kind"], item["name"]),
                        {**{key: item[key] for key in ("kind", "name", "shape", "dtype")}, "boxes": []},
                    )
                    for key in ("shape", "dtype"):
                        if first[key] != item[key]:
                            raise ValueError(
                                f"{item['kind']} `{item['name']}` has {key} {first[key]} in one part "
                                f"and {item[key]} in another"
                            )
                    box = {key: item[key] for key in ("offset", "length", "file", "key")}
                    first["boxes"].append(box | ({"rows": item["rows"]} if "rows" in item else {}))
            if missing := held - tensors.keys():
                kind, name = min(missing)
                raise ValueError(f"{kind} `{name}` has no owner: nobody saved it")
            raw = {"format": FORMAT, "version": VERSIONS[-1], "step": step, "state": state, "files": files}
            return Manifest(folder, {**raw, "tensors": list(tensors.values())})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"step {step} cannot be saved: {error}", where=str(folder)) from None

    def encode(self) -> bytes:
        """The manifest as JSON.

        Raises:
            ValueError: if it is over `MANIFEST_LIMIT`.
        """
        sparse = any(at.rows is not None for tensor in self.tensors.values() for at in tensor.boxes)
        raw = {
            "format": FORMAT,
            "version": 2 if sparse else 1,
            "step": self.step,
            "state": self.state,
            "files": {name: {"sha256": file.sha256, "bytes": file.bytes} for name, file in self.files.items()},
            "tensors": [
                {
                    "kind": tensor.kind,
                    "name": tensor.name,
                    "shape": tensor.shape,
                    "dtype": tensor.dtype,
                    "boxes": [at.record() for at in tensor.boxes],
                }
                for tensor in self.tensors.values()
            ],
        }
        content = json.dumps(raw, separators=(",", ":")).encode() + b"\n"
        if len(content) > MANIFEST_LIMIT:
            raise ValueError(f"a manifest of {len(content)} bytes is over the limit of {MANIFEST_LIMIT}")
        return content

    def verify(self) -> None:
        """Compares every file's content with its hash, a few files at a time.

        Raises:
            CheckpointError: naming the first file that differs.
        """
        folder = self.folder
        assert isinstance(folder, Path)
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            hashes = pool.map(lambda name: _sha256(folder / name), self.files)
            for (name, file), found in zip(self.files.items(), hashes, strict=True):
                if found != file.sha256:
                    raise _damaged(folder / name, "its content differs from the hash in the manifest")

    def names(self, kind: str) -> list[str]:
        """The global names of this kind, in the order of saving."""
        return [name for of, name in self.tensors if of == kind]

    def tensor(self, kind: str, name: str) -> StoredTensor:
        """The tensor's description.

        Raises:
            CheckpointError: if the checkpoint has none of this kind and name.
        """
        found = self.tensors.get((kind, name))
        if found is None:
            raise CheckpointError(
                f"it holds no {kind} `{name}`",
                where=str(self.folder),
                fix="The model or optimiser is not the one that was saved",
            )
        return found

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The global shape. Raises `CheckpointError` if there is no such tensor."""
        return self.tensor(kind, name).shape

    def _check_places(self) -> None:
        """Each file holds what is said to lie in it, so that a small forged one cannot claim much memory."""
        inside = dict.fromkeys(self.files, 0)
        keys: set[tuple[str, str]] = set()
        for tensor in self.tensors.values():
            for at in tensor.boxes:
                if at.file not in inside:
                    raise ValueError(f"names a file `{at.file}` that it does not list")
                for key, size in at.places(DTYPES[tensor.dtype][1]).items():
                    if (at.file, key) in keys:
                        raise ValueError(f"uses the key `{key}` of {at.file} twice")
                    keys.add((at.file, key))
                    inside[at.file] += size
        for name, size in inside.items():
            if size > self.files[name].bytes:
                raise ValueError(f"places {size} bytes in {name}, which has {self.files[name].bytes}")


def check_file(path: Path, file: StoredFile) -> None:
    """Checks that a shard is a regular file of the size the manifest gives.

    Raises:
        CheckpointError: naming the file.
    """
    try:
        found = os.lstat(path)
    except OSError as error:
        raise _damaged(path, f"the shard is missing ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(path, "is not a regular file")
    if found.st_size != file.bytes:
        raise _damaged(path, f"has {found.st_size} bytes instead of {file.bytes}")


def hash_line(content: bytes) -> bytes:
    """What `manifest.sha256` holds for a manifest of this content."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def _damaged(path: Location, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), fix="This checkpoint is damaged; take an earlier one")


def _read_limited(path: Location, limit: int) -> bytes:
    if not isinstance(path, Path):
        content = path.read(limit + 1)
        if len(content) > limit:
            raise _damaged(path, f"is larger than the limit of {limit} bytes")
        return content
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise _damaged(path, f"is larger than the limit of {limit} bytes")
    return content


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from None


def _file(name: str, described: Any) -> StoredFile:
    if not _FILE.fullmatch(name):
        raise ValueError(f"lists a file `{name[:80]}`, which is no name of a shard")
    if not isinstance(described, dict):
        raise ValueError(f"does not describe {name}")
    sha256, size = described.get("sha256"), described.get("bytes")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"has no sha256 for {name}")
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise ValueError(f"has no size for {name}")
    return StoredFile(sha256, size)


def _tensor(item: Any) -> StoredTensor:
    if not isinstance(item, dict):
        raise ValueError("has a tensor that is not an object")
    kind, name, dtype, boxes = (item.get(key) for key in ("kind", "name", "dtype", "boxes"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"has a tensor of the unknown kind {str(kind)[:80]!r}")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_LIMIT:
        raise ValueError("has a tensor without a valid name")
    what = f"{kind} `{name}`"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what} has the dtype {str(dtype)[:80]!r}, which is not saved")
    shape = _sizes(item.get("shape"), what)
    if math.prod(shape) >= _SIZE:
        raise ValueError(f"{what} is too large")
    if not isinstance(boxes, list):
        raise ValueError(f"{what} has no boxes")
    stored = []
    for box in boxes:
        if not isinstance(box, dict):
            raise ValueError(f"{what} has a box that is not an object")
        file, key = box.get("file"), box.get("key")
        if not isinstance(file, str) or not isinstance(key, str):
            raise ValueError(f"{what} has a box without file or key")
        place = Box(_sizes(box.get("offset"), what), _sizes(box.get("length"), what))
        try:
            rows = StoredRows.of(box["rows"], place, shape) if "rows" in box else None
        except ValueError as error:
            raise ValueError(f"{what} has {error}") from None
        stored.append(StoredBox(place, file, key, rows))
    if problem := uncovered(shape, [at.box for at in stored]):
        raise ValueError(f"{what}: {problem}")
    return StoredTensor(kind, name, shape, dtype, tuple(stored))


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    sequence = isinstance(value, list | tuple) and len(value) <= _DIMENSIONS
    if not sequence or not all(type(n) is int and 0 <= n < _SIZE for n in value):
        raise ValueError(f"{what} has a shape or box that is not a list of sizes")
    return tuple(value)
