"""Event files, read back by TensorBoard's own loader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from runs import write_run

from verbund.errors import InputError
from verbund.observe.tensorboard import Board, require, write_events


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    (path,) = folder.glob("events.out.tfevents.*")
    found: dict[str, list[tuple[int, float]]] = {}
    for event in loader.EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, float(value.tensor.float_val[0])))
    return found


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "tensorboard.summary.writer", "tensorboard.summary.writer.event_file_writer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="not installed") as caught:
        require()
    assert "verbund[tensorboard]" in str(caught.value)


def test_a_whole_run_from_its_journal(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_run(tmp_path, steps=20)
    for _ in range(2):  # written anew, not beside the former
        folder = write_events(tmp_path)
    found = scalars(folder)
    assert found["train/loss"] == [(step, pytest.approx(1 / (step + 1))) for step in range(20)]
    assert [step for step, _ in found["validation/accuracy"]] == [5, 10, 15, 20]
    assert "validation/confusion_matrix" not in found


def test_live(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = Board(tmp_path)
    metrics: dict[str, Any] = {"accuracy": 0.5, "matrix": [1], "flag": True}
    board.step(3, 0.25, samples_per_second=100.0)
    board.step(4, float("nan"))
    board.validation(4, metrics)
    board.close()
    assert scalars(board.folder) == {
        "train/loss": [(3, 0.25)],
        "train/samples_per_second": [(3, 100.0)],
        "validation/accuracy": [(4, 0.5)],
    }


def test_no_journal(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(InputError, match="no journal"):
        write_events(tmp_path)
