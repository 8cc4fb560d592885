"""Predictions: with the names of classes and files, in any format, from a run alone."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import MLP, MakeJob
from verbund.cluster.local import LocalCluster
from verbund.data.prepare import prepare
from verbund.errors import DataError, InputError
from verbund.job import Data
from verbund.run import Run
from verbund.stage import launch
from verbund.stage.predictions import PartWriter, check_target

RunJob = Callable[..., Run]
WORDS = ["ape", "bee", "cat"]
TASK = "from torch import nn\ndef model():\n    return nn.Linear(2, 3)\n"
IMAGES = "from torch import nn\ndef model():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 5, 3))\n"


def table(path: Path, words: list[str], rows: int = 60, target: bool = True) -> Path:
    random = np.random.default_rng(2)
    lines = ["id,a,b" + (",kind" if target else "")]
    for row in range(rows):
        values = [f"s{row}", *(f"{value:.3f}" for value in random.normal(size=2))]
        lines.append(",".join([*values, words[row % len(words)]] if target else values))
    path.write_text("\n".join(lines) + "\n")
    return path


def images(folder: Path, classes: list[str], count: int = 12, size: tuple[int, int] = (5, 4)) -> Path:
    """Without classes all lie in the folder itself."""
    pillow = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(3)
    for number in range(count):
        place = folder / classes[number % len(classes)] if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        pillow.fromarray(pixels).save(place / f"{number:02}.png")
    return folder


@pytest.fixture
def trained(shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path) -> Run:
    """A run on texts as classes, whose training file is gone."""
    table(tmp_path / "train.csv", WORDS)
    changes = {
        "data.train": "train.csv",
        "data.validation": str(table(tmp_path / "held.csv", WORDS)),
        "data.input": ["a", "b"],
        "data.target": "kind",
    }
    run = launch.train(make_job(TASK, changes), tmp_path / "run")
    (tmp_path / "train.csv").unlink()
    return run


@pytest.fixture
def trained_on_images(shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path) -> Run:
    """A run on a folder of images, which is gone."""
    folder = images(tmp_path / "train", WORDS)
    changes = {"data.train": "train", "data.input": "image", "data.target": "label", "data.scale": {"image": 255.0}}
    run = launch.train(make_job(IMAGES, changes), tmp_path / "run")
    shutil.rmtree(folder)
    return run


def test_class_names_without_the_training_data(trained: Run, tmp_path: Path) -> None:
    new = table(tmp_path / "new.csv", [], 7, target=False)
    path = launch.predict(trained.path, str(new), workers=2)
    found = pq.read_table(path).to_pydict()
    assert list(found) == ["sample", "prediction", "class", "probability"]
    assert found["class"] == [WORDS[k] for k in found["prediction"]]
    assert found["sample"] == list(range(7))


def test_other_formats(trained: Run, tmp_path: Path) -> None:
    new = str(table(tmp_path / "new.csv", [], 7, target=False))
    expected = pq.read_table(launch.predict(trained.path, new)).to_pylist()
    lines = launch.predict(trained.path, new, tmp_path / "p.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected
    with open(launch.predict(trained.path, new, tmp_path / "p.csv"), newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["class"] for row in rows] == [row["class"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose([float(row[f"probability_{k}"]) for k in range(3)], other["probability"], rtol=1e-6)


def test_validation_by_name_without_the_training_data(trained: Run, tmp_path: Path) -> None:
    held = launch.validate(trained.path)
    assert held["metrics"]["loss"] == trained.summary["metrics"]["loss"]["last"]
    # The same rows, but for a class that is not there: by its own order `bee` and `cat` would be 0 and 1.
    rows = (tmp_path / "held.csv").read_text().splitlines()
    (tmp_path / "some.csv").write_text(
        "\n".join([rows[0], *(row for row in rows[1:] if not row.endswith("ape"))]) + "\n"
    )
    some = launch.validate(trained.path, data=str(tmp_path / "some.csv"))
    found = pq.read_table(launch.predict(trained.path, str(tmp_path / "held.csv"))).to_pydict()
    right = [found["class"][k] == WORDS[k % 3] for k in range(60) if k % 3]
    assert some["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    table(tmp_path / "strange.csv", ["bee", "dog"])
    with pytest.raises(InputError, match=r"strange.csv, row 1: `kind` has a text that the training set does not have"):
        launch.validate(trained.path, data=str(tmp_path / "strange.csv"))


def test_a_converted_set_with_other_classes(trained: Run, tmp_path: Path) -> None:
    name = str(table(tmp_path / "other.csv", ["bee", "cat"]))
    data = Data(train=name, cache=str(tmp_path / "cache"))
    place = prepare(data, folder=tmp_path).train
    assert place is not None
    with pytest.raises(InputError, match=r"column `kind` has other texts than in the training set"):
        launch.validate(trained.path, data=place)


def test_images_by_class_and_without(trained_on_images: Run, tmp_path: Path) -> None:
    by_class = images(tmp_path / "by", ["eel", "fox"])
    path = launch.predict(trained_on_images.path, str(by_class), workers=2)
    found = pq.read_table(path).to_pydict()
    assert list(found) == ["sample", "file", "prediction", "class", "probability"]
    assert found["file"] == sorted(f"{'eel' if k % 2 == 0 else 'fox'}/{k:02}.png" for k in range(12))
    flat = images(tmp_path / "flat", [])
    found = pq.read_table(launch.predict(trained_on_images.path, str(flat))).to_pydict()
    assert found["file"] == [f"{k:02}.png" for k in range(12)]
    assert found["class"] == [WORDS[k] for k in found["prediction"]]
    one = pq.read_table(launch.predict(trained_on_images.path, str(flat / "03.png"))).to_pydict()
    assert (one["file"], one["class"]) == (["03.png"], [found["class"][3]])


def test_validation_on_some_of_the_classes(trained_on_images: Run, tmp_path: Path) -> None:
    some = images(tmp_path / "some", ["bee", "cat"])
    result = launch.validate(trained_on_images.path, data=str(some))
    found = pq.read_table(launch.predict(trained_on_images.path, str(some))).to_pydict()
    right = [name == file.split("/")[0] for name, file in zip(found["class"], found["file"], strict=True)]
    assert result["metrics"]["accuracy"] == pytest.approx(np.mean(right))


def test_images_of_another_size(trained_on_images: Run, tmp_path: Path) -> None:
    images(tmp_path / "large", [], 2, size=(6, 4))
    with pytest.raises(InputError, match=r"00.png: is 4 × 6 pixels, those of the training set are 4 × 5") as caught:
        launch.predict(trained_on_images.path, str(tmp_path / "large"))
    assert "data.image_size" in str(caught.value)


def test_files_that_are_no_images_are_told(
    shared_cluster: LocalCluster, make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = images(tmp_path / "train", WORDS)
    (folder / "cat" / "notes.doc").write_text("no image")
    (folder / "cat" / ".hidden").write_text("")
    job = make_job(IMAGES, {"data.train": "train", "data.input": "image", "data.target": "label"})
    (note,) = (note for note in launch.check(job).notes if "left out" in note)
    assert "cat/notes.doc is left out" in note
    images(folder, [], 2)
    (note,) = (note for note in launch.check(job).notes if "left out" in note)
    assert "3 files, 00.png the first" in note
    run = launch.train(job, tmp_path / "run")
    launch.predict(run.path, str(folder), quiet=False)
    assert "cat/notes.doc is left out" in capsys.readouterr().err


def test_a_job_with_a_dataset(run_job: RunJob, tmp_path: Path) -> None:
    task = (
        MLP
        + """
import torch
def dataset():
    return torch.utils.data.TensorDataset(torch.randn(50, 12), torch.randint(0, 5, (50,)))
"""
    )
    run = run_job(task, {"data.train": None, "data.input": None, "data.target": None})
    random = np.random.default_rng(4)
    columns: dict[str, Any] = {"input": random.normal(size=(9, 12)).astype(np.float32), "target": np.arange(9) % 5}
    np.savez(tmp_path / "new.npz", **columns)
    found = pq.read_table(launch.predict(run.path, str(tmp_path / "new.npz"))).to_pydict()
    assert len(found["prediction"]) == 9
    accuracy = launch.validate(run.path, data=str(tmp_path / "new.npz"))["metrics"]["accuracy"]
    assert accuracy == pytest.approx(np.mean(np.array(found["prediction"]) == columns["target"]))
    np.savez(tmp_path / "other.npz", x=columns["input"])
    with pytest.raises(InputError, match="DATA has no column `input`"):
        launch.predict(run.path, str(tmp_path / "other.npz"))
    with pytest.raises(InputError, match="no validation data"):
        launch.validate(run.path)


def test_resuming_with_other_classes_keeps_their_numbers(trained: Run, tmp_path: Path) -> None:
    table(tmp_path / "train.csv", ["bee", "cat"])
    run = launch.resume(trained.path, {"train.steps": 7})
    notes = "".join(path.read_text() for path in run.journal.iterdir() if path.is_file())
    assert "train.csv has changed since the run began" in notes
    table(tmp_path / "train.csv", ["bee", "dog"])
    with pytest.raises(InputError, match="has a text that the training set does not have"):
        launch.resume(trained.path, {"train.steps": 9})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("nothing.csv", ["DATA:", "no such file", "nothing.csv"]),
        ("", ["DATA:", "names no source"]),
        ("sklearn:digitz", ["DATA:", "digits"]),
    ],
)
def test_errors_speak_of_what_was_typed(data: str, words: list[str], trained: Run) -> None:
    with pytest.raises(InputError) as caught:
        launch.predict(trained.path, data)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(InputError, match="--data:"):
        launch.validate(trained.path, data=data)


@pytest.mark.parametrize(
    ("name", "words"),
    [(".", "is a folder"), ("p.txt", "`.txt`"), ("p", "no ending"), ("none/p.csv", "no such folder")],
)
def test_files_that_predictions_cannot_become(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as caught:
        check_target(tmp_path / name)
    assert caught.value.exit_status == 2
    assert "--out" in str(caught.value)


def test_csv_has_no_place_for_lists_of_lists(run_job: RunJob, tmp_path: Path) -> None:
    task = "from torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(12, 12), nn.Unflatten(1, (3, 4)))\n"
    task += "def loss(output, targets):\n    return output.square().mean((1, 2))\n"
    run = run_job(task, {"train.objective": None, "validate.metrics": []})
    np.savez(tmp_path / "new.npz", x=np.zeros((4, 12), np.float32))
    with pytest.raises(InputError, match=r"CSV has no place for `output`"):
        launch.predict(run.path, str(tmp_path / "new.npz"), tmp_path / "p.csv")
    path = launch.predict(run.path, str(tmp_path / "new.npz"), tmp_path / "p.jsonl")
    assert np.array(json.loads(path.read_text().splitlines()[0])["output"]).shape == (3, 4)
    assert sorted(file.name for file in tmp_path.glob("*p.*")) == ["p.jsonl"]


def test_a_full_disk(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.symlink_to("/dev/full")  # what removes the part must not find the device itself
    with pytest.raises(DataError, match=r"predictions cannot be written: .*No space left"), PartWriter(part) as writer:
        writer.write({"sample": np.arange(3)})
