"""Files of a run's owner from another host: boxes as they lie there, what is written as it was sent, nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.saves import content, save
from cluster.owner import Owner, owner
from verbund import checkpoint
from verbund.checkpoint import Checkpoint, Piece, remote, write_part
from verbund.cluster.file_service import FileService
from verbund.comm.files import Line, Remote, new_file
from verbund.comm.wire import Secret
from verbund.errors import InputError, RunFailed, VerbundError
from verbund.observe import appended
from verbund.observe.events import Journal
from verbund.observe.journal import read as read_journals
from verbund.stage.predictions import PartWriter, merge, written_to


@pytest.fixture(scope="module")
def there() -> Iterator[Owner]:
    with owner() as one:
        yield one


@pytest.fixture
def run(there: Owner, tmp_path: Path) -> Iterator[Remote]:
    """A run's directory, as another host has it."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    there.service.open(tmp_path / "run")
    line = Line(there.meeting)
    yield Remote(line, str(tmp_path / "run"))
    line.close()


SHAPES = [(7,), (6, 5), (3, 4, 5), (), (2, 0, 3), (9, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]


def written(place: Remote, content: bytes, announced: bytes | None = None) -> None:
    """Writes a file, and announces its hash, or another one's."""
    with new_file(place) as file:
        file.write(memoryview(content))
        file.finish(hashlib.sha256(content if announced is None else announced).hexdigest())


@pytest.mark.parametrize("limit", [8 << 20, 64])
def test_any_box_of_what_another_host_has_written(
    limit: int, run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written over the wire, read here by the library; read over the wire, as it was: bit for bit."""
    monkeypatch.setattr(remote, "_BOX_BYTES", limit)
    random = torch.Generator().manual_seed(1)
    tensors = {
        f"t{number}": (torch.rand(shape, generator=random, dtype=torch.float64) * 200).to(dtype)
        for number, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    }
    pieces = [Piece.whole("parameters", name, values) for name, values in tensors.items()]
    here, step = tmp_path / "run" / "checkpoints", 5
    part = write_part(checkpoint.partial_folder(run / "checkpoints", step), 0, pieces)
    path = checkpoint.commit(here, step, [part], {"step": step})
    checkpoint.verify(path)
    with Checkpoint.open(path) as local, Checkpoint.open(run / "checkpoints" / path.name, verify=False) as far:
        assert far.state == {"step": step}
        for name, values in tensors.items():
            assert torch.equal(local.read("parameters", name), values)
            assert torch.equal(far.read("parameters", name), values)
            box = tuple((min(1, size), max(0, size - 2)) for size in values.shape)
            offset, length = [low for low, _ in box], [many for _, many in box]
            expected = values[tuple(slice(low, low + many) for low, many in box)]
            assert torch.equal(far.read("parameters", name, offset, length), expected)


def test_only_the_box_travels(there: Owner, run: Remote, tmp_path: Path) -> None:
    wide = torch.rand(1000, 1000)
    here = tmp_path / "run" / "checkpoints"
    part = write_part(checkpoint.partial_folder(here, 1), 0, [Piece.whole("parameters", "w", wide)])
    path = checkpoint.commit(here, 1, [part], {})
    with Checkpoint.open(run / "checkpoints" / path.name, verify=False) as far:
        before = there.service.bytes
        assert torch.equal(far.read("parameters", "w", [0, 250], [1000, 250]), wide[:, 250:500])
    assert there.service.bytes - before < 1_000_000 + 10_000  # a quarter, and the header


def test_saves_of_several_hosts_are_one(run: Remote, tmp_path: Path) -> None:
    """The save of a checkpoint whose parts come from here and from elsewhere."""
    here, tensors = tmp_path / "run" / "checkpoints", content(3)
    a, b = tensors["a.weight"], tensors["b"]
    parts = [
        write_part(
            checkpoint.partial_folder(run / "checkpoints", 3),
            0,
            [Piece("parameters", "a.weight", (6, 5), a.dtype, (0, 0), (4, 5), a[:4])],
        ),
        write_part(
            checkpoint.partial_folder(here, 3),
            1,
            [
                Piece("parameters", "a.weight", (6, 5), a.dtype, (4, 0), (2, 5), a[4:]),
                Piece.whole("parameters", "b", b),
            ],
        ),
    ]
    path = checkpoint.commit(here, 3, parts, {})
    with Checkpoint.open(run / "checkpoints" / path.name, verify=False) as far:
        for name, values in tensors.items():
            assert torch.equal(far.read("parameters", name), values)


def test_predictions_come_to_where_they_are_merged(run: Remote, tmp_path: Path) -> None:
    parts = [tmp_path / "run" / f".out.csv.part-{number}" for number in range(2)]
    for number, part in enumerate(parts):
        with written_to(Remote(run.line, str(part))) as path, PartWriter(path) as writer:
            writer.write({"sample": np.arange(3 * number, 3 * number + 3)})
    with written_to(Remote(run.line, str(parts[0].with_name(".out.csv.part-2")))):
        pass  # a worker without samples writes none
    merge([*parts, parts[0].with_name(".out.csv.part-2")], tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().split() == ['"sample"', *"012345"]


@pytest.mark.parametrize(
    "name",
    [
        "../outside/.step-00000001.partial/part-00000-0.safetensors",
        "job.toml",
        "checkpoints/latest",
        "checkpoints/step-00000001/part-00000-0.safetensors",
        "journal/../job.toml",
        "journal/a.jsonl/../../job.toml",
        "journal/worker-0-1.sh",
        "link/.step-00000001.partial/part-00000-0.safetensors",
        "journal/worker-7-1.jsonl",
    ],
)
def test_nothing_else_can_be_written(name: str, run: Remote, tmp_path: Path) -> None:
    (tmp_path / "outside" / ".step-00000001.partial").mkdir(parents=True)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "run" / "journal").mkdir()
    (tmp_path / "run" / "journal" / "worker-7-1.jsonl").symlink_to(tmp_path / "outside" / "told")
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(InputError, match="no file of the run that other hosts may use"):
        written(run / name, b"x")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_nothing_else_can_be_read(there: Owner, run: Remote, tmp_path: Path) -> None:
    path = save(tmp_path / "run" / "checkpoints", 1)
    (tmp_path / "run" / "job.toml").write_text("secret")
    (path / "leak").symlink_to("/etc/passwd")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text("{}")
    for name in ("job.toml", f"checkpoints/{path.name}/leak", "../step-1/manifest.json", f"checkpoints/{path.name}"):
        with pytest.raises(VerbundError, match=r"may use so|cannot be"):
            (run / name).read(10)
    for sha256 in ("0" * 64, "", "../../etc/passwd"):
        with pytest.raises(InputError, match="no file of this hash is offered"):
            run.line.ask("get", sha256=sha256, offset=0, count=1)
    manifest = str(Path(str(run)) / "checkpoints" / path.name / "manifest.json")
    for wrong in ({"offset": [0], "length": [1 << 40]}, {"offset": [-1], "length": [1]}, {"itemsize": 0}, {"at": "0"}):
        fields = {"at": 0, "shape": [4], "itemsize": 1, "offset": [0], "length": [4], **wrong}
        with pytest.raises(InputError, match="is no request for a file"):
            run.line.ask("box", path=manifest, **fields)
    with pytest.raises(InputError, match="is no request for a file"):
        run.line.ask("remove", path=str(run / "job.toml"))
    stranger = Line(replace(there.meeting, secret=Secret.create()))
    with pytest.raises(RunFailed, match="cannot be reached"):
        stranger.ask("size", path=str(run / "job.toml"))
    stranger.close()


def test_what_came_wrong_does_not_stay(run: Remote, tmp_path: Path) -> None:
    target = run / "checkpoints" / ".step-00000001.partial" / "part-00000-0.safetensors"
    with pytest.raises(RunFailed, match="what came is not what was sent"):
        written(target, b"x" * 3_000_000, b"y")
    assert not Path(str(target)).exists()


def test_sizes_that_lie_cost_the_owner_nothing(run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole of terabytes is not read to find that it is not what was announced; a box beyond all numbers is none."""
    target = run / "checkpoints" / ".step-00000001.partial" / "part-00000-0.safetensors"
    part = np.ones(4, np.uint8)
    run.line.result(run.line.start("put", None, part, path=str(target), offset=1 << 33, new=True))
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("it was read"))
        with pytest.raises(RunFailed, match="what came is not what was sent"):
            run.line.ask("finish", path=str(target), bytes=4, sha256="0" * 64)
    assert not Path(str(target)).exists()
    whole = tmp_path / "run" / "step-00000001"
    whole.mkdir()
    (whole / "part.safetensors").write_bytes(b"x" * 64)
    shape = [1 << 32, 1 << 32]
    with pytest.raises(InputError, match=f"a box of {1 << 64} bytes is over the limit"):
        run.line.ask(
            "box",
            path=str(run / "step-00000001" / "part.safetensors"),
            at=0,
            itemsize=1,
            shape=shape,
            offset=[0, 0],
            length=shape,
        )


def test_a_run_that_is_gone_is_not_made_anew(run: Remote, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").rmdir()
    (tmp_path / "run").rmdir()
    folder = checkpoint.partial_folder(run / "checkpoints", 1)
    with pytest.raises(VerbundError, match=r"cannot be written"):
        write_part(folder, 0, [Piece.whole("parameters", "b", torch.ones(3))])
    assert not (tmp_path / "run").exists()


def test_a_full_disk_at_the_owner(there: Owner, small_disk: Path) -> None:
    (small_disk / "checkpoints").mkdir()
    there.service.open(small_disk)
    line = Line(there.meeting)
    try:
        folder = checkpoint.partial_folder(Remote(line, str(small_disk)) / "checkpoints", 1)
        with pytest.raises(RunFailed, match="the disk is full"):
            write_part(folder, 0, [Piece.whole("parameters", "b", torch.ones(1_000_000))])
    finally:
        line.close()


def test_a_journal_is_the_same_wherever_it_is_written(run: Remote, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for folder in (run / "journal", tmp_path / "here"):
        journal = Journal(folder, "worker", 0, 1)
        for step in range(300):
            journal.step(step, 1.0 / (step + 1), 2.0, 3, 0.1)
            journal.add("compute", step, step, step + 1)
            if step % 50 == 0:
                journal.flush()
        journal.event("note", text="é")
        journal.close()
    one, other = (read_journals(folder)[0] for folder in (tmp_path / "run" / "journal", tmp_path / "here"))
    assert one.ended
    assert np.array_equal(one.steps, other.steps)
    assert np.array_equal(one.spans, other.spans)
    assert [event["text"] for event in one.events] == ["é"]


def test_a_journal_goes_on_while_nobody_takes_it(run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is dropped and counted; the rest comes when the owner takes something again."""

    def refuse(self: FileService, path: Path, fields: dict[str, Any], part: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(appended, "_PENDING_BYTES", 20_000)
    journal = Journal(run / "journal", "worker", 0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(FileService, "_put", refuse)
        for number in range(40):
            journal.event("note", text="x" * 1000, number=number)
    journal.event("note", text="last", number=-1)
    journal.close()
    path = tmp_path / "run" / "journal" / "worker-0-1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["t"] == "head"
    numbers = [line["number"] for line in lines if line.get("name") == "note"]
    assert numbers == [*range(len(numbers))] or numbers == [*range(len(numbers) - 1), -1]
    assert 0 < len(numbers) < 41
