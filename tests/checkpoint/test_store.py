"""The folder of checkpoints: which is newest, what is pruned, what damage is found."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saves import check, save

from verbund import checkpoint
from verbund.checkpoint import Checkpoint, Manifest, newest_valid, prune
from verbund.checkpoint.manifest import MANIFEST, MANIFEST_HASH, hash_line
from verbund.errors import CheckpointError


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_a_save_leaves_nothing_but_itself(tmp_path: Path) -> None:
    path = save(tmp_path, 7, {"loss": 0.5})
    assert names(tmp_path) == ["latest", "step-00000007"]
    assert names(path) == [
        MANIFEST,
        MANIFEST_HASH,
        "part-00000-0.safetensors",
        "part-00001-0.safetensors",
    ]
    assert Manifest.open(path).state == {"step": 7, "loss": 0.5}
    assert newest_valid(tmp_path) == (path, [])
    assert check(path) == 7


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_agrees(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    subprocess.run(["sha256sum", "-c", MANIFEST_HASH], cwd=path, check=True, capture_output=True)
    lines = [f"{file.sha256}  {name}" for name, file in Manifest.open(path).files.items()]
    subprocess.run(["sha256sum", "-c"], input="\n".join(lines).encode(), cwd=path, check=True, capture_output=True)


def test_the_pointer_says_which_is_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    # Resumed from 10, and 20 is saved again: 30 is of a line that was given up.
    path = save(tmp_path, 20)
    assert path.name == "step-00000020.1"
    assert [p.name for p in checkpoint.generations(tmp_path)] == [
        "step-00000020.1",
        "step-00000020",
        "step-00000010",
        "step-00000030",
    ]
    assert newest_valid(tmp_path) == (path, [])
    assert checkpoint.folder(tmp_path, 20) == path
    assert checkpoint.folder(tmp_path, 30).name == "step-00000030"
    with pytest.raises(CheckpointError, match="steps 10, 20, 30"):
        checkpoint.folder(tmp_path, 25)
    assert [p.name for p in prune(tmp_path, 2)] == ["step-00000010", "step-00000030"]


def test_leftovers_are_not_read_and_go_at_the_next_save(tmp_path: Path) -> None:
    for step in (10, 30):
        checkpoint.partial_folder(tmp_path, step).joinpath("part-00000-0.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        newest_valid(tmp_path)
    (tmp_path / ".step-00000020.partial").mkdir()
    (tmp_path / ".step-00000020.partial" / "part-00009-0.safetensors").write_bytes(b"of a crashed save of 10 workers")
    path = save(tmp_path, 20)
    assert "part-00009-0.safetensors" not in names(path)
    assert names(tmp_path) == [".step-00000030.partial", "latest", "step-00000020"]  # 30 may be going on
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == ["latest", "step-00000020"]
    checkpoint.partial_folder(tmp_path, 40)
    checkpoint.discard(tmp_path, 40)
    checkpoint.discard(tmp_path, 40)
    assert names(tmp_path) == ["latest", "step-00000020"]


@pytest.mark.parametrize(
    ("keep", "best", "budget", "stay"),
    [
        (2, None, None, [40, 50]),
        (1, 20, None, [20, 50]),
        (2, 50, None, [40, 50]),
        (2, 60, None, [40, 50]),
        (9, None, 2.5, [40, 50]),
        (9, 10, 2.5, [10, 50]),
        (9, 10, 3.5, [10, 40, 50]),
        (9, None, 0.0, [50]),
        (9, 20, 0.0, [20, 50]),
        (0, None, None, [50]),
    ],
)
def test_prune(tmp_path: Path, keep: int, best: int | None, budget: float | None, stay: list[int]) -> None:
    """The budget is given in checkpoints, which are all of one size here."""
    for step in (10, 20, 30, 40, 50):
        path = save(tmp_path, step)
    size = sum(file.stat().st_size for file in path.iterdir())
    removed = prune(tmp_path, keep, best, None if budget is None else budget * size)
    assert names(tmp_path) == ["latest", *(f"step-{step:08d}" for step in stay)]
    assert {int(p.name[5:]) for p in removed} == {10, 20, 30, 40, 50} - set(stay)
    for step in stay:
        assert check(checkpoint.folder(tmp_path, step)) == step


def test_what_is_being_read_stays_until_it_is_read(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    old = checkpoint.folder(tmp_path, 10)
    with checkpoint.store.held(old) as there, checkpoint.store.held(old) as twice:
        assert there
        assert twice
        assert prune(tmp_path, 1) == []
        assert check(old) == 10
    assert prune(tmp_path, 1) == [old]
    with checkpoint.store.held(old) as there:
        assert not there


def test_nothing_is_pruned_without_a_pointer(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    for text in ("", "step-00000030\n", "../step-00000010\n", "\xff"):
        (tmp_path / "latest").write_text(text, encoding="latin-1")
        assert prune(tmp_path, 1) == []
        path, warnings = newest_valid(tmp_path)
        assert path.name == "step-00000020"
        assert len(warnings) == 1
        assert "latest" in warnings[0]


def damage_shard(path: Path) -> str:
    shard = path / "part-00001-0.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 4
    shard.write_bytes(raw)
    return shard.name


def lose_shard(path: Path) -> str:
    (path / "part-00000-0.safetensors").unlink()
    return "part-00000-0.safetensors"


def cut_shard(path: Path) -> str:
    os.truncate(path / "part-00000-0.safetensors", 50)
    return "part-00000-0.safetensors"


def link_shard(path: Path) -> str:
    shard = path / "part-00000-0.safetensors"
    shard.rename(path / "elsewhere")
    shard.symlink_to("elsewhere")
    return shard.name


def break_manifest(path: Path) -> str:
    (path / MANIFEST).write_bytes(b"{")
    (path / MANIFEST_HASH).write_bytes(hash_line(b"{"))
    return MANIFEST


def lose_manifest(path: Path) -> str:
    (path / MANIFEST).unlink()
    return MANIFEST


def lose_hash(path: Path) -> str:
    (path / MANIFEST_HASH).unlink()
    return MANIFEST_HASH


DAMAGES = [damage_shard, lose_shard, cut_shard, link_shard, break_manifest, lose_manifest, lose_hash]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_former_one_taken(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    file = damage(newer)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(newer)
    assert file in str(caught.value)
    path, warnings = newest_valid(tmp_path)
    assert path == older
    assert len(warnings) == 1
    assert file in warnings[0]
    damage(older)
    with pytest.raises(CheckpointError) as caught:
        newest_valid(tmp_path)
    assert str(older) in str(caught.value)
    assert str(newer) in str(caught.value)


def test_a_link_of_the_right_size_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    shard = path / "part-00000-0.safetensors"
    shard.rename(path / ("x" * 200))
    shard.symlink_to("x" * 200)
    raw = json.loads((path / MANIFEST).read_bytes())
    raw["files"][shard.name]["bytes"] = 200  # what lstat says of the link
    forge(path, raw)
    with pytest.raises(CheckpointError, match="not a regular file"):
        Manifest.open(path, verify=False)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 10)

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def flip(data: st.DataObject) -> None:
        file = path / data.draw(st.sampled_from(names(path)))
        raw = file.read_bytes()
        at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
        try:
            with pytest.raises(CheckpointError, match=r"part-|manifest"):
                Checkpoint.open(path)
            # Without the hashes a damaged shard gives other values or an error of ours, never a crash.
            if file.suffix == ".safetensors":
                unverified = Checkpoint.open(path, verify=False)
                try:
                    for name in unverified.names("parameters"):
                        assert unverified.read("parameters", name).shape == unverified.shape("parameters", name)
                except CheckpointError as error:
                    named = file.name in str(error)
                else:
                    named = True
                assert named
        finally:
            file.write_bytes(raw)

    flip()
    assert check(path) == 10


def forge(path: Path, raw: Any) -> None:
    content = json.dumps(raw).encode()
    (path / MANIFEST).write_bytes(content)
    (path / MANIFEST_HASH).write_bytes(hash_line(content))


def _set(*keys: Any) -> Callable[[Any], None]:
    """`_set("a", 0, VALUE)` sets `raw["a"][0] = VALUE`."""

    def change(raw: Any) -> None:
        for key in keys[:-2]:
            raw = raw[key]
        raw[keys[-2]] = keys[-1]

    return change


def _rename(name: str) -> Callable[[Any], None]:
    def change(raw: Any) -> None:
        raw["files"][name] = raw["files"].pop("part-00000-0.safetensors")
        raw["tensors"][0]["boxes"][0]["file"] = name

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_rename("../part-00000-0.safetensors"), "no name of a shard"),
        (_rename("/etc/passwd"), "no name of a shard"),
        (_rename("part-00000-0.safetensors\n"), "no name of a shard"),
        (_set("format", "other"), "not the manifest"),
        (_set("version", 3), "version 3"),
        (_set("step", -1), "step"),
        (_set("step", True), "step"),
        (_set("files", []), "lacks"),
        (_set("files", "part-00000-0.safetensors", "sha256", "0" * 63), "sha256"),
        (_set("files", "part-00000-0.safetensors", "bytes", 1.5), "size"),
        (_set("files", "part-00000-0.safetensors", "bytes", 3), "places"),
        (_set("tensors", 0, "kind", "code"), "kind"),
        (_set("tensors", 0, "name", ""), "name"),
        (_set("tensors", 0, "dtype", "object"), "dtype"),
        (_set("tensors", 0, "shape", [60, 5]), "only 30"),
        (_set("tensors", 0, "shape", [-6, 5]), "list of sizes"),
        (_set("tensors", 0, "shape", [1 << 47, 1 << 47]), "too large"),
        (_set("tensors", 0, "shape", [1] * 65), "list of sizes"),
        (_set("tensors", 0, "boxes", 0, "offset", [1, 0]), "twice"),
        (_set("tensors", 0, "boxes", 0, "length", [7, 5]), "outside"),
        (_set("tensors", 0, "boxes", 0, "length", [4]), "outside"),
        (_set("tensors", 0, "boxes", []), "nobody"),
        (_set("tensors", 0, "boxes", 0, "file", "part-00007-0.safetensors"), "does not list"),
        (_set("tensors", 0, "boxes", 0, 5), "not an object"),
        (_set("tensors", 1, "name", "a.weight"), "twice"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, change: Callable[[Any], None], text: str) -> None:
    path = save(tmp_path, 10)
    raw = json.loads((path / MANIFEST).read_bytes())
    change(raw)
    forge(path, raw)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        Manifest.open(path)


def test_a_forged_place_in_a_file_is_refused(tmp_path: Path) -> None:
    """The hashes are right, but the file holds something else under the key."""
    path = save(tmp_path, 10)
    for change in (_set("shape", [30]), _set("dtype", "int32")):
        raw = json.loads((path / MANIFEST).read_bytes())
        tensor = raw["tensors"][0]
        tensor["boxes"] = [{**tensor["boxes"][0], "offset": [0, 0], "length": [6, 5]}]
        raw["files"]["part-00000-0.safetensors"]["bytes"] = 1000
        os.truncate(path / "part-00000-0.safetensors", 1000)
        change(tensor)
        if tensor["shape"] == [30]:
            tensor["boxes"][0] |= {"offset": [0], "length": [30]}
        forge(path, raw)
        with pytest.raises(CheckpointError, match="part-00000-0"):
            Checkpoint.open(path, verify=False).read("parameters", "a.weight")
        shutil.rmtree(path)
        path = save(tmp_path, 10)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_any_change_of_a_manifest_opens_or_is_an_error_of_ours(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    whole = json.loads((path / MANIFEST).read_bytes())

    def places(value: Any) -> list[tuple[Any, Any]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
        return [place for key, inner in items for place in ((value, key), *places(inner))]

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        raw = copy.deepcopy(whole)
        holder, key = data.draw(st.sampled_from(places(raw)))
        holder[key] = data.draw(JUNK)
        forge(path, raw)
        try:
            with Checkpoint.open(path) as opened:
                for kind, name in opened.manifest.tensors:
                    opened.read(kind, name)
        except CheckpointError:
            return
        assert isinstance(Manifest.open(path).step, int)

    change()
    for junk in (b"", b"null", b"[]", b"\xff\xfe", b"[" * 100_000):
        (path / MANIFEST).write_bytes(junk)
        (path / MANIFEST_HASH).write_bytes(hash_line(junk))
        with pytest.raises(CheckpointError):
            Manifest.open(path)


def test_an_enormous_manifest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 10)
    monkeypatch.setattr("verbund.checkpoint.manifest.MANIFEST_LIMIT", 100)
    with pytest.raises(CheckpointError, match="larger than the limit"):
        Manifest.open(path)
    with pytest.raises(CheckpointError, match="over the limit"):
        save(tmp_path, 20)
    assert checkpoint.latest(tmp_path) == path


def test_the_supervising_side_needs_no_torch() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        checkpoints = Path(temporary)
        folder = checkpoint.partial_folder(checkpoints, 5)
        record = checkpoint.write_part(folder, 0, [checkpoint.Piece.whole("parameters", "w", torch.ones(3))])
        code = (
            "import sys, json; sys.modules['torch'] = None\n"
            "from pathlib import Path\n"
            "from verbund import checkpoint, run\n"
            "folder = Path(sys.argv[1])\n"
            "path = checkpoint.commit(folder, 5, [json.loads(sys.argv[2])], {'x': 1})\n"
            "assert checkpoint.newest_valid(folder) == (path, [])\n"
            "checkpoint.verify(checkpoint.folder(folder, 5)); checkpoint.prune(folder, 1)\n"
            "assert checkpoint.Manifest.open(path).names('parameters') == ['w']\n"
        )
        subprocess.run([sys.executable, "-c", code, temporary, json.dumps(record)], check=True, timeout=60)
