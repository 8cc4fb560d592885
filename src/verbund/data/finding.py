"""What `data.train` means: which files, and of which kind."""

from __future__ import annotations

import glob
import os
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
    """A source: its kind, its files in order (for scikit-learn none), and the folder or name it stands for."""

    kind: SourceKind
    files: tuple[Path, ...]
    root: Path
    name: str


def find(source: str, folder: Path, key: str = "data.train") -> Found:
    """Resolves a source.

    Args:
        source: file, folder, glob, manifest or `sklearn:NAME`.
        folder: what relative paths start from.
        key: the job's key, for messages.

    Raises:
        DataError: if there is nothing there, or nothing of a known kind.
    """
    if source.startswith("sklearn:"):
        return Found("sklearn", (), folder, source.removeprefix("sklearn:"))
    path = folder / Path(source).expanduser()
    if path.is_dir():
        return _folder(path.resolve(), source, key)
    if path.exists():
        if path.name == NAME:
            return Found("manifest", (path.resolve(),), path.resolve().parent, source)
        return Found(_kind(path, key), (path.resolve(),), path.resolve().parent, source)
    if glob.has_magic(source):
        files = sorted(Path(match).resolve() for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
        if not files:
            raise DataError(f"no file matches `{path}`", where=key)
        return Found(_one_kind(files, key), tuple(files), _common(files), source)
    hint = f"It is looked for in {path.parent}"
    if path.parent.is_dir():
        close = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
        hint = f"Did you mean `{close[0]}`?" if close else hint
    raise DataError(f"no such file or folder: {path}", where=key, fix=hint)


def _folder(path: Path, source: str, key: str) -> Found:
    if (path / NAME).is_file():
        return Found("manifest", (path / NAME,), path, source)
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "_")))
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in EXTENSIONS]
    tables = [file for file in files if EXTENSIONS[file.suffix.lower()] != "text"]
    if tables:  # texts beside tables describe them
        return Found(_one_kind(tables, key), tuple(tables), path, source)
    images = [
        image
        for entry in entries
        if entry.is_dir()
        for image in sorted(entry.rglob("*"))
        if image.suffix.lower() in IMAGES and image.is_file()
    ]
    if images:
        return Found("images", tuple(images), path, source)
    if files:
        return Found("text", tuple(files), path, source)
    if any(entry.suffix.lower() in IMAGES for entry in entries):
        raise DataError(
            f"{path} has images, but no folder per class",
            where=key,
            fix="Put the images of each class into a folder of the class's name",
        )
    raise DataError(f"{path} has no data", where=key, fix=_KNOWN)


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
