"""What processes need besides their settings: the task's code, the converted data, a model's folder; by content.

A host that does not see a folder of the command gets what it lacks: it has the same files of its own, or reads them
from the command into its cache, and checks each by its hash. Nothing here knows how many hosts or workers there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from verbund.data.manifest import NAME as MANIFEST
from verbund.errors import InputError, TaskError, VerbundError, from_record

APART = "apart"
"""The setting that has the folders that a process's host does not see."""
_PLACES = "places"
CODE_FILES, CODE_BYTES = 1000, 16 << 20
"""What may travel of a task's folder."""
_LOOKED_AT = 500
"""Images whose hashes tell whether a folder is the same."""
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}

Kind = Literal["code", "data", "images", "model"]


@dataclass(frozen=True)
class Tree:
    """A folder of the command.

    Args:
        kind: `code`: what a task file may import; `data`: a converted data set; `images`: what such a set names;
            `model`: a Hugging Face folder.
        folder: absolute.
        names: of the files, where they are known.
    """

    kind: Kind
    folder: Path
    names: tuple[str, ...] | None = None

    @cached_property
    def files(self) -> list[tuple[str, int, str]]:
        """Name below the folder, bytes and SHA-256 of each file. Reads them all, once.

        Raises:
            InputError: if they cannot be read, or there are more than may travel.
        """
        try:
            return [(str(path.relative_to(self.folder)), path.stat().st_size, _sha256(path)) for path in self._paths()]
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(error.filename or self.folder)) from None

    def outline(self) -> dict[str, Any] | None:
        """By what a host knows a data set where it lies: the manifest's hash and the sizes of what it describes; of
        images some hundreds, spread evenly. None of other trees, which are known whole."""
        if self.kind not in ("data", "images"):
            return None
        paths = [*self._paths()]
        if self.kind == "images":
            paths = paths[:: max(1, len(paths) // _LOOKED_AT)]
        hashed = {path: self.kind == "images" or path.name == MANIFEST for path in paths}
        try:
            files = [
                (str(path.relative_to(self.folder)), path.stat().st_size, _sha256(path) if whole else "")
                for path, whole in hashed.items()
            ]
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(error.filename or self.folder)) from None
        return {"folder": str(self.folder), "kind": self.kind, "files": files}

    @cached_property
    def listing(self) -> bytes:
        """The files as JSON: what a host gets first."""
        return json.dumps(self.files).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of `listing`, which names the tree's content."""
        return hashlib.sha256(self.listing).hexdigest()

    def record(self) -> dict[str, Any]:
        """What a host is told."""
        return {"kind": self.kind, "folder": str(self.folder), "sha256": self.digest, "bytes": len(self.listing)}

    def _paths(self) -> Iterator[Path]:
        if self.names is not None:
            yield from (self.folder / name for name in self.names)
            return
        if self.kind != "code":
            yield from sorted(p for p in self.folder.iterdir() if p.is_file() and not p.name.startswith("."))
            return
        count = total = 0
        for path in _python_files(self.folder):
            count, total = count + 1, total + path.stat().st_size
            if count > CODE_FILES or total > CODE_BYTES:
                what = f"has more than {CODE_FILES} Python files or {CODE_BYTES >> 20} MiB of them beside the task file"
                fix = "Give the task file a folder of its own: a host that does not see it gets all code beside it"
                raise TaskError(what, where=str(self.folder), fix=fix)
            yield path


def _python_files(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED and not os.path.exists(f"{at}/{name}/pyvenv.cfg")
        )
        yield from (Path(at, name) for name in sorted(names) if name.endswith(".py"))


@dataclass(frozen=True)
class Supplies:
    """The trees that a job's processes need."""

    trees: tuple[Tree, ...]

    def offered(self) -> Iterator[tuple[str, Path | bytes]]:
        """All that hosts may ask for, by its hash."""
        for tree in self.trees:
            yield tree.digest, tree.listing
            yield from ((sha256, tree.folder / name) for name, _, sha256 in tree.files)


@dataclass
class HostSupply:
    """How far the supply of one host is."""

    places: dict[str, str] | None = None
    """Where the host has what lies in a folder of the command; None as long as something is missing."""
    asked: Supplies | None = None
    failed: VerbundError | None = None
    bytes: int = 0
    """That it has got."""
    moved: float = field(default_factory=time.monotonic)
    """When more came last."""

    def begin(self, supplies: Supplies, missing: Sequence[Tree], send: Callable[[dict[str, Any]], object]) -> None:
        """Asks the host to get what is missing there."""
        self.asked, self.failed, self.bytes, self.moved = supplies, None, 0, time.monotonic()
        self.places = None if missing else {}
        if missing:
            send({"trees": [tree.record() for tree in missing]})

    def hear(self, told: Mapping[str, Any]) -> None:
        """Takes what the host tells."""
        self.moved = time.monotonic()
        if "error" in told:
            self.failed = from_record(told["error"])
        elif "places" in told:
            self.places = {str(key): str(value) for key, value in told["places"].items()}
        self.bytes = int(told.get("bytes", self.bytes))


def located(settings: Mapping[str, Any], places: Mapping[str, str], unseen: Sequence[str]) -> dict[str, Any]:
    """A process's settings with the paths that its host has for what the command has elsewhere.

    Args:
        settings: plain values, with `job`, `folder` and `prepared` where they are of a job.
        places: the host's folder of each folder of the command that it got.
        unseen: folders whose files the process asks the command for.
    """
    found = dict(settings)
    if unseen:
        found[APART] = list(unseen)
    if not places:
        return found
    found[_PLACES] = dict(places)
    if (prepared := settings.get("prepared")) is not None:
        sides = {side: places.get(prepared[side], prepared[side]) for side in ("train", "validation")}
        found["prepared"] = {**prepared, **sides, "roots": dict(places)}
    if (job := settings.get("job")) is not None:
        scheme, task = _scheme(str(job["task"]))
        whole = os.path.realpath(os.path.join(settings["folder"], os.path.expanduser(task)))
        folder, name = (whole, "") if scheme else os.path.split(whole)
        if (there := places.get(folder)) is not None:
            found["job"] = {**job, "task": scheme + os.path.join(there, name) if name else scheme + there}
    return found


def _scheme(task: str) -> tuple[str, str]:
    return ("hf:", task.removeprefix("hf:")) if task.startswith("hf:") else ("", task)


def named_by_owner(told: Any, settings: Mapping[str, Any]) -> Any:
    """What a process tells, with the command's paths in place of its host's: those are what the user knows."""
    places = settings.get(_PLACES)
    if not places:
        return told
    if isinstance(told, str):
        for folder, there in places.items():
            told = told.replace(there, folder)
        return told
    if isinstance(told, dict):
        return {key: named_by_owner(value, settings) for key, value in told.items()}
    if isinstance(told, list):
        return [named_by_owner(value, settings) for value in told]
    return told


def same_files(folder: Path, kind: Kind, files: Sequence[tuple[str, int, str]]) -> bool:
    """Whether a folder has these files: of data the manifest by its hash and the others by their sizes, else all by
    their hashes."""
    for name, size, sha256 in files:
        path = folder / name
        try:
            if path.stat().st_size != size or ((kind != "data" or name == MANIFEST) and _sha256(path) != sha256):
                return False
        except OSError:
            return False
    return bool(files)


def _sha256(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
