"""What `ps` and the kernel's messages call a process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MLP
from verbund.run import Run

SAYS = """
import sys
from pathlib import Path
from verbund.comm.title import entitle

def told():
    return [Path(f"/proc/self/{file}").read_bytes() for file in ("cmdline", "comm", "environ")]

before = told()
entitle(sys.argv[1])
print((before, told()))
"""


@pytest.mark.parametrize("name", ["worker 3", "w" * 100, "é"])
def test_a_process_is_shown_by_its_name(name: str) -> None:
    ended = subprocess.run([sys.executable, "-c", SAYS, name], capture_output=True, text=True, check=True)
    before, after = ast.literal_eval(ended.stdout)
    title = f"verbund: {name}".encode()
    assert after[0].rstrip(b"\0") == title[: len(before[0]) - 1]
    assert len(after[0]) <= len(before[0])
    assert after[1] == name.encode()[:15] + b"\n"
    assert after[2] == before[2]


def test_the_processes_of_a_run(run_job: Callable[..., Run], tmp_path: Path) -> None:
    task = (
        MLP
        + """
import os, pathlib
HERE = pathlib.Path(__file__).parent
for pid, role in ((os.getpid(), "own"), (os.getppid(), "parent")):
    line = pathlib.Path(f"/proc/{pid}/cmdline").read_text().rstrip(chr(0))
    (HERE / f"{role}-{line.replace(' ', '_')}").touch()
"""
    )
    run_job(task, {"strategy.mesh": {"data": 2}})
    shown = {path.name for kind in ("own-*", "parent-*") for path in tmp_path.glob(kind)}
    own = {"own-verbund:_worker_0", "own-verbund:_worker_1", "own-verbund:_preflight_0"}
    assert shown == own | {"parent-verbund:_warm_server"}
