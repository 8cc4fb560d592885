"""Shares of a core for the workers of a benchmark, by control groups of version 1 (`cpu.cfs_quota_us`); needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/cpu")
ENTER = """
import functools, json, os
from pathlib import Path

@functools.cache
def limited(pid):
    # A worker's journal bears its process; others, which only try the model, have none.
    for path in Path("{run}").glob("journal/worker-*.jsonl"):
        with open(path) as lines:
            head = json.loads(next(lines))
        if head["pid"] == pid:
            Path(f"{group}-{{head['rank']}}/cgroup.procs").write_text(str(pid))

calls = 0

def limit():
    global calls
    calls += 1
    if calls >= 3:  # what happens once happens without a limit
        limited(os.getpid())
"""
"""What a task file needs so that each worker enters its group by calling `limit()` with every batch; to be formatted
with `run`, the run's folder, and `group`, what the groups' paths begin with."""


def check() -> None:
    """Ends the program where there can be no groups."""
    if not os.access(GROUPS / "cgroup.procs", os.W_OK):
        raise SystemExit(f"{GROUPS} cannot be written: this needs root, and control groups of version 1")


@contextmanager
def limits(shares: Sequence[float], period: int) -> Iterator[Path]:
    """Groups of processes, a worker each, with these shares of a core; gives what their paths begin with.

    Args:
        shares: by rank.
        period: microseconds over which a share is measured.
    """
    prefix = GROUPS / f"verbund-{os.getpid()}"
    folders = [Path(f"{prefix}-{rank}") for rank in range(len(shares))]
    try:
        for folder, share in zip(folders, shares, strict=True):
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(period))
            (folder / "cpu.cfs_quota_us").write_text(str(int(period * share)))
        yield prefix
    finally:
        for folder in folders:
            if folder.exists():
                folder.rmdir()
