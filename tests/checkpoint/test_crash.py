"""Whatever happens within a save, a whole checkpoint is found afterwards."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saves import check, save

from verbund import checkpoint
from verbund.checkpoint import Piece, newest_valid, partial_folder, prune, write_part
from verbund.errors import CheckpointError

Tick = Callable[[], None]


class _Ticking:
    """A hash that ticks before each chunk: as each is written right after, the file is then half there."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick
        self._inner = hashlib.new("sha256")

    def update(self, chunk: Any) -> None:
        self._tick()
        self._inner.update(chunk)

    def hexdigest(self) -> str:
        return self._inner.hexdigest()


@contextmanager
def ticking(tick: Tick) -> Iterator[None]:
    """Calls `tick` before every operation on the disk that a save or a pruning does."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "scandir"):
            original = getattr(os, name)

            def ticked(*arguments: Any, _original: Any = original, **more: Any) -> Any:
                tick()
                return _original(*arguments, **more)

            patch.setattr(os, name, ticked)
        patch.setattr("verbund.checkpoint.write._CHUNK", 64)
        patch.setattr("verbund.comm.files.location._BUFFER", 32)
        patch.setattr("verbund.checkpoint.write.hashlib", SimpleNamespace(sha256=lambda: _Ticking(tick)))
        yield


def counted(action: Tick, at: int) -> Tick:
    """Does `action` at the `at`-th tick."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == at:
            action()

    return tick


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; returns how it ended, as `os.waitstatus_to_exitcode`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start(tmp_path: Path) -> Path:
    """Two checkpoints, and one that the next pruning removes."""
    for step in (1, 2, 3):
        save(tmp_path / "start", step)
    return tmp_path / "start"


def test_killed_at_every_operation(tmp_path: Path) -> None:
    original = start(tmp_path)
    ended = None
    outcomes = []
    for at in range(1, 200):
        folder = tmp_path / f"kill-{at}"
        shutil.copytree(original, folder)

        def work(folder: Path = folder, at: int = at) -> None:
            with ticking(counted(lambda: os.kill(os.getpid(), signal.SIGKILL), at)):
                save(folder, 4)
                prune(folder, 2)

        ended = in_child(work)
        assert ended in (0, -signal.SIGKILL)
        path, warnings = newest_valid(folder)
        assert not warnings
        outcomes.append(check(path))
        for other in checkpoint.generations(folder):
            check(other)  # what is not the newest is whole too
        assert check(save(folder, 4)) == 4
        checkpoint.sweep(folder)
        assert not list(folder.glob(".step-*"))
        shutil.rmtree(folder)
        if ended == 0:
            break
    assert ended == 0, "the save was never finished"
    assert outcomes == sorted(outcomes)  # before the pointer moves 3, then 4
    assert outcomes[0] == 3
    assert outcomes[-1] == 4
    assert len(outcomes) > 20


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_error_at_every_operation(tmp_path: Path, number: int) -> None:
    original = start(tmp_path)
    found = []

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    texts = set()
    for at in range(1, 200):
        folder = tmp_path / f"error-{at}"
        shutil.copytree(original, folder)
        reached = False

        def action() -> None:
            nonlocal reached
            reached = True
            fail()

        with ticking(counted(action, at)):
            try:
                save(folder, 4)
            except CheckpointError as error:
                texts.add(error.what)
                checkpoint.discard(folder, 4)
            else:
                prune(folder, 2, budget_bytes=1.0)
        path, warnings = newest_valid(folder)
        assert not warnings
        found.append(check(path))
        assert check(save(folder, 5)) == 5
        shutil.rmtree(folder)
        if not reached:
            break
    else:
        pytest.fail("the save was never finished")
    assert found == sorted(found)
    assert (found[0], found[-1]) == (3, 4)
    assert len(texts) == 1
    assert ("disk is full" if number == errno.ENOSPC else os.strerror(number)) in texts.pop()


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_times(tmp_path: Path, seed: int) -> None:
    """A process saves and prunes until it is killed; the next goes on. Nothing acknowledged goes."""
    draw = random.Random(seed)
    save(tmp_path, 1)
    done = 1
    for killed in range(500):
        if killed >= 12 and done > 5:  # a busy machine saves little in so short times
            break
        reading, writing = os.pipe()

        def work(writing: int = writing) -> None:
            step = check(newest_valid(tmp_path)[0])
            checkpoint.sweep(tmp_path)
            os.write(writing, step.to_bytes(8, "little"))
            while True:
                step += 1
                save(tmp_path, step)
                os.write(writing, step.to_bytes(8, "little"))
                prune(tmp_path, 2)

        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(1)
        os.close(writing)
        os.read(reading, 8)  # it has begun
        time.sleep(draw.uniform(0.0, 0.04))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        while raw := os.read(reading, 8):
            done = max(done, int.from_bytes(raw, "little"))
        os.close(reading)
        path, warnings = newest_valid(tmp_path)
        assert not warnings
        assert done <= check(path) <= done + 1
        done = check(path)
    assert done > 5


@pytest.mark.parametrize("small_disk", ["256k"], indirect=True)
def test_a_full_disk(small_disk: Path) -> None:
    save(small_disk, 1)
    large = [Piece.whole("parameters", "w", torch.ones(1 << 20))]
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        write_part(partial_folder(small_disk, 2), 0, large)
    assert "part-00000-0.safetensors" in str(caught.value)
    assert not list(partial_folder(small_disk, 2).iterdir())  # the space is free again at once
    checkpoint.discard(small_disk, 2)
    # Full to the last byte: not even a manifest fits.
    record = write_part(partial_folder(small_disk, 3), 0, [Piece.whole("parameters", "w", torch.ones(3))])
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(1 << 20))
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.commit(small_disk, 3, [record], {})
    checkpoint.discard(small_disk, 3)
    assert check(newest_valid(small_disk)[0]) == 1
    filler.unlink()
    assert check(save(small_disk, 4)) == 4


def test_a_limit_of_file_size(tmp_path: Path) -> None:
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match="disk is full \\(or a quota or size limit"):
            write_part(partial_folder(tmp_path, 2), 0, [Piece.whole("parameters", "w", torch.ones(1 << 16))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert check(newest_valid(tmp_path)[0]) == 1
