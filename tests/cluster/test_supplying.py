"""What a host that does not see the command's folders gets from there, and what it has of its own."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from PIL import Image

from cluster.owner import Owner, owner
from verbund.cluster import host as hosts
from verbund.cluster import supplies, supplying
from verbund.cluster.file_service import FileService
from verbund.cluster.server import Host
from verbund.cluster.spread import SpreadCluster
from verbund.cluster.supplies import HostSupply, Supplies, Tree, located, named_by_owner, same_files
from verbund.cluster.supply_child import SupplyChild
from verbund.cluster.supplying import Supplying
from verbund.comm.wire import Connection, Message
from verbund.data.manifest import Manifest
from verbund.data.prepare import prepare
from verbund.data.samples import ColumnFiles
from verbund.errors import ClusterLost, InputError, RunFailed, TaskError
from verbund.job import Data
from verbund.stage.before import trees_of

Get = Callable[..., dict[str, str]]


@pytest.fixture
def there() -> Iterator[Owner]:
    with owner() as one:
        yield one


@pytest.fixture
def get(there: Owner, tmp_path: Path) -> Get:
    """Another host gets trees into its cache; `alone`, as if it saw nothing of the command's."""

    def places(*trees: Tree, alone: bool = True) -> dict[str, str]:
        for sha256, content in Supplies(trees).offered():
            there.service.offer(sha256, content)
        told: list[int] = []
        supply = Supplying(there.meeting, tmp_path / "cache-there", alone, told.append)
        return supply.places([tree.record() for tree in trees])

    return places


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def store(tmp_path: Path, rows: int = 50_000) -> Path:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(1).normal(size=(rows, 40)), y=np.arange(rows))
    prepared = prepare(Data(train="data.npz", cache=str(tmp_path / "cache")), folder=tmp_path)
    assert prepared.train is not None
    return Path(prepared.train)


def test_code_beside_the_task_file(get: Get, tmp_path: Path) -> None:
    code = written(tmp_path / "mine", task="import layers", layers="x = 1", pack__inner="y = 2", empty="")
    (code / "data.csv").write_text("not code")
    for hidden in (".git", "__pycache__", "env"):
        written(code / hidden, stray="")
    (code / "env" / "pyvenv.cfg").touch()
    there = Path(get(Tree("code", code))[str(code)])
    assert there.is_relative_to(tmp_path / "cache-there")
    found = {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert found == {"task.py": "import layers", "layers.py": "x = 1", "pack/inner.py": "y = 2", "empty.py": ""}
    assert there.stat().st_mode & 0o77 == 0
    (there / "layers.py").write_text("x = 'changed by somebody'")
    again = Path(get(Tree("code", code))[str(code)])
    assert (again / "layers.py").read_text() == "x = 1"  # its hash is checked before anybody imports it
    (code / "layers.py").write_text("x = 3")
    other = Path(get(Tree("code", code))[str(code)])
    assert other != again
    assert (other / "layers.py").read_text() == "x = 3"


def test_too_much_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supplies, "CODE_FILES", 2)
    code = written(tmp_path / "mine", task="", a="", b="")
    with pytest.raises(TaskError, match="more than 2 Python files"):
        Tree("code", code).record()
    (code / "b.py").unlink()
    assert len(Tree("code", code).files) == 2
    monkeypatch.setattr(supplies, "CODE_BYTES", 10)
    (code / "a.py").write_text("x = 1" * 10)
    with pytest.raises(TaskError, match="beside the task file"):
        Tree("code", code).record()


def test_a_data_set_is_the_same_there_and_comes_once(there: Owner, get: Get, tmp_path: Path) -> None:
    tree = Tree("data", store(tmp_path))
    place = Path(get(tree)[str(tree.folder)])
    assert Manifest.read(place) == Manifest.read(tree.folder)
    for name, size, _ in tree.files:
        assert (place / name).read_bytes() == (tree.folder / name).read_bytes()
        assert size == (place / name).stat().st_size
    moved = there.service.bytes
    assert moved > 16_000_000
    assert get(tree) == {str(tree.folder): str(place)}
    assert there.service.bytes - moved == len(tree.listing)
    assert sorted(path.name for path in place.parent.iterdir()) == [place.name]


def test_data_of_its_own_by_the_manifest(there: Owner, get: Get, tmp_path: Path) -> None:
    """At the command's path, or converted there before; another one's are not taken."""
    tree = Tree("data", store(tmp_path, 100))
    assert get(tree, alone=False) == {str(tree.folder): str(tree.folder)}
    own = tmp_path / "cache-there" / "data" / tree.folder.name
    shutil.copytree(tree.folder, own)
    assert get(tree) == {str(tree.folder): str(own)}
    manifest = (own / "manifest.json").read_text()
    (own / "manifest.json").write_text(manifest.replace('"rows": 100', '"rows": 101'))
    assert get(tree) != {str(tree.folder): str(own)}


@pytest.mark.parametrize("same", [True, False])
def test_a_shared_data_set_that_nobody_may_write_to_is_not_read_whole(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mark proves that a host sees it, but its manifest does; only else all of it is hashed, to travel."""
    tree = Tree("data", store(tmp_path, 100))
    monkeypatch.setattr(hosts, "mark", lambda folder: folder / "no-mark")

    class Server:
        supply = HostSupply()
        sent: ClassVar[list[str]] = []

        def ask(self, kind: str, fields: dict[str, Any]) -> Message:
            if kind == "shared":
                return Message("seen", {"missing": fields["marks"]}, {})
            folder = Path(fields["folder"]) if same else tmp_path
            return Message("same", {"same": same_files(folder, fields["kind"], fields["files"])}, {})

        def send(self, kind: str, _: dict[str, Any]) -> None:
            self.sent.append(kind)

    cluster: Any = SpreadCluster.__new__(SpreadCluster)
    cluster._supplies, cluster._files = Supplies((tree,)), FileService()
    server = Server()
    cluster._begin_supply(server)
    assert ("files" in tree.__dict__) == (not same)
    assert server.sent == ([] if same else ["supply"])
    assert server.supply.places == ({} if same else None)


def test_images_that_a_set_names(get: Get, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (4, 5, 3), dtype=np.uint8)).save(tmp_path / "pictures" / name)
    (tmp_path / "pictures" / "notes.txt").write_text("no image")
    prepared = prepare(Data(train="pictures", cache=str(tmp_path / "cache")), folder=tmp_path)
    assert prepared.train is not None
    trees = trees_of(Path(prepared.train))
    outline = trees[1].outline()
    assert outline is not None
    assert same_files(trees[1].folder, "images", outline["files"])
    assert not same_files(tmp_path, "images", outline["files"])
    places = get(*trees)
    expected = ColumnFiles(Path(prepared.train)).rows(np.arange(3))
    (tmp_path / "pictures").rename(tmp_path / "elsewhere")  # as another host sees it
    there = located({"prepared": prepared.record()}, places, [])["prepared"]
    found = ColumnFiles(Path(there["train"]), None, there["roots"]).rows(np.arange(3))
    for name in ("image", "label"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert not [*(tmp_path / "cache-there").rglob("notes.txt")]


def test_no_room(get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree("data", store(tmp_path, 100))
    need = sum(size for _, size, _ in tree.files)
    usage = shutil.disk_usage(tmp_path)._replace(free=supplying._SPARE_BYTES + need - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=f"need {need} bytes there, and {need - 1} are free") as caught:
        get(tree)
    assert caught.value.where == str(tmp_path / "cache-there")
    assert not (tmp_path / "cache-there" / "data").exists()


def test_a_disk_that_is_full_on_the_way(
    there: Owner, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others took the room meanwhile: what had come gives its room back."""
    tree = Tree("data", store(tmp_path))
    for sha256, content in Supplies((tree,)).offered():
        there.service.offer(sha256, content)
    usage = shutil.disk_usage(small_disk)._replace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"cannot be written: No space left on device"):
        Supplying(there.meeting, small_disk / "cache", True, lambda _: None).places([tree.record()])
    assert [path for path in small_disk.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("change", ["other", "short", "gone"])
def test_a_file_that_changes_on_the_way(change: str, get: Get, tmp_path: Path) -> None:
    tree = Tree("data", store(tmp_path, 100))
    names = [name for name, _, _ in tree.files if name != "manifest.json"]
    path = tree.folder / names[0]
    content = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(b"x" * len(content) if change == "other" else b"")
    with pytest.raises(RunFailed, match=r"has changed|become shorter|No such file"):
        get(tree)
    left = [path.name for path in (tmp_path / "cache-there" / "data").iterdir()]
    assert left == ([f"receiving-{tree.digest[:32]}"] if change == "gone" else [])


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_cut_off_goes_on(
    damaged: bool, there: Owner, get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try gets a few parts before the line is lost, and the tries together the data once; what is found damaged
    then comes anew."""
    monkeypatch.setattr(supplying, "PART_BYTES", 1 << 20)
    tree = Tree("data", store(tmp_path))
    need = sum(size for _, size, _ in tree.files)
    answer, left = FileService._part, [0]

    def cut(self: FileService, source: Path | bytes, fields: dict[str, Any]) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RunFailed("the line is cut")
        return answer(self, source, fields)

    monkeypatch.setattr(FileService, "_part", cut)
    kept = tmp_path / "cache-there" / "data" / f"receiving-{tree.digest[:32]}"
    had = [0]
    for _ in range(need >> 20):
        left[0] = 5  # the list of files is one of them
        try:
            places = get(tree)
        except RunFailed:
            had.append(sum(path.stat().st_size for path in kept.iterdir()))
            assert had[-1] > had[-2], "a try has begun anew"
            if damaged and len(had) == 3:
                largest = max(kept.iterdir(), key=lambda path: path.stat().st_size)
                largest.write_bytes(b"x" * largest.stat().st_size)
                left[0] = 1 << 30
                places = get(tree)
                break
        else:
            break
    assert len(had) == 3 or len(had) > 3 > damaged
    assert same_files(Path(places[str(tree.folder)]), "images", tree.files)  # each by its hash
    assert not kept.exists()


def test_one_at_a_time_goes_on_with_what_was_cut_off(there: Owner, get: Get, tmp_path: Path) -> None:
    """Another has a folder of its own meanwhile; and a folder at which somebody works is not taken for an old one."""
    tree = Tree("code", written(tmp_path / "mine", task="x = 1"))
    target = tmp_path / "cache-there" / "code" / tree.digest[:32]
    with supplying._receiving(target) as kept:
        (kept / "task.py").write_text("half")
        os.utime(kept, (0, 0))
        assert get(tree) == {str(tree.folder): str(target)}
        get(Tree("code", written(tmp_path / "second", task="x = 2")))
        assert (kept / "task.py").read_text() == "half"
    assert (target / "task.py").read_text() == "x = 1"
    get(Tree("code", written(tmp_path / "third", task="x = 3")))
    assert not kept.exists()


def test_a_file_outside_of_its_folder(there: Owner, get: Get, tmp_path: Path) -> None:
    code = written(tmp_path / "mine", task="")
    tree = Tree("code", code)
    tree.__dict__["files"] = [("../../../stray.py", 0, "")]
    with pytest.raises(RunFailed, match="outside of its folder"):
        get(tree)


def test_settings_on_a_host_that_has_them_elsewhere() -> None:
    settings: dict[str, Any] = {
        "folder": "/c/jobs",
        "job": {"task": "sub/task.py"},
        "prepared": {"train": "/c/data/a", "validation": None},
        "run": "/c/runs/1",
    }
    places = {"/c": "/h/other", "/c/jobs/sub": "/h/code/1", "/c/data/a": "/h/data/2"}
    found = located(settings, places, ["/c/runs/1"])
    assert found["job"] == {"task": "/h/code/1/task.py"}
    assert found["prepared"]["train"] == "/h/data/2"
    assert found["run"] == "/c/runs/1"
    assert found["apart"] == ["/c/runs/1"]
    assert located(settings, {}, []) == settings
    assert located({**settings, "job": {"task": "hf:../m"}}, {"/c/m": "/h/m"}, [])["job"] == {"task": "hf:/h/m"}
    told = {"error": {"what": "x", "where": "/h/code/1/task.py, line 3"}, "trace": 'File "/h/code/1/task.py"'}
    said = named_by_owner(told, found)
    assert said["error"]["where"] == "/c/jobs/sub/task.py, line 3"
    assert said["trace"] == 'File "/c/jobs/sub/task.py"'


def test_who_is_asked_again_after_a_failure() -> None:
    supply, sent = HostSupply(), list[dict[str, Any]]()
    supply.begin(Supplies(()), [], sent.append)
    assert (supply.places, sent) == ({}, [])
    supply.hear({"error": InputError("no room", where="x").record()})
    assert isinstance(supply.failed, InputError)
    supply.begin(Supplies(()), [], sent.append)
    assert supply.failed is None


def test_what_was_left_long_ago_is_removed(get: Get, tmp_path: Path) -> None:
    code = written(tmp_path / "mine", task="")
    old, new = (tmp_path / "cache-there" / "code" / f"receiving-{name}" for name in ("1-a", "2-b"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    get(Tree("code", code))
    assert (old.exists(), new.exists()) == (False, True)


def test_who_receives_is_killed_or_stands_still(there: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm server tells so, and the command waits no longer than something comes."""
    still = threading.Event()
    monkeypatch.setattr(FileService, "_content", lambda *_: still.wait(20) or b"")
    one, other = socket.socketpair()
    child = SupplyChild(there.meeting, [Tree("code", tmp_path).record()], tmp_path, True, Connection(one))
    os.kill(child._pid, signal.SIGKILL)
    told: list[dict[str, Any]] = []
    while not child.ended:
        assert select.select([child], [], [], 10)[0]
        told += child.told()
    os.waitpid(child._pid, 0)
    still.set()
    one.close()
    other.close()
    supply = HostSupply(bytes=17)
    server: Any = SimpleNamespace(host=Host("far", "10.0.0.2"), supply=supply)
    check = partial(SpreadCluster._check_supply, cast(Any, None), server)
    check()
    supply.moved -= 61
    with pytest.raises(ClusterLost, match=r"host far: no more of task and data came within 60 s, after 17 bytes"):
        check()
    for line in told:
        supply.hear(line)
    with pytest.raises(RunFailed, match=r"host far: the process that received task and data was killed"):
        check()
