"""What the journal costs a training step: recording 6 spans, 3 collectives and a step's row, with the flush that comes
once a second, spread over the steps of that second.

    python bench/journal.py [--steps 20000]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

from verbund.observe.events import Journal

STEP_SECONDS = 5e-3


def measure(steps: int) -> dict[str, float]:
    """Seconds per step for recording and for flushing; the flush is called as often as in steps of 5 ms."""
    every = round(1.0 / STEP_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), "worker", 0, 1)
        flushing = 0.0
        clock = time.monotonic_ns
        begin = time.perf_counter()
        for step in range(steps):
            at = clock()
            for kind in ("data", "compute", "data", "compute", "compute", "checkpoint"):
                journal.add(kind, step, at, at + 1_000_000)
            for index in range(3):
                journal.collective(step, index, at, at + 1, at + 2)
            journal.step(step, 0.693147, 128.0, 128, 1e-3)
            if journal.due or step % every == every - 1:
                before = time.perf_counter()
                journal.flush()
                flushing += time.perf_counter() - before
        total = time.perf_counter() - begin
        journal.close()
    return {"record": (total - flushing) / steps, "flush": flushing / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    measure(min(steps, 2000))
    best = min((measure(steps) for _ in range(3)), key=lambda cost: cost["record"] + cost["flush"])
    cost = best["record"] + best["flush"]
    print(
        json.dumps(
            {
                "name": "journal",
                "record_us": round(best["record"] * 1e6, 3),
                "flush_us": round(best["flush"] * 1e6, 3),
                "step_ms": STEP_SECONDS * 1e3,
                "share": round(cost / STEP_SECONDS, 6),
                "bound": 0.01,
                "machine": f"{platform.machine()}, Python {platform.python_version()}",
            }
        )
    )


if __name__ == "__main__":
    main()
