"""Machines that join a run, here processes of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import MLP, MakeJob, wait_for

VERBUND = [sys.executable, "-m", "verbund"]
EXTERNAL = {"cluster.kind": "external", "cluster.trusted_network": "127.0.0.0/8", "cluster.lost_after": 5.0}
PUBLISHED = {"cluster.join_file": "here"}


def write(folder: Path, make_job: MakeJob, changes: dict[str, Any], task: str = MLP) -> None:
    job = make_job(task, {**EXTERNAL, **PUBLISHED, **changes})
    (folder / "job.toml").write_text(job.toml())


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """A command in a folder of its own."""
    return subprocess.Popen(
        [*VERBUND, *words],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(folder: Path, *more: str) -> subprocess.Popen[str]:
    return start(folder, "train", "job.toml", "--run", "run", *more)


def join(folder: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    """One that joins as soon as the command says where."""
    wait_for((folder / "here.secret").exists, "the secret", 30)
    return start(folder, "join", str(folder / "here"), "--secret-file", "here.secret", *more, **environment)


def ended(process: subprocess.Popen[str], status: int, seconds: float = 60) -> str:
    """What a process said that ends with a status."""
    out, errors = process.communicate(timeout=seconds)
    assert process.returncode == status, (out, errors)
    return errors or out
