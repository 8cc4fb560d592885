"""The README: its files, its commands and what it says they print. A block marked `sh` is run as it stands, one of the
documents too."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import Command
from verbund import __version__
from verbund.cluster.local import LocalCluster

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str]]:
    """Languages and contents of a document's blocks."""
    return [(match[1], match[2]) for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]


BLOCKS = blocks(TEXT)


def block(kind: str, words: str) -> str:
    (found,) = [text for language, text in BLOCKS if language == kind and words in text]
    return found


def commands() -> list[list[str]]:
    """The arguments of all commands in blocks to be run, in their order."""
    documents = [TEXT, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))]
    lines = [
        line for text in documents for kind, content in blocks(text) if kind == "sh" for line in content.splitlines()
    ]
    return [shlex.split(line) for line in dict.fromkeys(line.partition(" #")[0].strip() for line in lines)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The job and the task that the README shows, with data that fit them."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    image = pa.FixedSizeListArray.from_arrays(pa.array((digits.data.ravel() * 15).astype(np.uint8)), 64)
    table = pa.table({"image": image, "label": digits.target}).slice(0, 700)
    pq.write_table(table, tmp_path / "digits.parquet")
    pq.write_table(table.slice(0, 100).drop_columns("label"), tmp_path / "new.parquet")
    (tmp_path / "task.py").write_text(block("python", "def model"))
    job = block("toml", "[train]").replace("[data]", f"[data]\ncache = {json.dumps(str(tmp_path / 'cache'))}")
    (tmp_path / "job.toml").write_text(job)
    return tmp_path


def test_its_commands_run(command: Command, project: Path) -> None:
    verbs = set()
    for program, *arguments in commands():
        assert program == "verbund"
        target = None
        if ">" in arguments:
            *arguments, _, target = arguments
        ended = command(*arguments)
        assert ended.status == 0, (arguments, ended.err)
        if target is not None:
            (project / target).write_text(ended.out)
        verbs.add(arguments[0])
    assert verbs >= {"init", "train", "resume", "validate", "predict", "report", "doctor"}
    assert json.loads((project / "summary.json").read_text())["metrics"]["accuracy"]["last"] > 0.5
    assert pq.read_table(project / "predictions.parquet").num_rows == 100
    run = project / "runs" / "latest"
    for name in re.findall(r"`([\w./]+)`", TEXT[TEXT.index("A run is a directory") :].partition("\n\n")[0]):
        assert (run / name).exists(), name


def test_its_program_runs(shared_cluster: LocalCluster, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    (project / "program.py").write_text(block("python", "verbund.train"))
    runpy.run_path(str(project / "program.py"))


def test_its_mistakes_are_told_as_it_says(command: Command, project: Path) -> None:
    job = (project / "job.toml").read_text()
    (project / "job.toml").write_text(job.replace("optimizer =", "optimiser =").replace("data = 2", "data = 0"))
    assert command("train", "job.toml").err == block("", "2 problems")


def test_the_demo_prints_what_it_says(command: Command) -> None:
    demo = command("train", str(ROOT / "examples/digits/job.toml"), "--workers", "2", "--set", "train.epochs=2")
    printed = {shape(line) for line in (demo.err + demo.out).splitlines()}
    for line in block("", "reading sklearn:digits").splitlines():
        if line != "…":
            assert shape(line) in printed


def shape(line: str) -> str:
    """A line without its numbers, and without what depends on them."""
    return re.sub(r"[\d.,]*\d", "#", line).replace(" (best #)", "")


def test_its_files_exist() -> None:
    named = set(re.findall(r"`((?:docs|src|examples|tests)/[\w./]*|[A-Z]+\.md|constraints\.txt)`", TEXT))
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists(), name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", block("", "make demo"), re.M):
        assert f"\n{target}:" in makefile


def test_the_version_is_one(command: Command) -> None:
    assert command("--version").out.split() == ["verbund", __version__]
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
