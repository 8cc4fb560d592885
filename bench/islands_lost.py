"""Islands that are killed while others train: how long the others pause, and what it costs.

    python bench/islands_lost.py [--islands 3] [--steps 400] [--kills 5] [--seed 1]

Islands of one process train a small network on digits with DiLoCo, an exchange every 10 steps; every three seconds one
is killed, chosen by the seed. A pause is the time from the end of a step to where the islands go on in another era, the
return of the one that was killed among them. Beside it the same training undisturbed. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from verbund.observe.journal import read

TASK = """
import os, time
from pathlib import Path
from torch import nn

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

def inputs(batch):
    time.sleep(0.03)
    (Path(__file__).parent / f"pid-{os.getpid()}").touch()
    return batch["image"].reshape(len(batch["image"]), -1).float() / 16
"""
JOB = """
task = "task.py"
[data]
train = "sklearn:digits"
validation_fraction = 0.2
input = "image"
target = "label"
[train]
objective = "cross_entropy"
global_batch = 120
steps = {steps}
optimizer = {{ name = "adamw", lr = 1e-3 }}
[strategy]
islands = {islands}
exchange = {{ name = "diloco", every = 10 }}
[cluster]
threads = 1
replacements = 100
"""


def _living(folder: Path) -> list[int]:
    found = (int(path.name[4:]) for path in folder.glob("pid-*"))
    return sorted(pid for pid in found if Path(f"/proc/{pid}").exists())


def trained(options: argparse.Namespace, kills: int) -> dict[str, Any]:
    """What a run comes to in which so many islands are killed."""
    chosen = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        (folder / "job.toml").write_text(JOB.format(steps=options.steps, islands=options.islands))
        command = [sys.executable, "-m", "verbund", "train", "job.toml", "--run", "run", "--json"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while process.poll() is None and len(_living(folder)) < options.islands:
            time.sleep(0.05)
        struck = 0
        while struck < kills and process.poll() is None:
            time.sleep(3.0)
            if process.poll() is None and (living := _living(folder)):
                os.kill(chosen.choice(living), signal.SIGKILL)
                struck += 1
        summary = json.loads(process.communicate()[0])
        events = [event for journal in read(folder / "run" / "journal") for event in journal.events]
    pauses = [float(event["seconds"]) for event in events if event["name"] == "regrouped"]
    return {
        "status": summary["status"],
        "generations": summary["generations"],
        "killed": struck,
        "samples": summary["samples"],
        "samples_lost": summary["samples_lost"],
        "seconds": round(summary["seconds"]["total"], 2),
        "pause_median": round(statistics.median(pauses), 3) if pauses else None,
        "pause_longest": round(max(pauses), 3) if pauses else None,
        "validation_loss": round(summary["metrics"]["loss"]["last"], 4),
        "accuracy": round(summary["metrics"]["accuracy"]["last"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for key, value in {"islands": 3, "steps": 400, "kills": 5, "seed": 1}.items():
        parser.add_argument(f"--{key}", type=int, default=value)
    options = parser.parse_args()
    found = {"disturbed": trained(options, options.kills), "undisturbed": trained(options, 0)}
    print(
        json.dumps(
            {"bench": "islands_lost", **vars(options), **found, "cores": os.cpu_count(), "machine": platform.machine()}
        )
    )


if __name__ == "__main__":
    main()
