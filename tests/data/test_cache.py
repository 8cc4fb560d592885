"""The cache: converted once, recognised by content, whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbund.data import cache as caching
from verbund.data import columns, convert, fingerprint
from verbund.data.manifest import Manifest
from verbund.data.prepare import prepare
from verbund.data.samples import ColumnFiles
from verbund.errors import DataError
from verbund.job import Data


def source(folder: Path, value: int = 0, name: str = "d.npz") -> Path:
    folder.mkdir(exist_ok=True)
    np.savez(folder / name, x=np.arange(100) + value)
    return folder / name


def store(folder: Path, train: str = "d.npz", **more: Any) -> Path:
    prepared = prepare(Data(train=train, cache="cache", **more), folder=folder)
    assert prepared.train is not None
    return Path(prepared.train)


def test_the_same_content_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(tmp_path)
    first = store(tmp_path)
    monkeypatch.setattr(convert, "convert_table", lambda *_, **__: pytest.fail("converted again"))
    assert store(tmp_path) == first
    os.utime(tmp_path / "d.npz")  # another time, the same content
    assert store(tmp_path) == first
    assert store(tmp_path, "./d.npz") == first


def test_other_content_is_another_store(tmp_path: Path) -> None:
    source(tmp_path)
    first = store(tmp_path)
    source(tmp_path, 5)
    second = store(tmp_path)
    assert first != second
    assert ColumnFiles(second).rows(np.array([0]))["x"].tolist() == [5]
    assert ColumnFiles(first).rows(np.array([0]))["x"].tolist() == [0]


def test_content_changed_at_once_with_the_old_size_and_time_is_seen(tmp_path: Path) -> None:
    # Within the clock's resolution, size and time may stay; so a fresh file's hash is not remembered.
    path = source(tmp_path)
    first = store(tmp_path)
    state = path.stat()
    source(tmp_path, 5)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    assert store(tmp_path) != first


def test_a_settled_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source(tmp_path)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    first = store(tmp_path)
    monkeypatch.setattr(fingerprint, "_hash", lambda _: pytest.fail("read again"))
    assert store(tmp_path) == first


def test_what_shapes_the_conversion_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some words, many of them " * 20)
    stores = {store(tmp_path, "t.txt", sequence=n) for n in (4, 8)}
    assert len(stores) == 2
    # How many loaders read it, and how far ahead, never is.
    assert store(tmp_path, "t.txt", sequence=4, loaders=3, prefetch=9, window=7) in stores


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_a_damaged_store_is_made_anew(tmp_path: Path, damage: str) -> None:
    source(tmp_path)
    place = store(tmp_path)
    if damage == "cut":
        os.truncate(place / "c0.bin", 80)
    elif damage == "gone":
        (place / "c0.bin").unlink()
    else:
        (place / "manifest.json").write_text("{")
    assert store(tmp_path) == place
    assert ColumnFiles(place).rows(np.arange(100))["x"].tolist() == list(range(100))


def test_a_damaged_store_is_told_when_it_is_the_source(tmp_path: Path) -> None:
    source(tmp_path)
    place = store(tmp_path)
    os.truncate(place / "c0.bin", 80)
    with pytest.raises(DataError, match="has 80 bytes of 800"):
        store(tmp_path, str(place))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(columns.ColumnWriter, "write", full)
        with pytest.raises(DataError, match="the disk is full") as found:
            store(tmp_path)
    assert "data.cache" in str(found.value.fix)
    assert list((tmp_path / "cache" / "data").iterdir()) == []
    assert Manifest.read(store(tmp_path)).rows == 100


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    source(tmp_path)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="cannot be written"):
        store(tmp_path)


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    host = os.uname().nodename
    dead = tmp_path / "cache" / "data" / f"converting-{host}-{done.pid}-abc"
    alive = tmp_path / "cache" / "data" / f"converting-{host}-{os.getppid()}-abc"
    other = tmp_path / "cache" / "data" / f"converting-elsewhere-{done.pid}-abc"
    for folder in (dead, alive, other):
        folder.mkdir(parents=True)
    source(tmp_path)
    store(tmp_path)
    assert not dead.exists()
    assert alive.exists()
    assert other.exists()


def test_two_conversions_at_once_end_with_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(tmp_path)
    inner = convert.convert_table
    places = []

    def overtaken(*arguments: Any, **named: Any) -> Manifest:
        manifest = inner(*arguments, **named)
        monkeypatch.setattr(convert, "convert_table", inner)
        places.append(store(tmp_path))  # the other one, from beginning to end
        return manifest

    monkeypatch.setattr(convert, "convert_table", overtaken)
    places.append(store(tmp_path))
    assert places[0] == places[1]
    assert [path.name for path in (tmp_path / "cache" / "data").iterdir()] == [places[0].name]
    assert Manifest.read(places[0]).rows == 100


def test_many_processes_convert_the_same(tmp_path: Path) -> None:
    source(tmp_path)
    script = (
        "import sys; from pathlib import Path; from verbund.data.prepare import prepare; from verbund.job import Data;"
        "sys.stdin.readline();"
        "print(prepare(Data(train='d.npz', cache='cache'), folder=Path(sys.argv[1])).train)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in processes:  # all wait for the line; so they start together
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    places = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (place,) = places
    assert Manifest.read(Path(place)).rows == 100
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 1


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> Manifest:
        (folder / "c0.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        caching.stored(tmp_path, "f" * 64, interrupted)
    assert list((tmp_path / "data").iterdir()) == []
