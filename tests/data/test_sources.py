"""Every kind of source becomes the same column files, and what is wrong with one is told by file, column and row."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.data import lines
from verbund.data.check import Wanted, check_columns
from verbund.data.manifest import Manifest, block_of, vocabulary
from verbund.data.prepare import Prepared, prepare
from verbund.data.samples import ColumnFiles
from verbund.errors import DataError
from verbund.job import Data


def store(folder: Path, train: str, **more: Any) -> Path:
    prepared = prepare(Data(train=train, cache="cache", **more), folder=folder)
    assert prepared.train is not None
    return Path(prepared.train)


def read(folder: Path) -> dict[str, Any]:
    source = ColumnFiles(folder)
    return source.rows(np.arange(source.size))


def parquet(folder: Path, name: str = "data.parquet", **columns: Any) -> str:
    pq.write_table(pa.table(columns), folder / name)
    return name


# -- kinds of columns ------------------------------------------------------------------------------------------------


def test_types_of_a_parquet_file(tmp_path: Path) -> None:
    when = datetime(2001, 6, 24, 8, 50, 0, 250_000)
    name = parquet(
        tmp_path,
        whole=pa.array([1, -2, 3], pa.int16()),
        half=pa.array(np.array([0.5, 1.5, 2.5], np.float16)),
        flag=pa.array([True, False, True]),
        money=pa.array([Decimal("1.25"), Decimal("-3.50"), None]),
        day=pa.array([date(1970, 1, 2), None, date(2000, 1, 1)]),
        at=pa.array([when, None, when], pa.timestamp("us")),
        word=pa.array(["b", None, "a"]),
        coded=pa.array(["x", "y", "x"]).dictionary_encode(),
        pair=pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2)),
        same=pa.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        grid=pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.uint8()))),
    )
    folder = store(tmp_path, name)
    rows, manifest = read(folder), Manifest.read(folder)
    assert manifest.rows == 3
    assert rows["whole"].tolist() == [1, -2, 3]
    assert rows["whole"].dtype == np.int16
    assert rows["half"].tolist() == [0.5, 1.5, 2.5]
    assert rows["flag"].tolist() == [True, False, True]
    assert np.array_equal(rows["money"], [1.25, -3.5, np.nan], equal_nan=True)
    assert np.array_equal(rows["day"], [86_400.0, np.nan, 946_684_800.0], equal_nan=True)
    assert np.array_equal(rows["at"], [993_372_600.25, np.nan, 993_372_600.25], equal_nan=True)
    assert rows["word"].tolist() == [1, -1, 0]
    assert rows["coded"].tolist() == [0, 1, 0]
    assert np.array_equal(rows["pair"], [[1, 2], [3, 4], [np.nan, np.nan]], equal_nan=True)
    assert rows["same"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert rows["grid"].shape == (3, 2, 2)
    word = manifest.column("word")
    assert word is not None
    assert vocabulary(folder, word) == ["a", "b"]
    assert (word.missing, word.first_missing) == (1, 1)


def test_statistics_name_values_and_rows(tmp_path: Path) -> None:
    name = parquet(
        tmp_path,
        a=pa.array([3, None, -7, 5]),
        b=pa.array([1.0, float("nan"), 2.5, 8.0]),
        c=pa.array([1.0, 4.0, 0.0, 2.0]),
    )
    manifest = Manifest.read(store(tmp_path, name))
    a, b, c = manifest.columns
    assert (a.minimum, a.minimum_row, a.maximum, a.maximum_row, a.missing, a.first_missing) == (-7, 2, 5, 3, 1, 1)
    assert (b.minimum, b.maximum, b.maximum_row, b.missing, b.first_missing) == (1.0, 8.0, 3, 1, 1)
    assert b.first_fraction == 2
    assert c.first_fraction is None
    assert manifest.place(2) == f"{tmp_path / name}, row 2"


def test_rows_are_placed_in_their_files(tmp_path: Path) -> None:
    for index in range(3):
        parquet(tmp_path, f"part-{index}.parquet", a=[index * 10 + i for i in range(4)])
    folder = store(tmp_path, "part-*.parquet")
    assert read(folder)["a"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert Manifest.read(folder).place(9) == f"{tmp_path / 'part-2.parquet'}, row 1"


def test_columns_of_no_fixed_shape_are_refused_only_when_used(tmp_path: Path) -> None:
    name = parquet(
        tmp_path,
        y=[0, 1],
        ragged=pa.array([[1], [1, 2]]),
        nested=pa.array([{"a": 1}, {"a": 2}]),
        raw=pa.array([b"x", b"y"]),
        nothing=pa.nulls(2),
    )
    data = Data(train=name, cache="cache", input="y", target="y")
    prepared = prepare(data, folder=tmp_path)
    assert check_columns(prepared, data, Wanted()) == []
    for column, reason in {
        "ragged": "different lengths (1 to 2)",
        "nested": "nested",
        "raw": "type binary",
        "nothing": "no values",
    }.items():
        (problem,) = check_columns(prepared, data.model_copy(update={"input": column}), Wanted())
        assert problem.where == "data.input"
        assert column in problem.what
        assert reason in problem.what


@settings(max_examples=25, deadline=None)
@given(
    words=st.lists(st.one_of(st.none(), st.text(max_size=6)), min_size=1, max_size=300),
    group=st.integers(1, 50),
)
def test_texts_become_codes_of_the_sorted_vocabulary(
    tmp_path_factory: pytest.TempPathFactory, words: list[str | None], group: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    pq.write_table(pa.table({"w": pa.array(words, pa.string())}), folder / "t.parquet", row_group_size=group)
    place = store(folder, "t.parquet")
    known = sorted({word for word in words if word is not None})
    column = Manifest.read(place).column("w")
    assert column is not None
    assert vocabulary(place, column) == known
    assert read(place)["w"].tolist() == [-1 if word is None else known.index(word) for word in words]


def test_too_many_texts_are_refused_only_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verbund.data.columns.DISTINCT_LIMIT", 10)
    name = parquet(tmp_path, id=[f"u{i}" for i in range(11)], y=list(range(11)))
    manifest = Manifest.read(store(tmp_path, name))
    assert manifest.names == ("y",)
    assert "more than 10 different texts" in manifest.unsupported["id"]


# -- kinds of files --------------------------------------------------------------------------------------------------

ROWS = {"a": [1, 2, 3], "b": [0.5, -1.0, 2.0], "w": ["x", "y", "x"]}


def written(folder: Path, kind: str) -> str:
    if kind == "parquet":
        return parquet(folder, **ROWS)
    if kind == "npz":
        np.savez(folder / "data.npz", **{name: np.array(values) for name, values in ROWS.items()})
        return "data.npz"
    if kind == "npy":
        np.save(folder / "data.npy", np.array(list(zip(*ROWS.values(), strict=True)), "i8,f8,U1"))
        array = np.load(folder / "data.npy")
        array.dtype.names = tuple(ROWS)
        np.save(folder / "data.npy", array)
        return "data.npy"
    records = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
    if kind == "jsonl":
        (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return "data.jsonl"
    text = "a,b,w\n" + "".join(f"{r['a']},{r['b']},{r['w']}\n" for r in records)
    (folder / "data.csv").write_text(text)
    return "data.csv"


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "npz", "npy"])
def test_all_kinds_of_tables_give_the_same(tmp_path: Path, kind: str) -> None:
    folder = store(tmp_path, written(tmp_path, kind))
    rows = read(folder)
    assert rows["a"].tolist() == [1, 2, 3]
    assert rows["b"].tolist() == [0.5, -1.0, 2.0]
    assert rows["w"].tolist() == [0, 1, 0]
    assert [(c.name, c.dtype, c.kind) for c in Manifest.read(folder).columns] == [
        ("a", "int64", "number"),
        ("b", "float64", "number"),
        ("w", "int32", "text"),
    ]


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_layout(tmp_path: Path, order: Any) -> None:
    image = np.arange(24, dtype=">f4").reshape(4, 2, 3)
    np.savez_compressed(tmp_path / "a.npz", image=np.asarray(image, order=order), y=np.arange(4, dtype=np.uint8))
    np.save(tmp_path / "b.npy", np.asarray(image, order=order))
    rows = read(store(tmp_path, "a.npz"))
    assert np.array_equal(rows["image"], image)
    assert rows["image"].dtype == np.dtype("<f4")
    assert np.array_equal(read(store(tmp_path, "b.npy"))["data"], image)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_later_blocks_may_widen_a_column(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", 64)
    values = [*range(40), 0.5, *range(40)]
    gaps = [*([None] * 40), 1.5, *([2] * 40)]
    with open(tmp_path / f"d.{kind}", "w") as file:
        if kind == "csv":
            file.write("v,g\n")
        for value, gap in zip(values, gaps, strict=True):
            row = f"{value},{'' if gap is None else gap}" if kind == "csv" else json.dumps({"v": value, "g": gap})
            file.write(f"{row}\n")
    rows = read(store(tmp_path, f"d.{kind}"))
    assert rows["v"].tolist() == values
    assert np.array_equal(rows["g"], [np.nan if gap is None else gap for gap in gaps], equal_nan=True)


def test_a_csv_column_with_one_word_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", 32)
    (tmp_path / "d.csv").write_text("v\n" + "\n".join([*map(str, range(10, 40)), "oops", "41"]))
    folder = store(tmp_path, "d.csv")
    column = Manifest.read(folder).column("v")
    assert column is not None
    assert vocabulary(folder, column) == sorted([*map(str, range(10, 40)), "oops", "41"])


@pytest.mark.parametrize("block", [16, 50, 1 << 20])
def test_csv_with_quoted_line_ends(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", block)
    words = [f'line {i}\nwith "quotes", and more' if i % 3 == 0 else f"w{i}" for i in range(50)]
    with open(tmp_path / "d.csv", "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerows([("n", "w"), *enumerate(words)])
    folder = store(tmp_path, "d.csv")
    column = Manifest.read(folder).column("w")
    assert column is not None
    known = vocabulary(folder, column)
    rows = read(folder)
    assert rows["n"].tolist() == list(range(50))
    assert [known[code] for code in rows["w"]] == words


def test_semicolons_and_tabs_separate_too(tmp_path: Path) -> None:
    for name, mark in (("a.csv", ";"), ("b.csv", "\t")):
        (tmp_path / name).write_text(f"x{mark}y\n1{mark}2\n3{mark}4\n")
        assert read(store(tmp_path, name))["y"].tolist() == [2, 4]


def test_json_lines_without_a_key_have_a_gap(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"a": 1.5}\n{"a": 2.5, "b": [1, 2]}\n\n{"b": [3, 4]}\n')
    folder = store(tmp_path, "d.jsonl")
    assert np.array_equal(read(folder)["a"], [1.5, 2.5, np.nan], equal_nan=True)
    b = Manifest.read(folder).column("b")
    assert b is not None
    assert (b.shape, b.missing, b.first_missing) == ((2,), 1, 0)


@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("digits", {"image": (8, 8), "label": ()}, 1797),
        ("iris", {"features": (4,), "petal width (cm)": (), "label": ()}, 150),
        ("diabetes", {"features": (10,), "bmi": (), "target": ()}, 442),
    ],
)
def test_sets_of_scikit_learn(tmp_path: Path, name: str, columns: dict[str, Any], rows: int) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    folder = store(tmp_path, f"sklearn:{name}")
    manifest = Manifest.read(folder)
    assert manifest.rows == rows
    for column, shape in columns.items():
        known = manifest.column(column)
        assert known is not None
        assert known.shape == shape
    bunch = getattr(datasets, f"load_{name}")()
    target = next(column for column in ("label", "target") if column in columns)
    assert np.array_equal(read(folder)[target], bunch.target)


def test_a_manifest_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = store(tmp_path, parquet(tmp_path, a=[1, 2]))
    assert store(tmp_path, str(folder)) == folder
    assert store(tmp_path, str(folder / "manifest.json")) == folder


# -- text and images -------------------------------------------------------------------------------------------------


def test_bytes_of_text_in_windows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"Hello, world! ")
    (tmp_path / "b.md").write_bytes("Grüße.".encode())
    stream = b"Hello, world! " + "Grüße.".encode()
    folder = store(tmp_path, ".", sequence=5)
    rows = read(folder)["tokens"]
    assert len(rows) == (len(stream) - 1) // 5
    for index, row in enumerate(rows):
        assert bytes(row) == stream[index * 5 : index * 5 + 6]
    column = Manifest.read(folder).column("tokens")
    assert column is not None
    assert column.values == 256


def test_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary_of = {word: code for code, word in enumerate(["[UNK]", *(f"w{i}" for i in range(300))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary_of, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    words = [f"w{i * 7 % 300}" for i in range(40_000)]
    text = " ".join(word + ("\n" if i % 50 == 49 else "") for i, word in enumerate(words))
    assert len(text) > 150_000  # several pieces
    (tmp_path / "t.txt").write_text(text)
    rows = read(store(tmp_path, "t.txt", sequence=100, tokenizer="tokenizer.json"))["tokens"]
    expected = [vocabulary_of[word] for word in words]
    assert rows[:, :-1].reshape(-1).tolist() == expected[: len(rows) * 100]
    with pytest.raises(DataError, match="no such tokenizer"):
        store(tmp_path, "t.txt", tokenizer="absent.json")


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"5 tokens do not make one sample of 128 \+ 1"):
        store(tmp_path, "a.txt")


def images(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), mode: str = "RGB") -> dict[str, Any]:
    pillow = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(1)
    made = {}
    for label in classes:
        (folder / label).mkdir(parents=True)
        for index in range(3):
            pixels = random.integers(0, 256, (6, 8, 3) if mode == "RGB" else (6, 8), np.uint8)
            pillow.fromarray(pixels).save(folder / label / f"{index}.png")
            made[f"{label}/{index}.png"] = pixels
    return made


def test_images_by_class(tmp_path: Path) -> None:
    made = images(tmp_path / "pets")
    (tmp_path / "pets" / "README.md").write_text("what this is")
    folder = store(tmp_path, "pets")
    rows = read(folder)
    assert rows["label"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows["image"].dtype == np.uint8
    for row, pixels in zip(rows["image"], made.values(), strict=True):
        assert np.array_equal(row, pixels.transpose(2, 0, 1))
    label = Manifest.read(folder).column("label")
    assert label is not None
    assert (label.values, vocabulary(folder, label)) == (2, ["cat", "dog"])


def test_images_are_resized_and_grey_stays_grey(tmp_path: Path) -> None:
    images(tmp_path / "grey", mode="L")
    assert read(store(tmp_path, "grey", image_size=(3, 5)))["image"].shape == (6, 1, 3, 5)


def test_bad_images(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    images(tmp_path / "pets")
    pillow.new("RGB", (9, 9)).save(tmp_path / "pets" / "dog" / "9.png")
    with pytest.raises(DataError, match="9 × 9 pixels, others are 6 × 8") as found:
        store(tmp_path, "pets")
    assert str(found.value.where).endswith("dog/9.png")
    assert read(store(tmp_path, "pets", image_size=(6, 8)))["image"].shape == (7, 3, 6, 8)
    (tmp_path / "pets" / "dog" / "9.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="no readable image"):
        store(tmp_path, "pets", image_size=(6, 8))


# -- what is wrong with a source ---------------------------------------------------------------------------------------


def broken(folder: Path, case: str) -> tuple[str, str]:
    """A broken source and what the error must say."""
    if case == "missing":
        parquet(folder, "train.parquet", a=[1])
        return "trian.parquet", "Did you mean `train.parquet`"
    if case == "glob":
        return "*.csv", "no file matches"
    if case == "extension":
        (folder / "data.xls").write_text("x")
        return "data.xls", "`.xls`.*Known: .csv"
    if case == "empty folder":
        (folder / "void").mkdir()
        return "void", "has no data"
    if case == "no rows":
        return parquet(folder, a=pa.array([], pa.int64())), "empty: it has no rows"
    if case == "empty csv":
        (folder / "a.csv").write_text("")
        return "a.csv", "empty: it has no rows"
    if case == "header only":
        (folder / "a.csv").write_text("x,y\n")
        return "a.csv", "empty: it has no rows"
    if case == "truncated":
        name = parquet(folder, a=list(range(1000)))
        (folder / name).write_bytes((folder / name).read_bytes()[:-40])
        return name, "no whole Parquet file"
    if case == "damaged page":
        name = parquet(folder, a=np.random.default_rng(0).normal(size=50_000))
        raw = bytearray((folder / name).read_bytes())
        raw[4:64] = b"\xff" * 60  # the first page's header
        (folder / name).write_bytes(raw)
        return name, "damaged or cut short"
    if case == "ragged csv":
        (folder / "a.csv").write_text("x,y\n1,2\n3,4\n5\n")
        return "a.csv", r"a\.csv, row 2: cannot be parsed: Expected 2 columns, got 1"
    if case == "bad json":
        (folder / "a.jsonl").write_text('{"x": 1}\n{"x": 2\n')
        return "a.jsonl", r"a\.jsonl, row 1: cannot be parsed"
    if case == "mixed json":
        (folder / "a.jsonl").write_text('{"x": 1}\n{"x": "one"}\n')
        return "a.jsonl", r"row 1: cannot be parsed: .*number to string"
    if case == "mixed columns":
        parquet(folder, "a.parquet", x=[1], y=[2])
        parquet(folder, "b.parquet", x=[1], z=[2])
        return "*.parquet", r"b\.parquet: differs from a\.parquet: column `y` is missing"
    if case == "mixed types":
        parquet(folder, "a.parquet", x=[1])
        parquet(folder, "b.parquet", x=["1"])
        return "*.parquet", "`x` is string, not int64"
    if case == "mixed csv":
        (folder / "a.csv").write_text("x,y\n1,2\n")
        (folder / "b.csv").write_text("x,q\n1,2\n")
        return "*.csv", "column `q` is new"
    if case == "twice":
        (folder / "a.csv").write_text("x,x\n1,2\n")
        return "a.csv", "two columns `x`"
    if case == "latin":
        (folder / "a.csv").write_bytes("grün\n1\n".encode("latin-1"))
        return "a.csv", "no UTF-8"
    if case == "kinds":
        parquet(folder, "a.parquet", x=[1])
        (folder / "b.csv").write_text("x\n1\n")
        return ".", "different kinds"
    if case == "lengths":
        np.savez(folder / "a.npz", x=np.zeros(3), y=np.zeros(4))
        return "a.npz", "different numbers of rows: `x` 3, `y` 4"
    if case == "npz":
        (folder / "a.npz").write_bytes(b"PK no archive")
        return "a.npz", "no whole numpy file"
    if case == "cut npz":
        np.savez(folder / "a.npz", x=np.zeros(3000))
        (folder / "a.npz").write_bytes((folder / "a.npz").read_bytes()[:9000])
        return "a.npz", "no whole numpy file"
    if case == "sklearn":
        return "sklearn:digit", "Did you mean `digits`"
    raise AssertionError(case)


CASES = ["missing", "glob", "extension", "empty folder", "no rows", "empty csv", "header only", "truncated",
    "damaged page", "ragged csv", "bad json", "mixed json", "mixed columns", "mixed types", "mixed csv", "twice",
    "latin", "kinds", "lengths", "npz", "cut npz", "sklearn"]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_broken_sources_are_told_apart(tmp_path: Path, case: str) -> None:
    train, expected = broken(tmp_path, case)
    with pytest.raises(DataError) as found:
        store(tmp_path, train)
    assert re.search(expected, str(found.value)), str(found.value)
    assert found.value.exit_status == 2
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and "converting" in path.name]
    assert left == []


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}, None], object), y=np.arange(2))
    manifest = Manifest.read(store(tmp_path, "a.npz"))
    assert manifest.names == ("y",)
    assert "objects" in manifest.unsupported["x"]


# -- size and speed --------------------------------------------------------------------------------------------------


def test_blocks_of_large_stores() -> None:
    assert block_of(1000, 100) == 1
    assert block_of(1 << 20, 1024) == 256
    assert block_of(1 << 30, 1 << 20) == 1


def test_preparing_never_imports_torch(tmp_path: Path) -> None:
    parquet(tmp_path, "d.parquet", a=[1, 2])
    script = (
        "import sys; from pathlib import Path; from verbund.data.prepare import prepare; from verbund.job import Data;"
        "prepare(Data(train='d.parquet', cache='cache'), folder=Path(sys.argv[1]));"
        "assert not {'torch', 'sklearn', 'PIL', 'pandas'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


def test_wide_rows_are_converted_in_bounded_memory(tmp_path: Path) -> None:
    # 1,200 rows of 256 KiB: 300 MiB, which repeat so that the file is small.
    row = np.arange(1 << 16, dtype=np.float32)
    kind = pa.list_(pa.float32(), len(row))
    with pq.ParquetWriter(tmp_path / "wide.parquet", pa.schema([("x", kind)])) as writer:
        batch = pa.FixedSizeListArray.from_arrays(pa.array(np.tile(row, 40)), len(row))
        for _ in range(30):
            writer.write_table(pa.table({"x": batch.cast(kind)}))
    script = (
        "import resource, sys; from pathlib import Path; from verbund.data.prepare import prepare;"
        "import pyarrow.parquet; from verbund.job import Data;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024; before = peak();"
        "prepare(Data(train='wide.parquet', cache='cache'), folder=Path(sys.argv[1])); print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60, capture_output=True, text=True
    )
    assert float(done.stdout) < 150


def test_three_million_rows(tmp_path: Path) -> None:
    rows = 3_000_000
    random = np.random.default_rng(0)
    codes = random.integers(0, 250, rows, np.int32)
    airports = [f"A{(i * 97) % 250:03}" for i in range(250)]
    table = pa.table(
        {
            "date": pa.array(993_000_000_000_000 + np.arange(rows) * 7_500_000, pa.timestamp("us")),
            "delay": random.integers(-60, 600, rows),
            "origin": pa.DictionaryArray.from_arrays(codes, airports).cast(pa.string()),
        }
    )
    pq.write_table(table, tmp_path / "flights.parquet", compression="zstd", row_group_size=270_000)
    script = (
        "import resource, sys, time; from pathlib import Path; from verbund.data.prepare import prepare;"
        "import pyarrow.parquet; from verbund.job import Data;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024; before = peak();"
        "start = time.process_time();"
        "p = prepare(Data(train='flights.parquet', cache='cache'), folder=Path(sys.argv[1]));"
        "print(time.process_time() - start, peak() - before, p.train)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60, capture_output=True, text=True
    )
    seconds, megabytes, place = done.stdout.split()
    assert float(seconds) < 4  # of all cores together, with room for a slow machine; about 0.6 s is usual
    assert float(megabytes) < 400
    source = ColumnFiles(Path(place))
    assert source.size == rows
    ids = random.integers(0, rows, 1000)
    found = source.rows(ids)
    assert found["delay"].tolist() == table["delay"].take(pa.array(ids)).to_pylist()
    assert found["date"].tolist() == (993_000_000.0 + ids * 7.5).tolist()
    origin = Manifest.read(Path(place)).column("origin")
    assert origin is not None
    known = vocabulary(Path(place), origin)
    assert known == sorted(airports)
    assert [known[code] for code in found["origin"]] == [airports[code] for code in codes[ids]]


def test_prepared_crosses_processes_as_json(tmp_path: Path) -> None:
    prepared = prepare(Data(train=parquet(tmp_path, a=[1]), cache="cache"), folder=tmp_path)
    assert Prepared.from_record(json.loads(json.dumps(prepared.record()))) == prepared
    assert prepare(Data(), folder=tmp_path) == Prepared(None, None)


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verbund.data.table._NOTIFY_SECONDS", 0.0)
    told: list[str] = []
    started = time.monotonic()
    prepare(Data(train=parquet(tmp_path, a=[1, 2]), cache="cache"), folder=tmp_path, notify=told.append)
    assert any("2 rows" in line for line in told)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("kind", ["pipe", "device", "circle", "nowhere", "nothing"])
def test_sources_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "d.csv"
    expected = {
        "pipe": "is a pipe, which can be read only once",
        "device": "is a device",
        "circle": "is a link in a circle",
        "nowhere": "is a link to gone.csv, which is not there",
        "nothing": "data.train: names no source",
    }[kind]
    if kind == "pipe":
        os.mkfifo(place)
    elif kind != "nothing":
        place.symlink_to({"device": "/dev/zero", "circle": "d.csv", "nowhere": "gone.csv"}[kind])
    with pytest.raises(DataError, match=expected):
        store(tmp_path, "" if kind == "nothing" else "d.csv")
