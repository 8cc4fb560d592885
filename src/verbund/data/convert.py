"""Conversion: any source once into a store of column files, in bounded memory, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from verbund.data.bundled import read_bundled
from verbund.data.columns import ColumnWriter, Unsupported
from verbund.data.finding import Found
from verbund.data.manifest import VERSION, Column, Manifest, SourceFile, block_of, vocabulary
from verbund.data.tables import Rows, read_table
from verbund.data.text import Tokenizer
from verbund.errors import DataError
from verbund.job import Data

_BLOCK = 1 << 22
FILES = "files.json"


def convert(found: Found, data: Data, folder: Path, cache: Path, like: Path | None = None) -> Path:
    """The store of a source: the one in the cache, or a new one.

    Args:
        found: the source.
        data: the job's section; sequence, tokenizer and image size matter where the kind needs them.
        folder: what the tokenizer's path starts from.
        cache: where stores lie, by fingerprint.
        like: the training set's store, whose types and vocabularies a validation set gets.

    Raises:
        DataError: if the source cannot be read, is empty, or does not fit `like`.
    """
    if found.kind == "manifest":
        Manifest.read(found.root)
        return found.root
    parts = [f"verbund-data-{VERSION}", found.kind, found.name if found.kind == "sklearn" else ""]
    tokenizer = Tokenizer(data.tokenizer, folder) if found.kind == "text" else None
    if tokenizer is not None:
        parts += [tokenizer.identity, str(data.sequence)]
    if found.kind == "images":
        parts += [str(data.image_size), str(found.root)]
    parts += [f"{path.relative_to(found.root)} {content_hash(path, cache)}" for path in found.files]
    if like is not None:
        parts.append(Manifest.read(like).fingerprint)
    fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    store = cache / fingerprint[:32]
    if (store / "manifest.json").is_file():
        try:
            Manifest.read(store)
        except DataError:
            shutil.rmtree(store, ignore_errors=True)  # damaged: made anew
        else:
            return store
    return _whole_or_not(found, data, tokenizer, cache, store, fingerprint, like)


def _whole_or_not(
    found: Found,
    data: Data,
    tokenizer: Tokenizer | None,
    cache: Path,
    store: Path,
    fingerprint: str,
    like: Path | None,
) -> Path:
    """Converts into a folder of its own and renames it; who comes second takes what the first has made."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    except OSError as error:
        raise DataError(f"the cache cannot be written: {error}", where=str(cache), fix="Set `data.cache`") from None
    try:
        if tokenizer is not None:
            manifest = _tokens(found, data, tokenizer, temporary, fingerprint)
        elif found.kind == "images":
            manifest = _images(found, data, temporary, fingerprint, like)
        else:
            manifest = _table(found, temporary, fingerprint, like)
        manifest.write(temporary)
        try:
            os.rename(temporary, store)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        return store
    except OSError as error:
        fix = "Free some space, or set `data.cache` to another disk" if error.errno == errno.ENOSPC else None
        raise DataError(f"the data could not be converted: {error}", where=str(cache), fix=fix) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _table(found: Found, folder: Path, fingerprint: str, like: Path | None) -> Manifest:
    model = Manifest.read(like) if like is not None else None
    writers: dict[str, ColumnWriter] = {}
    unsupported: dict[str, str] = {}
    sources = []
    names: list[str] | None = None
    total = 0
    for file, batches in _parts(found):
        rows = 0
        for batch in batches:
            if names is None:
                names = list(batch)
                for number, name in enumerate(names):
                    column = model.column(name) if model else None
                    known = vocabulary(like, column) if like and column and column.kind == "text" else None
                    writers[name] = ColumnWriter(folder, f"{number}.bin", name, column, known)
            elif list(batch) != names:
                _differ(file, names, list(batch))
            rows += _append(batch, writers, unsupported)
        sources.append(SourceFile(file, rows))
        total += rows
    if total == 0:
        raise DataError("is empty: it has no rows", where=found.name)
    columns = tuple(writer.finish() for writer in writers.values())
    row_bytes = sum(column.row_bytes for column in columns)
    block = block_of(total, row_bytes)
    return Manifest("columns", total, columns, tuple(sources), fingerprint, block, unsupported)


def _append(batch: Rows, writers: dict[str, ColumnWriter], unsupported: dict[str, str]) -> int:
    rows = 0
    for name, chunk in batch.items():
        if name not in writers:
            continue
        try:
            if isinstance(chunk, Unsupported):
                raise chunk
            rows = max(rows, len(chunk.values))
            writers[name].write(chunk)
        except Unsupported as reason:
            unsupported[name] = str(reason)
            writers.pop(name).drop()
    return rows


def _parts(found: Found) -> Iterator[tuple[str, Iterable[Rows]]]:
    if found.kind == "sklearn":
        yield f"sklearn:{found.name}", read_bundled(found.name)
        return
    for path in found.files:
        yield str(path), read_table(path, found.kind)


def _differ(file: str, names: list[str], others: list[str]) -> None:
    missing = [name for name in names if name not in others]
    extra = [name for name in others if name not in names]
    what = f"lacks `{missing[0]}`" if missing else f"has `{extra[0]}` besides" if extra else "has another order"
    raise DataError(
        f"has other columns than the file before it: it {what}",
        where=file,
        fix="All files of a source have the same",
    )


def _tokens(found: Found, data: Data, tokenizer: Tokenizer, folder: Path, fingerprint: str) -> Manifest:
    count, largest = 0, -1
    with open(folder / "0.bin", "wb") as stream:
        for tokens in tokenizer.tokens(found.files):
            if tokens.size:
                stream.write(np.ascontiguousarray(tokens).tobytes())
                count += len(tokens)
                largest = max(largest, int(tokens.max()))
    rows = (count - 1) // data.sequence if count else 0
    if rows < 1:
        raise DataError(
            f"is too short: {count} tokens do not make one sample of {data.sequence} + 1",
            where=found.name,
            fix="Lower `data.sequence` or give more text",
        )
    column = Column(
        "tokens",
        tokenizer.dtype.name,
        (data.sequence + 1,),
        "tokens",
        "0.bin",
        minimum=0,
        maximum=largest,
        values=tokenizer.values,
    )
    sources = tuple(SourceFile(str(path), 0) for path in found.files)
    block = block_of(rows, data.sequence * tokenizer.dtype.itemsize)
    return Manifest("tokens", rows, (column,), sources, fingerprint, block, sequence=data.sequence)


def _images(found: Found, data: Data, folder: Path, fingerprint: str, like: Path | None) -> Manifest:
    from verbund.data.images import shape_of

    relative = [path.relative_to(found.root) for path in found.files]
    classes = sorted({path.parts[0] for path in relative})
    if like is not None:
        model = Manifest.read(like)
        label = model.column("label")
        known = vocabulary(like, label) if label else []
        if strange := [name for name in classes if name not in known]:
            raise DataError(f"class `{strange[0]}` is not in the training set", where=str(found.root / strange[0]))
        classes = known
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[path.parts[0]] for path in relative], np.int64)
    labels.tofile(folder / "label.bin")
    (folder / "classes.json").write_text(json.dumps(classes, ensure_ascii=False), encoding="utf-8")
    (folder / FILES).write_text(json.dumps([str(path) for path in relative], ensure_ascii=False), encoding="utf-8")
    image = Column("image", "uint8", shape_of(found.files[0], data.image_size), "image", None, minimum=0, maximum=255)
    label_column = Column(
        "label",
        "int64",
        (),
        "label",
        "label.bin",
        minimum=int(labels.min()),
        maximum=int(labels.max()),
        values=len(classes),
        vocabulary="classes.json",
    )
    sources = tuple(SourceFile(str(path), 1) for path in found.files)
    return Manifest("images", len(labels), (image, label_column), sources, fingerprint, 1, root=str(found.root))


def content_hash(path: Path, cache: Path) -> str:
    """The SHA-256 of a file's content; remembered by path, size and time of change.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        status = path.stat()
        known = cache / "hashes" / hashlib.sha256(str(path).encode()).hexdigest()[:32]
        state = f"{status.st_size} {status.st_mtime_ns}"
        try:
            before, _, digest = known.read_text(encoding="ascii").rpartition(" ")
            if before == state and len(digest) == 64:
                return digest
        except (OSError, UnicodeDecodeError):
            pass
        hasher = hashlib.sha256()
        with open(path, "rb") as raw:
            while chunk := raw.read(_BLOCK):
                hasher.update(chunk)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from None
    digest = hasher.hexdigest()
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(f"{state} {digest}", encoding="ascii")
    except OSError:
        return digest  # remembering only saves time
    return digest
