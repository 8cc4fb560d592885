"""Fingerprints of sources: sha256 over their content, remembered by path, size and time of change."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from verbund.errors import DataError

_STEP = 1 << 20
# A file changed less than this before it was hashed may change again without its time of change showing it.
_SETTLED_NS = 2_000_000_000
_PARALLEL_BYTES = 8 << 20


def fingerprint(parts: Iterable[Any]) -> str:
    """One sha256 of JSON values; the number of workers must never be among them."""
    text = json.dumps(list(parts), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def content_hashes(files: Iterable[Path], cache: Path, notify: Callable[[str], None] | None = None) -> dict[Path, str]:
    """The sha256 of each file's content.

    Args:
        files: absolute paths.
        cache: folder of the converted data; known hashes lie in its folder `hashes`.
        notify: told when hashing takes long.

    Raises:
        DataError: if a file cannot be read.
    """
    files = list(files)
    memory = cache / "hashes" / f"{fingerprint(map(str, files))[:32]}.json"
    known = _recall(memory)
    result: dict[Path, str] = {}
    unknown: list[tuple[Path, os.stat_result]] = []
    for file in files:
        state = _stat(file)
        former = known.get(str(file))
        if former is not None and former[:2] == [state.st_size, state.st_mtime_ns]:
            result[file] = former[2]
        else:
            unknown.append((file, state))
    if not unknown:
        return result
    size = sum(state.st_size for _, state in unknown)
    if notify is not None and size > 1 << 30:
        notify(f"reading {size / 1e9:.1f} GB once, to recognise the data later")
    begun = time.time_ns()
    if size > _PARALLEL_BYTES and len(unknown) > 1:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            hashes = list(pool.map(lambda item: _hash(item[0]), unknown))
    else:
        hashes = [_hash(file) for file, _ in unknown]
    for (file, state), value in zip(unknown, hashes, strict=True):
        result[file] = value
        if begun - state.st_mtime_ns > _SETTLED_NS:
            known[str(file)] = [state.st_size, state.st_mtime_ns, value]
    _remember(memory, known)
    return result


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(file)) from None


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_STEP))
    try:
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(file)) from None
    return digest.hexdigest()


def _recall(memory: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # only costs another reading of the files
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, known: dict[str, list[Any]]) -> None:
    new = memory.with_name(f"{memory.name}.{secrets.token_hex(6)}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(known), encoding="utf-8")
        new.replace(memory)
    except OSError:
        # The conversion itself will say what is wrong with the disk, if it matters.
        with suppress(OSError):
            new.unlink()
