"""Asynchronous rounds with real clients: the server is killed with its buffer half full, at any operation."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

from conftest import MakeJob, wait_for
from storm import Federation

NAMES = ("north", "south", "village")
ROUNDS = 4
POWER = 0.5
CHANGES = {
    "train.steps": ROUNDS,
    "train.global_batch": 16,
    "train.optimizer": {"name": "sgd", "lr": 0.1},
    "strategy.exchange": {
        "name": "federated",
        "clients": len(NAMES),
        "rule": {"name": "fedbuff", "buffer": 2, "staleness_power": POWER},
        "round": {"quorum": 1.0, "lost_after": 30.0, "gather": 30.0, "deadline": 30.0},
    },
}


def test_the_server_is_killed_with_its_buffer_half_full(
    tmp_path: Path, make_job: MakeJob, nursery: subprocess.Popen[str]
) -> None:
    """Who comes first is chance. So each step is computed anew in float64 by the formula of the paper, from the updates
    that the log says were in it."""
    source = random.Random(8)
    storm = Federation(tmp_path / "storm", make_job(changes=CHANGES), nursery, NAMES)
    storm.keep = True
    for who in ("server", NAMES[0]):
        storm.start(who)
    wait_for(lambda: [line for line in storm.lines() if line["event"] == "update"], "half a buffer", 60.0)
    os.kill(storm.pids["server"], signal.SIGKILL)
    for who in NAMES[1:]:
        storm.start(who)
    assert storm.strike("server", source, 8, 40, most=60) > 2
    storm.finish()
    lines = storm.events()
    kept = tmp_path / "storm" / "kept"
    version = load_file(kept / next(line["sha256"] for line in lines if line["event"] == "begun"))
    buffer: dict[str, dict[str, float | str]] = {}
    used: Counter[tuple[str, int]] = Counter()
    closed: list[str] = []
    steps = 0
    for line in lines:
        if line["event"] == "update":
            buffer[line["client"]] = line
        elif line["event"] == "closed":
            closed = line["clients"]
            assert len(closed) == 2
        elif line["event"] == "stepped":
            updates = [buffer.pop(name) for name in closed]
            total = sum(float(update["weight"]) for update in updates)
            used.update((str(update["client"]), int(update["round"])) for update in updates)
            after = load_file(kept / line["sha256"])
            tensors = [load_file(kept / str(update["sha256"])) for update in updates]
            for name, values in after.items():
                expected = version[name].double()
                for update, tensor in zip(updates, tensors, strict=True):
                    change = tensor[name.replace("shared/", "difference/")].double()
                    factor = (1.0 + steps - int(update["base_version"])) ** -POWER
                    expected = expected + float(update["weight"]) * factor * change / total
                torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-6)
            version, steps = after, steps + 1
    assert steps == ROUNDS
    assert max(used.values()) == 1
    assert sum(used.values()) == 2 * ROUNDS
