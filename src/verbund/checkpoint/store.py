"""The folder of a run's checkpoints: commit, discard, prune, and find the newest that is whole.

    checkpoints/
      latest                   text: the name of the newest committed checkpoint; moved last
      step-00000100/           a checkpoint
      .step-00000200.partial/  a save that is going on, or that a crash left; no reader looks at it

A checkpoint counts from the moment `latest` names it. Saving never touches an existing one: a step that is
saved again (after a resume from an earlier one) becomes `step-00000100.1`. Saves are committed in the order
of their steps.
Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, overload

from verbund.checkpoint import durable
from verbund.checkpoint.manifest import MANIFEST, MANIFEST_HASH, Manifest, check_file, hash_line
from verbund.comm.files import Location
from verbund.errors import CheckpointError

LATEST = "latest"
_COMMITTED = re.compile(r"step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")
_LEFTOVER = re.compile(r"\.step-([0-9]{8,18})(?:\.[0-9]{1,9})?\.(?:partial|pruned)")


@overload
def partial_folder(checkpoints: Path, step: int) -> Path: ...
@overload
def partial_folder(checkpoints: Location, step: int) -> Location: ...
def partial_folder(checkpoints: Location, step: int) -> Location:
    """The folder that the parts of a save are written to until it is committed; made if it is not there. The run's
    owner makes it when the first part comes.

    Raises:
        CheckpointError: if it cannot be made, e.g. because the run's directory is gone: that is not made anew.
    """
    if not isinstance(checkpoints, Path):
        return checkpoints / _partial_name(step)
    folder = _partial(checkpoints, step)
    try:
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            checkpoints.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritten(folder, error) from None
    return folder


def commit(checkpoints: Path, step: int, parts: Sequence[dict[str, Any]], state: dict[str, Any]) -> Path:
    """Turns what was written to `partial_folder` into the newest checkpoint.

    Args:
        checkpoints: the folder of the run's checkpoints.
        step: optimiser steps done.
        parts: what every `write_part` of this save returned.
        state: JSON values that a resume needs besides tensors.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: if a tensor is not covered exactly once, a file is missing, or the disk is full. The
            earlier checkpoints are intact, and `discard` clears up.
    """
    folder = _partial(checkpoints, step)
    manifest = Manifest.gather(folder, step, parts, state)
    for name, file in manifest.files.items():
        check_file(folder / name, file)
    try:
        content = manifest.encode()
    except ValueError as error:
        raise CheckpointError(f"step {step} cannot be saved: {error}", where=str(folder)) from None
    try:
        for entry in os.scandir(folder):
            if entry.name not in manifest.files:
                os.unlink(entry.path)  # of a save of this step that crashed
        durable.write_new(folder / MANIFEST_HASH, hash_line(content))
        durable.write_new(folder / MANIFEST, content)
        durable.sync_folder(folder)
        target = _free_name(checkpoints, step)
        os.rename(folder, target)
        durable.sync_folder(checkpoints)
        durable.replace(checkpoints / LATEST, f"{target.name}\n".encode())
    except OSError as error:
        raise _unwritten(folder, error) from None
    sweep(checkpoints, before=step)
    return target


def is_partial(checkpoints: Path, step: int) -> bool:
    """Whether parts of a save of `step` are there that nobody has committed."""
    return _partial(checkpoints, step).is_dir()


def discard(checkpoints: Path, step: int) -> None:
    """Removes a save that failed, so that its space is free again. None there is no error."""
    shutil.rmtree(_partial(checkpoints, step), ignore_errors=True)


def sweep(checkpoints: Path, before: int | None = None) -> list[Path]:
    """Removes what crashed saves and removals left; returns what it removed.

    Args:
        checkpoints: the folder of the run's checkpoints.
        before: only of lower steps, as later saves may be going on; None: all. Then nobody may be saving.
    """
    removed = []
    try:
        names = [entry.name for entry in os.scandir(checkpoints) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    for name in names:
        match = _LEFTOVER.fullmatch(name)
        if match is not None and (before is None or int(match[1]) < before):
            shutil.rmtree(checkpoints / name, ignore_errors=True)
            removed.append(checkpoints / name)
    return removed


def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that the pointer names; None if there is no pointer or it is damaged."""
    try:
        with open(checkpoints / LATEST, encoding="ascii") as file:
            name = file.read(256).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return checkpoints / name if _COMMITTED.fullmatch(name) else None


def generations(checkpoints: Path) -> list[Path]:
    """All committed checkpoints, newest first.

    The pointer says which is newest; lower steps follow, descending. Higher steps come last: they are of a
    line that was given up by resuming from an earlier checkpoint, or a crash came before the pointer moved.

    Raises:
        CheckpointError: if the folder cannot be read. That it does not exist is no error.
    """
    try:
        names = [entry.name for entry in os.scandir(checkpoints) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(checkpoints)) from None
    found = sorted(((_order(name), name) for name in names if _COMMITTED.fullmatch(name)), reverse=True)
    newest = latest(checkpoints)
    if newest is not None:
        limit = _order(newest.name)
        found = [item for item in found if item[0] <= limit] + [item for item in found if item[0] > limit]
    return [checkpoints / name for _, name in found]


def folder(checkpoints: Path, step: int) -> Path:
    """The checkpoint of a step; of a step that was saved several times, the last.

    Raises:
        CheckpointError: if there is none, naming the steps there are, or the folder cannot be read.
    """
    found = generations(checkpoints)
    of_step = [path for path in found if _order(path.name)[0] == step]
    if not of_step:
        steps = ", ".join(str(n) for n in sorted({_order(path.name)[0] for path in found}))
        fix = f"There are checkpoints of the steps {steps}" if steps else "None was saved yet"
        raise CheckpointError(f"there is no checkpoint of step {step}", where=str(checkpoints), fix=fix)
    return max(of_step, key=lambda path: _order(path.name))


def verify(path: Path) -> None:
    """Checks that every file of a checkpoint is as it was written.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    Manifest.open(path)


def newest_valid(checkpoints: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint whose every file is as it was written.

    Returns:
        Its folder, and a warning for each newer one that is damaged. Its hashes are verified; whoever reads
        it next need not do it again.

    Raises:
        CheckpointError: if there is none, with the reason for each.
    """
    problems: list[str] = []
    pointed = latest(checkpoints)
    candidates = generations(checkpoints)
    if pointed is not None and pointed not in candidates:
        problems.append(f"{pointed}: `latest` names it, but it is not there.")
    elif pointed is None and candidates:
        problems.append(f"{checkpoints / LATEST}: the pointer to the newest checkpoint is missing or damaged.")
    for folder in candidates:
        try:
            Manifest.open(folder)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return folder, problems
    if not problems:
        raise CheckpointError("there is no checkpoint yet", where=str(checkpoints), fix="Train from the start")
    raise CheckpointError(
        "no checkpoint is whole:\n" + "\n".join(f"  {problem}" for problem in problems),
        where=str(checkpoints),
    )


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Within the block `prune` leaves a checkpoint where it is; whether it is still there.

    Args:
        path: its folder.
    """
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield (path / MANIFEST).exists()  # it may have been removed while its lock was waited for
    finally:
        os.close(descriptor)


def prune(checkpoints: Path, keep: int, best: int | None = None, budget_bytes: float | None = None) -> list[Path]:
    """Removes old checkpoints; call it after `commit`, when the pointer has moved.

    Args:
        checkpoints: the folder of the run's checkpoints.
        keep: how many stay, the newest first.
        best: step of the best one, which stays besides.
        budget_bytes: the oldest go until the rest fits. The newest and the best stay in any case.

    Returns:
        The folders that were removed. What cannot be removed, or is being read, stays until the next time; that is no
        error.
    """
    try:
        found = generations(checkpoints)
    except CheckpointError:
        return []
    if not found or latest(checkpoints) != found[0]:
        return []  # without a sound pointer nobody knows which one a resume would take
    protected = {found[0], next((path for path in found if _order(path.name)[0] == best), found[0])}
    kept = [path for index, path in enumerate(found) if index < max(keep, 1) or path in protected]
    doomed = [path for path in found if path not in kept]
    if budget_bytes is not None:
        sizes = {path: _size(path) for path in kept}
        for path in reversed(kept):
            if sum(sizes.values()) <= budget_bytes:
                break
            if path not in protected:
                doomed.append(path)
                del sizes[path]
    removed = []
    for path in doomed:
        grave = checkpoints / f".{path.name}.pruned"
        try:
            if not _renamed(path, grave):
                continue
            removed.append(path)
            shutil.rmtree(grave)
        except OSError:
            continue
    return removed


def _renamed(path: Path, grave: Path) -> bool:
    """Puts a checkpoint out of sight, so that a crash within its removal leaves none that looks damaged; False if
    somebody is reading it."""
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.rename(path, grave)  # nobody reads what has no manifest
        return True
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        os.rename(path, grave)
        return True
    finally:
        os.close(descriptor)


def _partial(checkpoints: Path, step: int) -> Path:
    return checkpoints / _partial_name(step)


def _partial_name(step: int) -> str:
    return f".step-{step:08d}.partial"


def _order(name: str) -> tuple[int, int]:
    match = _COMMITTED.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _free_name(checkpoints: Path, step: int) -> Path:
    target = checkpoints / f"step-{step:08d}"
    again = 0
    while target.exists():
        again += 1
        target = checkpoints / f"step-{step:08d}.{again}"
    return target


def _size(folder: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    except OSError:
        return 0  # a folder that cannot be read is not pruned for its size


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(durable.reason(error), where=str(path), fix=durable.remedy(error))
