"""Sparse pieces: some rows of a box are stored, and any box of the tensor is read as if all were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint.test_store import forge
from verbund.checkpoint import Checkpoint, Piece, commit, partial_folder, write_part
from verbund.checkpoint.manifest import MANIFEST
from verbund.checkpoint.sparse import Filler
from verbund.errors import CheckpointError
from verbund.randomness.rows import born

SHAPE = 40, 3, 2
BORN = Filler(born=(7, 0.5))


def piece(
    low: int, high: int, rows: list[int], filler: Filler, name: str = "t", dtype: torch.dtype = torch.float32
) -> Piece:
    values = torch.arange(len(rows) * 6.0).view(-1, 3, 2).to(dtype) + 100 * low
    where = SHAPE, dtype, (low, 0, 0), (high - low, 3, 2)
    return Piece("parameters", name, *where, values, rows=torch.tensor(rows, dtype=torch.int64), filler=filler)


def expected(pieces: list[Piece]) -> Tensor:
    """The whole tensor, element by element of its definition."""
    found = torch.empty(SHAPE, dtype=pieces[0].dtype)
    for one in pieces:
        low, high = one.offset[0], one.offset[0] + one.length[0]
        if one.rows is None:
            found[low:high] = one.values
            continue
        for row in range(low, high):
            if one.filler.born is not None:
                found[row] = (
                    born(one.filler.born[0], torch.tensor([row]), 6, one.filler.born[1]).view(3, 2).to(one.dtype)
                )
            else:
                found[row] = one.filler.value
        for row, values in zip(one.rows.tolist(), one.values, strict=True):
            found[row] = values
    return found


def saved(folder: Path, pieces: list[Piece]) -> Path:
    return commit(folder, 3, [write_part(partial_folder(folder, 3), 0, pieces)], {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filler", [BORN, Filler(0.1), Filler()])
def test_any_box_is_read_as_if_all_rows_were_stored(filler: Filler, dtype: torch.dtype, tmp_path: Path) -> None:
    dense = Piece("parameters", "t", SHAPE, dtype, (25, 0, 0), (5, 3, 2), torch.ones(5, 3, 2, dtype=dtype))
    pieces = [
        piece(0, 25, [0, 3, 4, 24], filler, dtype=dtype),
        dense,
        piece(30, 36, [], filler, dtype=dtype),
        piece(36, 40, [36, 37, 38, 39], filler, dtype=dtype),
    ]
    whole = expected(pieces)
    with Checkpoint.open(saved(tmp_path, pieces)) as checkpoint:
        assert torch.equal(checkpoint.read("parameters", "t"), whole)
        for low, high in [(0, 1), (1, 3), (2, 30), (24, 38), (31, 35), (38, 40)]:
            box = checkpoint.read("parameters", "t", (low, 1, 0), (high - low, 2, 1))
            assert torch.equal(box, whole[low:high, 1:3, 0:1])
        for rows in ([], [0], [1, 2], [4, 5, 23, 26, 31, 39], list(range(40))):
            wanted = torch.tensor(rows, dtype=torch.int64)
            assert torch.equal(checkpoint.gather("parameters", "t", wanted), whole[wanted])
        with pytest.raises(CheckpointError, match="has shape"):
            checkpoint.gather("parameters", "t", torch.tensor([3, 40]))
        for low, high, rows in [(0, 25, [0, 3, 4, 24]), (3, 20, [3, 4]), (30, 36, []), (34, 38, [36, 37])]:
            found = checkpoint.stored_rows("parameters", "t", low, high, filler)
            assert found is not None
            assert found.tolist() == rows
        assert checkpoint.stored_rows("parameters", "t", 20, 27, filler) is None
        assert checkpoint.stored_rows("parameters", "t", 0, 5, Filler(5.0)) is None


def test_a_checkpoint_without_them_is_of_the_first_version(tmp_path: Path) -> None:
    for number, (one, version) in enumerate(
        [(piece(0, 40, [1], BORN), 2), (Piece.whole("parameters", "t", torch.ones(2)), 1)]
    ):
        path = saved(tmp_path / str(number), [one])
        assert json.loads((path / MANIFEST).read_bytes())["version"] == version


def test_what_is_no_sparse_piece() -> None:
    rows = torch.tensor([1])
    with pytest.raises(ValueError, match="does not have whole rows"):
        Piece("parameters", "t", (4, 4), torch.float32, (0, 0), (4, 2), torch.ones(1, 2), rows=rows)
    with pytest.raises(
        ValueError, match=r"is said to be torch.float32 \[1, 4\], its values are torch.float32 \[4, 4\]"
    ):
        Piece("parameters", "t", (4, 4), torch.float32, (0, 0), (4, 4), torch.ones(4, 4), rows=rows)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"count": 41}, "rows without key or count"),
        ({"count": -1}, "rows without key or count"),
        ({"count": 40}, "places"),
        ({"key": 5}, "rows without key or count"),
        ({"born": [7]}, "rows that are born of no seed and scale"),
        ({"born": [7, float("nan")]}, "out of range"),
        ({"born": None}, "do not say what the others hold"),
    ],
)
def test_a_forged_manifest_is_refused(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = saved(tmp_path, [piece(0, 40, [1, 2], BORN)])
    raw = json.loads((path / MANIFEST).read_bytes())
    raw["tensors"][0]["boxes"][0]["rows"] |= change
    forge(path, raw)
    with pytest.raises(CheckpointError, match=text):
        Checkpoint.open(path, verify=False)


@pytest.mark.parametrize("rows", [[2, 1], [1, 1], [1, 40], [-1, 3]])
def test_numbers_of_rows_that_cannot_be_are_said(rows: list[int], tmp_path: Path) -> None:
    path = saved(tmp_path, [piece(0, 40, rows, BORN)])
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match="not have the numbers of rows"):
        checkpoint.read("parameters", "t")
