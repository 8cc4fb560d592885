"""What is said of columns before anything runs, and of a validation set that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbund.data.check import Wanted, check_columns
from verbund.data.manifest import Manifest
from verbund.data.prepare import prepare
from verbund.data.samples import ColumnFiles
from verbund.errors import DataError
from verbund.job import Data


def problems(
    folder: Path,
    objective: str | None = None,
    ignore_index: int = -100,
    own: frozenset[str] = frozenset(),
    **settings: Any,
) -> list[str]:
    data = Data(**{"train": "d.npz", "cache": "cache", "input": "x", "target": "y", **settings})
    found = check_columns(prepare(data, folder=folder), data, Wanted(objective, own, ignore_index))
    return [str(problem) for problem in found]


def write(folder: Path, **columns: Any) -> None:
    np.savez(folder / "d.npz", **{"x": np.zeros((4, 2)), "y": np.arange(4)} | columns)


def test_nothing_is_wrong(tmp_path: Path) -> None:
    write(tmp_path)
    assert problems(tmp_path, "cross_entropy") == []


def test_unknown_columns_all_at_once_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, label=np.arange(4))
    found = problems(tmp_path, input=["x", "z"], target="lable", scale={"q": 2.0})
    assert len(found) == 3
    assert "no column `z`" in found[0]
    assert "`q` is no column of `data.input`" in found[1]
    assert "Did you mean `label`?" in found[2]


def test_a_misspelt_input_does_not_make_its_scale_wrong(tmp_path: Path) -> None:
    write(tmp_path, image=np.zeros((4, 2)))
    (problem,) = problems(tmp_path, input="imge", scale={"image": 255.0})
    assert "no column `imge`" in problem


def test_a_scale_that_makes_no_numbers(tmp_path: Path) -> None:
    """Those that are no numbers themselves are refused in any key of the job."""
    write(tmp_path)
    (problem,) = problems(tmp_path, scale={"x": 0.0})
    assert problem.startswith("data.scale: `x` is divided by 0")


def test_text_is_no_input(tmp_path: Path) -> None:
    write(tmp_path, x=np.array(["a", "b", "a", "c"]))
    (problem,) = problems(tmp_path)
    assert "`x` is text" in problem


@pytest.mark.parametrize(
    ("objective", "target", "expected"),
    [
        ("cross_entropy", [0.0, 1.0, 2.0, 1.0], None),
        ("cross_entropy", [0.0, 1.5, 2.0, 1.0], r"d.npz, row 1: `y` is not a whole number"),
        ("cross_entropy", [0, 1, -3, 1], r"d.npz, row 2: `y` is -3, below class 0"),
        ("cross_entropy", [0, 1, -100, 1], None),
        ("cross_entropy", [[0.5, 0.5], [1, 0], [0.1, 0.9], [0, 1]], None),
        ("binary_cross_entropy", [0, 1, 1, 0], None),
        ("binary_cross_entropy", [0.0, 0.25, 1.0, 0.5], None),
        ("binary_cross_entropy", [0, 1, 2, 0], r"d.npz, row 2: `y` is 2; binary targets lie between 0 and 1"),
        ("binary_cross_entropy", [0, 1, 1, -1], r"d.npz, row 3: `y` is -1; binary"),
        ("mean_squared_error", [0.5, np.nan, np.nan, 1], r"d.npz, row 1: 2 rows have NaN or no value in `y`"),
        ("mean_squared_error", [0.5, 1, 2, np.inf], r"d.npz, row 3: `y` is inf"),
        ("mean_squared_error", [0.5, -np.inf, 2, 1], r"d.npz, row 1: `y` is -inf"),
        ("mean_squared_error", [0.5, 1, 1e39, 1e40], r"d.npz, row 2: `y` is 1e+39, which is more than float32 holds"),
        ("mean_squared_error", [[1, 2], [1, np.inf], [1, -np.inf], [1, 2]], r"d.npz, row 1: `y` is inf (2 rows"),
        ("mean_squared_error", ["a", "b", "a", "c"], "`y` is text, which mean_squared_error cannot compare"),
        ("mean_squared_error", ["1", "2", "1", "3"], "Its values are numbers: store them as such"),
        ("binary_cross_entropy", ["no", "yes", "no", "no"], None),
        ("binary_cross_entropy", ["no", "yes", "perhaps", "no"], "`y` has 3 different texts, a binary target two"),
        ("cross_entropy", ["a", "b", "a", "c"], None),
        (None, [0.5, -7, 2, 1], None),
        (None, [0.5, np.nan, np.inf, 1], None),
    ],
)
def test_targets(tmp_path: Path, objective: str | None, target: list[Any], expected: str | None) -> None:
    write(tmp_path, y=np.array(target))
    found = problems(tmp_path, objective)
    if expected is None:
        assert found == []
    else:
        (problem,) = found
        assert expected in problem


def test_the_ignored_class_may_be_negative(tmp_path: Path) -> None:
    write(tmp_path, y=np.array([0, -1, 2, 1]))
    assert problems(tmp_path, "cross_entropy", ignore_index=-1) == []
    assert len(problems(tmp_path, "cross_entropy")) == 1


def test_gaps_in_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"x": 1, "y": 1}\n{"x": null, "y": 2}\n{"x": 3}\n')
    found = problems(tmp_path, train="d.jsonl")
    assert len(found) == 2
    assert "d.jsonl, row 1: 1 row has no value in `x`" in found[0]
    assert "d.jsonl, row 2: 1 row has no value in `y`" in found[1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, np.nan, 1, np.nan], "d.npz, row 1: 2 rows have NaN or no value in `x`"),
        ([0, 1, np.inf, 2], "d.npz, row 2: `x` is inf"),
        (np.array([0, 1, np.inf, 2], np.float16), "d.npz, row 2: `x` is inf"),
        (np.array([0, 1, np.inf, 2], np.float32), "d.npz, row 2: `x` is inf"),
        ([[0, 1], [0, 1], [0, 1], [-np.inf, np.inf]], "d.npz, row 3: `x` is -inf"),
        ([0, 1, -1e300, 2], "d.npz, row 2: `x` is -1e+300, which is more than float32 holds"),
    ],
)
def test_inputs_that_are_not_finite(tmp_path: Path, values: list[Any], expected: str) -> None:
    write(tmp_path, x=np.array(values))
    (problem,) = problems(tmp_path, "cross_entropy")
    assert expected in problem
    assert problems(tmp_path, "cross_entropy", own=frozenset({"inputs"})) == []


def test_the_ignored_class_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path, y=np.array([0, -100, -2, 1]))
    (problem,) = problems(tmp_path, "cross_entropy")
    assert "d.npz, row 2: `y` is -2" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x,y\n1,0\n2,1\nabc,0\n", ["data.input", "t.csv, row 2", "`x` is text", "`abc`"]),
        ("x,y\n1,0\nNA,1\nabc,0\n", ["t.csv, row 2", "`abc`"]),
        ("x,y\n1,0\n2,1\n3,0?\n", ["data.target", "t.csv, row 2", "`y` is text", "`0?`"]),
        ("x;y\n1,5;0\n2,5;1\n", ["t.csv, row 0", "`1,5`", "decimals with a point"]),
        ('"x, in m";y\n1;0\n', ["no column `x`", "Known: x, in m, y"]),
        ("x|y\n1|0\n", ["separate columns by commas instead of `|`"]),
        ("x,y\n1,cat\n2,\n", ["data.target", "t.csv, row 1", "no value"]),
        ("x,y\n1,0\n,1\n", ["data.input", "t.csv, row 1"]),
    ],
)
def test_the_value_that_makes_a_csv_column_text(tmp_path: Path, text: str, expected: list[str]) -> None:
    found = " ".join(problems(tmp_path, "cross_entropy", train=csv(tmp_path, "t.csv", text)))
    for word in expected:
        assert word in found


def test_a_word_in_the_numbers_of_a_validation_set(tmp_path: Path) -> None:
    train, validation = csv(tmp_path, "t.csv", "x,y\n1,0\n2,1\n"), csv(tmp_path, "v.csv", "x,y\n1,0\n1,0\nabc,1\n")
    (problem,) = problems(tmp_path, "cross_entropy", train=train, validation=validation)
    assert "such as `abc`" in problem
    assert "v.csv, row 2" in problem


def test_a_word_in_the_fractions_of_a_validation_set(tmp_path: Path) -> None:
    train = csv(tmp_path, "t.csv", "x,y\n1.5,0\n2.5,1\n")
    validation = csv(tmp_path, "v.csv", "x,y\n1,0\n1.5,0\nabc,1\n")
    with pytest.raises(DataError, match=r"v.csv, row 2: `x` holds numbers, but here an invalid value 'abc'"):
        problems(tmp_path, "cross_entropy", train=train, validation=validation)


def test_rows_without_values(tmp_path: Path) -> None:
    write(tmp_path, x=np.zeros((4, 0)))
    (problem,) = problems(tmp_path)
    assert "its rows are empty: each has the shape [0]" in problem


def csv(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return name


def test_a_validation_set_gets_the_vocabulary_and_types_of_the_training_set(tmp_path: Path) -> None:
    train = csv(tmp_path, "t.csv", "x,w,y\n0.5,b,0\n1.5,a,1\n2.5,c,0\n")
    validation = csv(tmp_path, "v.csv", "w,x,y,extra\nc,1,1,9\nnew,2,0,9\na,3,1,9\n")
    data = Data(train=train, validation=validation, cache="cache", input="x", target="y")
    prepared = prepare(data, folder=tmp_path)
    assert check_columns(prepared, data, Wanted("cross_entropy")) == []
    place = Path(str(prepared.validation))
    rows = ColumnFiles(place).rows(np.arange(3))
    assert rows["w"].tolist() == [2, -1, 0]
    assert rows["x"].dtype == np.float64
    assert set(rows) == {"x", "w", "y"}
    word = Manifest.read(place).column("w")
    assert word is not None
    assert (word.unknown, word.first_unknown) == (1, 1)
    (problem,) = check_columns(prepared, data.model_copy(update={"target": "w"}), Wanted())
    assert "v.csv, row 1" in problem.where
    assert "the training set does not have" in problem.what


def test_the_nearest_of_a_validation_sets_further_columns(tmp_path: Path) -> None:
    train, validation = csv(tmp_path, "t.csv", "height,y\n1,0\n2,1\n"), csv(tmp_path, "v.csv", "heigth,y\n1,0\n")
    (problem,) = problems(tmp_path, train=train, validation=validation, input="height")
    assert "data.validation has no column `height`. Did you mean `heigth`?" in problem
    validation = csv(tmp_path, "w.csv", "height|y\n1|0\n")
    found = problems(tmp_path, train=train, validation=validation, input="height")
    assert "commas instead of `|`" in found[0]


def test_texts_that_look_like_numbers_in_the_validation_set(tmp_path: Path) -> None:
    train = csv(tmp_path, "t.csv", "x,w\n1,10\n2,ten\n")
    validation = csv(tmp_path, "v.csv", "x,w\n1,10\n2,10\n")
    prepared = prepare(Data(train=train, validation=validation, cache="cache"), folder=tmp_path)
    assert ColumnFiles(Path(str(prepared.validation))).rows(np.arange(2))["w"].tolist() == [0, 0]


def test_a_validation_set_that_does_not_fit(tmp_path: Path) -> None:
    train = csv(tmp_path, "t.csv", "x,y,z\n1,0,1\n2,1,1\n")
    validation = csv(tmp_path, "v.csv", "x,y\n1.5,0\n2.5,1\n")
    data = Data(train=train, validation=validation, cache="cache", input=["x", "z"], target="y")
    prepared = prepare(data, folder=tmp_path)
    found = [str(problem) for problem in check_columns(prepared, data, Wanted())]
    assert len(found) == 2
    assert "it is float64 here, but int64 in the training set" in found[0]
    assert "data.validation has no column `z`" in found[1]
    # The task's own functions may use any column: then all must be there.
    own = data.model_copy(update={"input": None, "target": None})
    assert len(check_columns(prepared, own, Wanted())) == 2


def test_a_validation_set_of_another_kind(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "v.txt").write_text("words " * 100)
    with pytest.raises(DataError, match="is a set of tokens, the training set one of columns"):
        prepare(Data(train="d.npz", validation="v.txt", cache="cache"), folder=tmp_path)


def test_a_class_that_the_training_set_lacks(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for name in ("t/cat", "t/dog", "v/cat", "v/eel"):
        (tmp_path / name).mkdir(parents=True)
        pillow.new("RGB", (4, 4)).save(tmp_path / name / "0.png")
    with pytest.raises(DataError, match="class `eel` is not in the training set"):
        prepare(Data(train="t", validation="v", cache="cache"), folder=tmp_path)
