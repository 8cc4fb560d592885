"""Conversion: any source once into a store of column files, in bounded memory, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from verbund.data.cache import stored
from verbund.data.finding import Found
from verbund.data.fingerprint import content_hashes, fingerprint
from verbund.data.manifest import FILES, VERSION, Column, Manifest, SourceFile, block_of, vocabulary
from verbund.data.table import Like, Notify, Table, convert_table
from verbund.data.text import Tokenizer
from verbund.errors import DataError
from verbund.job import Data


def convert(
    found: Found,
    data: Data,
    folder: Path,
    cache: Path,
    like: Path | None = None,
    notify: Notify | None = None,
    *,
    labelled: bool = True,
) -> Path:
    """The store of a source: the one in the cache, or a new one.

    Args:
        found: the source.
        data: the job's section; sequence, tokenizer and image size matter where the kind needs them.
        folder: what the tokenizer's path starts from.
        cache: where stores lie, by fingerprint.
        like: the training set's store, or what a run keeps of it, whose types and vocabularies a validation set gets.
        notify: told about the progress.
        labelled: whether images have the class that their folder names.

    Raises:
        DataError: if the source cannot be read, is empty, or does not fit `like`.
    """
    model = Like(like, Manifest.read(like, files=False)) if like is not None else None
    if found.kind == "manifest":
        _same_texts(found, Manifest.read(found.root), model)
        return found.root
    hashes = content_hashes(found.files, cache, notify)
    parts: list[object] = ["verbund-data", VERSION, found.kind, found.name if found.kind == "sklearn" else ""]
    parts += [[str(path.relative_to(found.root)), hashes[path]] for path in found.files]
    parts.append([model.manifest.fingerprint, *model.manifest.names] if model is not None else None)
    fill: Callable[[str, Path], Manifest]
    if found.kind == "text":
        tokenizer = Tokenizer(data.tokenizer or "bytes", folder)
        parts += [tokenizer.identity, data.sequence]
        fill = partial(_tokens, found, data.sequence, tokenizer)
    elif found.kind == "images":
        parts += [list(data.image_size or ()), str(found.root), labelled]
        fill = partial(_images, found, data.image_size, model, labelled)
    else:
        fill = partial(_table, found, model, notify)
    name = fingerprint(parts)
    return stored(cache, name, partial(fill, name))


def _same_texts(found: Found, manifest: Manifest, like: Like | None) -> None:
    """A store is taken as it is: its codes must mean what those of the training set do."""
    for column in manifest.columns if like is not None else ():
        model = like.column(column.name) if like is not None else None
        if like is None or model is None or model.vocabulary is None or column.vocabulary is None:
            continue
        if vocabulary(found.root, column) != vocabulary(like.folder, model):
            raise DataError(
                f"column `{column.name}` has other texts than in the training set, so its codes mean other things",
                where=f"{found.key}, {found.name}",
                fix="Name the files that it was made of",
            )


def _table(found: Found, like: Like | None, notify: Notify | None, name: str, folder: Path) -> Manifest:
    table = _opened(found, like)
    if found.kind not in ("csv", "jsonl"):
        return convert_table(table, folder, fingerprint=name, name=found.name, like=like, notify=notify)
    from verbund.data.lines import Contradiction, LinesTable

    assert isinstance(table, LinesTable)
    try:
        return convert_table(table, folder, fingerprint=name, name=found.name, like=like, notify=notify)
    except Contradiction:
        for file in folder.iterdir():
            file.unlink()
        table.settle()
    return convert_table(table, folder, fingerprint=name, name=found.name, like=like, notify=notify)


def _opened(found: Found, like: Like | None) -> Table:
    names = [str(path) for path in found.files]
    if found.kind == "sklearn":
        from verbund.data.bundled import BundledTable

        return BundledTable(found.name, found.key)
    if found.kind in ("npy", "npz"):
        from verbund.data.arrays import ArrayTable

        return ArrayTable(found.files, names)
    if found.kind == "parquet":
        from verbund.data.parquet import ParquetTable

        return ParquetTable(found.files, names)
    from verbund.data.lines import CsvTable, JsonLinesTable

    if found.kind == "csv":
        return CsvTable(found.files, names, like.manifest if like is not None else None)
    return JsonLinesTable(found.files, names)


def _tokens(found: Found, sequence: int, tokenizer: Tokenizer, name: str, folder: Path) -> Manifest:
    count, largest = 0, -1
    with open(folder / "c0.bin", "wb") as stream:
        for tokens in tokenizer.tokens(found.files):
            if tokens.size:
                stream.write(np.ascontiguousarray(tokens).data.cast("B"))
                count += len(tokens)
                largest = max(largest, int(tokens.max()))
    rows = (count - 1) // sequence if count else 0
    if rows < 1:
        raise DataError(
            f"is too short: {count} tokens do not make one sample of {sequence} + 1",
            where=found.name,
            fix="Lower `data.sequence` or give more text",
        )
    column = Column(
        "tokens",
        tokenizer.dtype.name,
        (sequence + 1,),
        "tokens",
        "c0.bin",
        minimum=0,
        maximum=largest,
        values=tokenizer.values,
    )
    sources = tuple(SourceFile(str(path), 0) for path in found.files)
    block = block_of(rows, sequence * tokenizer.dtype.itemsize)
    return Manifest("tokens", rows, (column,), sources, name, block, sequence=sequence)


def _images(
    found: Found, size: tuple[int, int] | None, like: Like | None, labelled: bool, name: str, folder: Path
) -> Manifest:
    from verbund.data.images import common_shape

    relative = [path.relative_to(found.root) for path in found.files]
    shape: tuple[int, ...] | None = None
    if like is not None:
        image = like.column("image")
        if like.manifest.kind != "images" or image is None:
            raise DataError("are images, the training set is not", where=found.name)
        shape = image.shape
    shape = common_shape(found.files, size, shape)
    columns = [Column("image", "uint8", shape, "image", None, minimum=0, maximum=255)]
    if labelled:
        columns.append(_labels(found, relative, like, folder))
    (folder / FILES).write_text(json.dumps([str(path) for path in relative], ensure_ascii=False), encoding="utf-8")
    sources = tuple(SourceFile(str(path), 1) for path in found.files)
    return Manifest("images", len(relative), tuple(columns), sources, name, 1, root=str(found.root))


def _labels(found: Found, relative: list[Path], like: Like | None, folder: Path) -> Column:
    """The classes that the folders name; those of `like`, if there is one, by name."""
    classes = sorted({path.parts[0] for path in relative})
    label = like.column("label") if like is not None else None
    if like is not None and label is not None:
        known = vocabulary(like.folder, label)
        if strange := [entry for entry in classes if entry not in known]:
            raise DataError(f"class `{strange[0]}` is not in the training set", where=str(found.root / strange[0]))
        classes = known
    numbers = {entry: number for number, entry in enumerate(classes)}
    labels = np.array([numbers[path.parts[0]] for path in relative], np.int64)
    labels.tofile(folder / "c1.bin")
    (folder / "classes.json").write_text(json.dumps(classes, ensure_ascii=False), encoding="utf-8")
    return Column(
        "label",
        "int64",
        (),
        "label",
        "c1.bin",
        minimum=int(labels.min()),
        maximum=int(labels.max()),
        values=len(classes),
        vocabulary="classes.json",
    )
