"""What a run keeps of its training set: types, shapes and vocabularies, by which other data are read as it was."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verbund.data.manifest import NAME, Manifest

FOLDER = "data"


def keep(store: Path, run: Path, columns: Sequence[str] | None) -> None:
    """Copies the manifest of a training set and its vocabularies to a run; appears whole or not at all.

    Args:
        store: the training set.
        run: the run's directory; nothing happens if it has them already.
        columns: those that the job uses; None: all.

    Raises:
        OSError: if they cannot be written.
    """
    target = run / FOLDER
    if (target / NAME).is_file():
        return
    manifest = Manifest.read(store)
    kept = [column for column in manifest.columns if columns is None or column.name in columns]
    temporary = run / f".{FOLDER}-{secrets.token_hex(6)}"
    try:
        temporary.mkdir()
        for column in kept:
            if column.vocabulary is not None:
                shutil.copyfile(store / column.vocabulary, temporary / column.vocabulary)
        replace(manifest, columns=tuple(kept), sources=(), unsupported={}).write(temporary)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def kept(run: Path) -> Path | None:
    """What `keep` left in a run, if it did."""
    folder = run / FOLDER
    return folder if (folder / NAME).is_file() else None


def vocabulary_of(folder: Path | None, targets: Sequence[str]) -> Path | None:
    """The file with the class names of a job's only target; None if they have no names."""
    if folder is None or len(targets) != 1:
        return None
    column = Manifest.read(folder, files=False).column(targets[0])
    return folder / column.vocabulary if column is not None and column.vocabulary is not None else None
