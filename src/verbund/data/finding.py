"""What `data.train` means: which files, and of which kind."""

from __future__ import annotations

import errno
import glob
import os
import stat
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from verbund.data.manifest import NAME
from verbund.errors import DataError

SourceKind = Literal["parquet", "csv", "jsonl", "npy", "npz", "text", "images", "sklearn", "manifest"]

EXTENSIONS: dict[str, SourceKind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npy": "npy",
    ".npz": "npz",
    ".txt": "text",
    ".md": "text",
}
IMAGES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
_KNOWN = "Known: " + ", ".join(sorted(EXTENSIONS)) + "; a folder of images by class; sklearn:NAME; a manifest"


@dataclass(frozen=True)
class Found:
    """A source.

    Args:
        kind: what it is.
        files: its files, in order; for scikit-learn none.
        root: the folder that the files lie in.
        name: as it was given.
        key: the job's key, or the argument, that named it.
        ignored: files that lie beside images and are none.
    """

    kind: SourceKind
    files: tuple[Path, ...]
    root: Path
    name: str
    key: str = "data.train"
    ignored: tuple[Path, ...] = ()


def find(source: str, folder: Path, key: str = "data.train", *, labelled: bool = True) -> Found:
    """Resolves a source.

    Args:
        source: file, folder, glob, manifest or `sklearn:NAME`.
        folder: what relative paths start from.
        key: the job's key, for messages.
        labelled: whether images need the folder of a class.

    Raises:
        DataError: if there is nothing there, or nothing of a known kind.
    """
    if not source.strip():
        raise DataError("names no source", where=key, fix=_KNOWN)
    if source.startswith("sklearn:"):
        return Found("sklearn", (), folder, source.removeprefix("sklearn:"), key)
    path = folder / Path(source).expanduser()
    _refuse_special(path, key)
    try:
        return _found(path, source, key, labelled)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror}", where=key) from None


def _found(path: Path, source: str, key: str, labelled: bool) -> Found:
    if path.is_dir():
        return _folder(path.resolve(), source, key, labelled)
    if path.exists():
        if path.name == NAME:
            return Found("manifest", (path.resolve(),), path.resolve().parent, source, key)
        single: SourceKind = "images" if not labelled and _is_image(path) else _kind(path, key)
        return Found(single, (path.resolve(),), path.resolve().parent, source, key)
    if glob.has_magic(source):
        files = sorted(Path(match).resolve() for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
        if not files:
            raise DataError(f"no file matches `{path}`", where=key)
        kind: SourceKind = "images" if not labelled and all(map(_is_image, files)) else _one_kind(files, key)
        return Found(kind, tuple(files), _common(files), source, key)
    hint = f"It is looked for in {path.parent}"
    if path.parent.is_dir():
        close = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
        hint = f"Did you mean `{close[0]}`?" if close else hint
    raise DataError(f"no such file or folder: {path}", where=key, fix=hint)


def _refuse_special(path: Path, key: str) -> None:
    """Refuses what cannot be read from beginning to end, and again: pipes, devices, links that lead nowhere."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            loop = error.errno == errno.ELOOP
            what = "is a link in a circle" if loop else f"is a link to {os.readlink(path)}, which is not there"
            raise DataError(f"{path} {what}", where=key, fix="Name the file itself") from None
        if error.errno in (errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP):
            raise DataError(f"{path} cannot be read: {error.strerror}", where=key) from None
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise DataError(
            f"{path} is a {kind}, which can be read only once", where=key, fix="Write the data to a file first"
        )


def _folder(path: Path, source: str, key: str, labelled: bool) -> Found:
    if (path / NAME).is_file():
        return Found("manifest", (path / NAME,), path, source, key)
    entries = sorted(entry for entry in path.iterdir() if not _hidden(entry))
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in EXTENSIONS]
    tables = [file for file in files if EXTENSIONS[file.suffix.lower()] != "text"]
    if tables:  # texts beside tables describe them
        return Found(_one_kind(tables, key), tuple(tables), path, source, key)
    images, ignored = _images(entries, labelled)
    if images:
        return Found("images", tuple(images), path, source, key, tuple(ignored))
    if files:
        return Found("text", tuple(files), path, source, key)
    if any(_is_image(entry) for entry in entries):
        raise DataError(
            f"{path} has images, but no folder per class",
            where=key,
            fix="Put the images of each class into a folder of the class's name",
        )
    raise DataError(f"{path} has no data", where=key, fix=_KNOWN)


def _images(entries: list[Path], labelled: bool) -> tuple[list[Path], list[Path]]:
    """The images below a folder's entries, and the files that are left out."""
    images: list[Path] = []
    ignored: list[Path] = []
    for entry in entries:
        for file in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            if _hidden(file) or not file.is_file():
                continue
            known = _is_image(file) and (entry.is_dir() or not labelled)
            (images if known else ignored).append(file)
    return images, ignored


def _hidden(path: Path) -> bool:
    return path.name.startswith((".", "_"))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGES


def _kind(path: Path, key: str) -> SourceKind:
    kind = EXTENSIONS.get(path.suffix.lower())
    if kind is None:
        ending = f"the ending `{path.suffix}`" if path.suffix else "no ending"
        raise DataError(f"{path} has {ending}, which tells no known kind of data", where=key, fix=_KNOWN)
    return kind


def _one_kind(files: list[Path], key: str) -> SourceKind:
    kinds = {_kind(file, key): file for file in files}
    if len(kinds) > 1:
        (_, one), (_, other), *_ = kinds.items()
        raise DataError(f"{one.name} and {other.name} are of different kinds", where=key, fix="Name files of one kind")
    return next(iter(kinds))


def _common(files: list[Path]) -> Path:
    return Path(os.path.commonpath([file.parent for file in files]))
