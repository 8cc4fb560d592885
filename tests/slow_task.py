"""A task of which one worker takes longer than the others for a sample."""

from __future__ import annotations

from pathlib import Path

from verbund.observe.journal import read

SLOW = """
import functools, json, os, time
from pathlib import Path

@functools.cache
def rank():
    # A worker's journal bears its process; others, which only try the model, have none.
    for path in sorted(Path(__file__).parent.glob("run*/journal/worker-*.jsonl")):
        with open(path) as lines:
            head = json.loads(next(lines))
        if head["pid"] == os.getpid():
            return head["rank"]

def inputs(batch):
    if SLOW_RANK >= 0 and rank() is not None:
        time.sleep(len(batch["x"]) * (16e-4 if rank() == SLOW_RANK else 2e-4))
    return batch["x"]
"""


def task_of(task: str, slow: int) -> str:
    """A task whose worker `slow` takes eight times as long as the others for a sample; -1: nobody takes any time."""
    return task + SLOW.replace("SLOW_RANK", str(slow))


def shares(run: Path) -> list[list[int]]:
    """All shares that were ever decided upon, from a run's journal."""
    events = (event for journal in read(run / "journal") for event in journal.events)
    return [event["samples"] for event in events if event["name"] == "shares"]
