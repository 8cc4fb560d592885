"""Processes of a run as a test meets them: who lives, who is whose parent, and a command of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from conftest import MLP, MakeJob, wait_for

# A task whose workers tell who they are and when, so that a test can strike one of them.
MARKED = (
    MLP
    + """
import os, pathlib, time
HERE = pathlib.Path(__file__).parent
SLOW = float(os.environ.get("SLOW", 0.01))

def inputs(batch):
    time.sleep(SLOW)
    with open(HERE / f"pid-{os.getpid()}", "a") as file:
        file.write("x")
    return batch["x"]
"""
)


def pids(folder: Path, count: int, seconds: float = 20.0) -> list[int]:
    """The pids of workers that are alive and computing."""

    def living() -> list[int]:
        found = sorted(int(path.name[4:]) for path in folder.glob("pid-*") if alive(int(path.name[4:])))
        return found if len(found) >= count else []

    return list(wait_for(living, f"{count} workers", seconds))


def passes(folder: Path, count: int) -> int:
    """How many forward passes each of so many living workers has begun at least; 0 if there are fewer."""
    found = [path.stat().st_size for path in folder.glob("pid-*") if alive(int(path.name[4:]))]
    return min(found) if len(found) >= count else 0


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids_: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids_):
            return True
        time.sleep(0.05)
    return False


def parent(pid: int) -> int:
    """The pid of a process's parent: a worker's is the warm server, the warm server's the command."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start_command(job_folder: Path, *more: str, temporary: Path | None = None) -> subprocess.Popen[str]:
    """`verbund train job.toml --run run` in a folder, or another command; with a folder for its temporary files."""
    environment = {**os.environ, **({"TMPDIR": str(temporary)} if temporary else {})}
    return subprocess.Popen(
        [sys.executable, "-m", "verbund", *(more or ("train", "job.toml", "--run", "run"))],
        cwd=job_folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def write_job(make_job: MakeJob, folder: Path, changes: dict[str, Any], task: str = MARKED) -> None:
    job = make_job(task, changes)
    (folder / "job.toml").write_text(job.toml())


def step_of(folder: Path) -> int:
    """The last step that a journal of the run in this folder has told of."""
    newest = 0
    for path in (folder / "run" / "journal").glob("worker-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line) if line.endswith("}") else {}
            if record.get("t") == "steps":
                newest = max(newest, int(record["rows"][-1][0]))
    return newest


def scaled(folder: Path, workers: int) -> dict[str, Any]:
    """What `verbund scale` answers of the run in this folder, and its exit status."""
    words = [sys.executable, "-m", "verbund", "scale", "run", str(workers), "--json"]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return {"exit": ended.returncode, **json.loads(ended.stdout)}


def exactly(folder: Path, count: int) -> list[int]:
    """The pids of the workers, once there are so many and no more."""
    return list(wait_for(lambda: (p := pids(folder, count, 60)) and len(p) == count and p, f"{count} workers", 60))
