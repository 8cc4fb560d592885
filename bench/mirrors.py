"""What mirrors cost while nothing is lost: SmolLM2-135M, or the model of another job, under a mesh that divides it.

    python bench/mirrors.py [--job examples/smollm2/job.toml] [--strategy shard=2] [--every 4] [--rounds 4]

One training of `rounds` × `every` steps, and `every` before. In each round the first of `every` steps ends with the
start of a mirror, and in the second the rest is copied; the others have none, and are what a step takes. So both are
measured side by side, whatever else the machine does. Times are those between the starts of steps, from the journals of
all workers. One JSON line: medians over the rounds, in seconds; `share` is what a mirror takes of `--default` steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from verbund.job import Job, parse_strategy
from verbund.observe.events import SPANS
from verbund.observe.journal import ProcessJournal, read
from verbund.stage import launch


def main() -> None:
    """Measures, and prints the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path("examples/smollm2/job.toml"))
    parser.add_argument("--strategy", default="shard=2")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--default", type=int, default=10, help="steps between two mirrors that `share` is for")
    given = parser.parse_args()
    if given.every < 3:
        parser.error("--every needs at least 3 steps: one that has no mirror is the measure")
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            **parse_strategy(given.strategy),
            "checkpoint.mirror": given.every,
            "train.steps": given.every * (given.rounds + 1),
            "data.validation": None,
            "observe.journal_mb": 64,
        }
        run = launch.train(Job.read(given.job, changes), Path(folder) / "run", quiet=True)
        journals = [journal for journal in read(run.journal) if journal.role == "worker"]
        held = [sum(j.held[kind] for kind in ("parameters", "optimizer", "buffers", "ema")) for j in journals if j.held]
    plain, with_mirror = [], []
    seconds = [_seconds(journal) for journal in journals]
    for number in range(1, given.rounds + 1):
        # The mirror of `first` + 1 steps begins within the time of step `first`, and ends within that of the next.
        first = number * given.every - 1
        each = [[times[step] for times in seconds] for step in range(first, first + given.every)]
        slowest = [max(times) for times in each]
        plain.append(statistics.mean(slowest[2:]))
        with_mirror.append(sum(slowest[:2]) - 2 * plain[-1])
    step, mirror = statistics.median(plain), statistics.median(with_mirror)
    found = {
        "strategy": given.strategy,
        "mirrored_mib_per_worker": round(max(held) / 2**20, 1),
        "step": round(step, 4),
        "mirror": round(mirror, 4),
        "mirrors": [round(each, 4) for each in with_mirror],
        "every": given.default,
        "share": round(mirror / (given.default * step), 4),
    }
    print(json.dumps(found))


def _seconds(journal: ProcessJournal) -> dict[int, float]:
    """By step the seconds until the next one began."""
    begins: dict[int, int] = {}
    for kind, step, start, _ in journal.spans.tolist():
        if SPANS[kind] == "compute":
            begins[step] = min(start, begins.get(step, start))
    return {step: (begins[step + 1] - begin) / 1e9 for step, begin in begins.items() if step + 1 in begins}


if __name__ == "__main__":
    main()
