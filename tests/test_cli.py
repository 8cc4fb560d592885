"""The command line: every way out of every verb, in text and as one JSON document."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import MLP, Command, MakeJob
from verbund.job import Job
from verbund.run import Run
from verbund.stage import before, launch


@pytest.fixture
def trained(command: Command, make_job: MakeJob, tmp_path: Path) -> Path:
    """A job file, and a run of it in `run`."""
    job = make_job(changes={"data.validation_fraction": 0.2, "validate.metrics": ["accuracy"]})
    (tmp_path / "job.toml").write_text(job.toml())
    run = tmp_path / "run"
    assert command("train", "job.toml", "--run", "run", "-q").status == 0
    return run


# -- what goes well ------------------------------------------------------------------------------------------------

GOOD = {
    "init": (["init", "new"], ["new/job.toml", "new/task.py", "verbund train new/job.toml"]),
    "train": (["train", "job.toml", "--run", "again"], ["done: 5 steps", "training loss", "validation accuracy: "]),
    "resume": (["resume", "run", "--set", "train.steps=6"], ["done: 6 steps", "run/report.html"]),
    "validate": (["validate", "run"], ["step 5, ", " 1 worker", "validation accuracy: 0."]),
    "predict": (["predict", "run", "data.npz"], ["run/predictions.parquet"]),
    "report": (["report", "run", "--trace", "trace.json"], ["run/report.html", "trace.json"]),
    "doctor": (["doctor", "job.toml"], ["ok      versions: python", "samples to train on"]),
}
QUIET = {"validate": ["validation loss", "validation accuracy"]}
"""What `--quiet` leaves."""


@pytest.mark.parametrize("verb", GOOD)
def test_what_goes_well(verb: str, command: Command, trained: Path) -> None:
    arguments, words = GOOD[verb]
    shown = command(*arguments)
    assert shown.status == 0
    for word in words:
        assert word in shown.out

    undo(verb)
    quiet = command(*arguments, "-q")
    assert (quiet.status, quiet.err) == (0, "")
    left = quiet.out.splitlines()
    if verb != "doctor":  # which still warns, on a machine with something to warn of
        assert [line.partition(":")[0] for line in left] == QUIET.get(verb, [])

    undo(verb)
    told = command(*arguments, "--json")
    assert told.status == 0
    assert told.document["status"] == "done"
    if verb not in ("init", "doctor"):
        place = trained.with_name("again") if verb == "train" else trained
        assert told.document["run"] == str(place)


def undo(verb: str) -> None:
    import shutil

    for made in {"init": ["new"], "train": ["again"]}.get(verb, []):
        shutil.rmtree(made)


def test_a_document_per_verb(command: Command, trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert command("report", "run", "--json").document["loss"] == summary["loss"]
    assert [step for step, _ in summary["loss"]["curve"]] == [0, 1, 2, 3, 4]
    evaluated = command("validate", "run", "--json", "--workers", "2").document
    assert evaluated["metrics"]["accuracy"] == summary["metrics"]["accuracy"]["last"]
    assert (evaluated["world"], evaluated["step"]) == (2, 5)
    out = command("predict", "run", "data.npz", "--out", "p.parquet", "--json").document["predictions"]
    assert Path(out).is_file()
    findings = command("doctor", "--json").document["findings"]
    assert {"what", "verdict", "found", "cause"} == set(findings[0])


ELSEWHERE = [
    ([], ("hosts", ["10.0.0.1", "10.0.0.2"], 3)),
    (["--cluster", "local"], ("local", ["10.0.0.1", "10.0.0.2"], 3)),
    (["--cluster", "hosts=10.0.0.2, 10.0.0.3"], ("hosts", ["10.0.0.2", "10.0.0.3"], None)),
]


@pytest.mark.parametrize("verb", ["resume", "validate", "predict", "doctor", "verify"])
def test_on_another_cluster_than_the_runs(
    verb: str, command: Command, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Job] = []
    real = before.cluster_of
    monkeypatch.setattr(before, "cluster_of", lambda job: (used.append(job), real(job))[1])
    for job in (trained / "job.toml", trained.with_name("job.toml")):
        old, new = 'kind = "local"', 'kind = "hosts"\nslots = 3\n'
        text = job.read_text().replace("hosts = []", 'hosts = ["10.0.0.1", "10.0.0.2"]')
        assert old in text
        job.write_text(text.replace(old, new))
    arguments = {
        "resume": ["run", "--set", "train.steps=6"],
        "predict": ["run", "data.npz"],
        "doctor": ["job.toml"],
        "verify": ["job.toml", "--steps", "1"],
    }.get(verb, ["run"])
    # Training would measure the links between the hosts.
    for more, cluster in ELSEWHERE[1:2] if verb == "resume" else ELSEWHERE:
        shown = command(verb, *arguments, *more)
        assert shown.status == 0, shown.err
        settings = used[-1].cluster
        assert (settings.kind, settings.hosts, settings.slots) == cluster


def test_the_tasks_own_prints_are_not_in_the_document(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("print('hello from the task')\n" + MLP)
    (tmp_path / "job.toml").write_text(job.toml())
    arguments = [sys.executable, "-m", "verbund", "train", "job.toml", "--json"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
    assert "hello from the task" in done.stderr


# -- what does not ------------------------------------------------------------------------------------------------

BAD = {
    "no such command": (2, ["trian"], "Did you mean 'train'"),
    "an option of no verb": (2, ["train", "job.toml", "--worker", "2"], "Did you mean `--workers`?"),
    "an argument is missing": (2, ["train"], "Missing argument 'JOB'"),
    "an argument too many": (2, ["report", "run", "other"], "unexpected extra argument"),
    "not a number": (2, ["train", "job.toml", "--workers", "two"], "`two` is not a whole number"),
    "no step": (2, ["validate", "run", "--step", "x"], "`x` is not a whole number"),
    "no setting": (2, ["train", "job.toml", "--set", "train.steps"], "Write KEY=VALUE"),
    "an axis": (2, ["train", "job.toml", "--strategy", "dat=2"], "`data`"),
    "two that say how many": (2, ["train", "job.toml", "--strategy", "data=2", "--workers", "2"], "one of them"),
    "a cluster of no hosts": (2, ["train", "job.toml", "--cluster", "hosts="], "hosts=NAME,NAME"),
    "a cluster that has none": (2, ["doctor", "job.toml", "--cluster", "local=a"], "`local=a` is no cluster"),
    "a cluster": (2, ["train", "job.toml", "--cluster", "locale"], "Did you mean `local`?"),
    "init: a folder in use": (2, ["init", "run"], "exists already"),
    "train: no job": (2, ["train", "no.toml"], "no such job file"),
    "train: a folder": (2, ["train", "."], "is a folder, not a job file. There is job.toml"),
    "train: a bad job": (2, ["train", "job.toml", "--set", "train.steps=0"], "greater than 0"),
    "train: a bad task": (2, ["train", "job.toml", "--set", "task=no.py"], "no such file"),
    "train: a directory in use": (2, ["train", "job.toml", "--run", "run"], "exists already"),
    "train: a run that fails": (
        1,
        ["train", "job.toml", "--set", "task=fails.py", "--set", "train.steps=50"],
        "the sun is down",
    ),
    "resume: no run": (2, ["resume", "no"], "no such run"),
    "resume: a bad change": (2, ["resume", "run", "--set", "train=5"], "arguments, train: must be a table"),
    "validate: no run": (2, ["validate", "no"], "no such run"),
    "validate: no such checkpoint": (2, ["validate", "run", "--step", "77"], "no checkpoint of step 77"),
    "validate: no such data": (2, ["validate", "run", "--data", "no.csv"], "no.csv"),
    "predict: no run": (2, ["predict", "no", "data.npz"], "no such run"),
    "predict: no such data": (2, ["predict", "run", "no.csv"], "no.csv"),
    "predict: no such folder": (2, ["predict", "run", "data.npz", "--out", "no/p.parquet"], "no such folder"),
    "predict: no format": (2, ["predict", "run", "data.npz", "--out", "p.txt"], "says no format"),
    "predict: a folder": (2, ["predict", "run", "data.npz", "--out", "run"], "run is a folder"),
    "report: no run": (2, ["report", "no"], "no such run"),
    "report: a job is no run": (2, ["report", "job.toml"], "not a run's directory"),
    "doctor: no network": (2, ["doctor", "job.toml", "--network"], "there is no network to measure"),
    "doctor: no job": (2, ["doctor", "no.toml"], "no such job file"),
    "doctor: a bad job": (2, ["doctor", "job.toml", "--set", "data.input=z"], "`z`"),
}
FAILS = MLP.replace(
    "def model",
    """
from verbund.sums import Sums
calls = 0

def loss(output, targets):
    global calls
    calls += 1
    if calls > 20:  # the dry run's are fewer
        raise ValueError("the sun is down")
    return nn.functional.cross_entropy(output, targets, reduction="none")

def model""",
)


def write_fails(folder: Path) -> None:
    """A job whose task fails after some steps."""
    (folder / "fails.py").write_text(FAILS)
    job = (folder / "job.toml").read_text()
    (folder / "fails.toml").write_text(job.replace('"task.py"', '"fails.py"').replace("steps = 5", "steps = 50"))


@pytest.mark.parametrize("case", BAD)
def test_what_does_not(case: str, command: Command, trained: Path, tmp_path: Path) -> None:
    status, arguments, words = BAD[case]
    write_fails(tmp_path)
    shown = command(*arguments)
    text = shown.out if "doctor: a bad" in case else shown.err
    assert shown.status == status
    assert words in text
    assert "Traceback" not in shown.err
    if text is shown.err:
        assert shown.out == ""
        assert shown.err.splitlines()[-1].startswith("verbund: ")

    told = command(*arguments, "--json")
    assert told.status == status
    assert told.document["status"] == "failed"
    cause = told.document["cause"]
    for key in ("what", "where", "fix"):
        assert (cause[key] or "") in text


def test_the_document_of_a_failed_run_is_its_summary(command: Command, trained: Path, tmp_path: Path) -> None:
    write_fails(tmp_path)
    told = command("train", "fails.toml", "--run", "failed", "--json").document
    assert told == json.loads((tmp_path / "failed" / "summary.json").read_text())
    assert told["run"] == str(tmp_path / "failed")
    assert told["failures"][0]["error"] == told["cause"]


def test_the_report_of_a_run_that_goes_on_or_was_killed(command: Command, trained: Path) -> None:
    run = Run.open(trained)
    assert command("report", "run", "--json").document == {**run.summary, "report": str(run.report)}
    run.begin_attempt()
    with run.lock():
        assert command("report", "run", "--json").document["status"] == "running"
    killed = command("report", "run", "--json").document
    assert killed["status"] == "failed"
    assert killed["cause"]["what"] == "the run's process is gone, killed perhaps"
    assert "goes on" not in run.report.read_text()
    assert "killed perhaps" in run.report.read_text()


def test_several_problems(command: Command, trained: Path) -> None:
    told = command("train", "job.toml", "--set", "train.steps=0", "--set", "train.epohcs=1", "--json")
    problems = told.document["cause"]["problems"]
    assert [problem["where"] for problem in problems] == ["arguments, train.steps", "arguments, train.epohcs"]
    assert told.err.startswith("verbund: 2 problems:\n  arguments, train.steps: must be")


def test_a_defect_of_ours_is_named_as_one(command: Command, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(launch, "report", broken)
    shown = command("report", "run")
    assert shown.status == 1
    assert "unexpected KeyError: 'surprise'. This is a defect" in shown.err
    assert "Traceback" not in shown.err
    told = command("report", "run", "--json", "--debug")
    assert "Traceback" in told.err
    assert told.document["cause"]["what"] == "unexpected KeyError: 'surprise'"


# -- interrupts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_before_a_run_exists(
    number: int, command: Command, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    for name in ("prepare", "prepare_evaluated"):
        monkeypatch.setattr(before, name, interrupted)
    for arguments in (
        ["train", "job.toml"],
        ["resume", "run", "--set", "train.steps=9"],
        ["validate", "run"],
        ["predict", "run", "data.npz"],
    ):
        shown = command(*arguments)
        assert (shown.status, shown.out) == (130, "")
        assert shown.err == "verbund: interrupted.\n"
        told = command(*arguments, "--json")
        assert (told.status, told.document["status"]) == (130, "interrupted")
        assert told.document["cause"]["what"] == "interrupted"


def test_interrupted_while_it_trains(command: Command, trained: Path, tmp_path: Path) -> None:
    """The worker itself calls for the end, at a step that is known."""
    (tmp_path / "stops.py").write_text(
        FAILS.replace('raise ValueError("the sun is down")', f"import os; calls == 21 and os.kill({os.getpid()}, 2)")
    )
    arguments = ["train", "job.toml", "--set", "task=stops.py", "--set", "train.steps=100000", "--run", "stopped"]
    told = command(*arguments, "--json")
    assert told.status == 130
    run = Run.open(tmp_path / "stopped")
    assert told.document == run.summary
    assert told.document["status"] == "interrupted"
    assert told.document["cause"]["what"].startswith("interrupted after step")
    assert told.document["cause"]["where"] == str(run.path)
    assert str(told.document["cause"]["fix"]) in told.err


# -- the rest -----------------------------------------------------------------------------------------------------


def test_help_and_version(command: Command) -> None:
    from verbund import __version__

    assert command("--version").out == f"verbund {__version__}\n"
    assert (command("--help").status, command("train", "-h").status, command().status) == (0, 0, 2)
    assert "resume" in command().out


def test_nobody_reads(command: Command, trained: Path) -> None:
    arguments = [sys.executable, "-m", "verbund", "report", str(trained), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "verbund: standard output: cannot be written: No space left on device.\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
