"""All models under all meshes of 2, 3, 4 and 8 workers against a single process, and all pairs of eight meshes saved
under one and loaded under the other: `make sweep` writes `docs/sweep.md`."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import models
from parallel.layouts import CHECKPOINTS, MODELS, WORKERS, meshes
from verbund.cluster.local import LocalCluster
from verbund.errors import InputError, VerbundError
from verbund.job import Job, parse_strategy
from verbund.stage import before, launch
from verbund.stage.verify import verify

FILE = Path(__file__).parent.parent.parent / "docs" / "sweep.md"
PRELOAD = ("verbund.stage.preload_divided", "transformers.modeling_utils")


def main() -> None:
    warm = LocalCluster(preload=PRELOAD)

    @contextmanager
    def cluster(job: Job) -> Iterator[LocalCluster]:
        yield warm

    before.cluster_of = cluster
    start = time.monotonic()
    try:
        table = {name: {mesh: layout(name, mesh) for n in WORKERS for mesh in meshes(n)} for name in MODELS}
        pairs = {a: {b: checkpoint(a, b) for b in CHECKPOINTS} for a in CHECKPOINTS}
    finally:
        warm.close()
    FILE.write_text(document(table, pairs, time.monotonic() - start))
    failed = [cell for row in [*table.values(), *pairs.values()] for cell in row.values() if cell.startswith("FAILED")]
    print(f"{len(failed)} failed; {FILE}")  # noqa: T201
    sys.exit(bool(failed))


def layout(name: str, mesh: str) -> str:
    """The largest relative difference of a gradient, or why the mesh is refused."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = verify(models.job(name, Path(folder), parse_strategy(mesh)), steps=2)
        except InputError as error:
            text = f"refused: {error.what}"
        except VerbundError as error:
            text = f"FAILED: {error}"
        else:
            worst = found["differences"]["gradients"]
            text = f"{worst['difference']:.1e}" if found["passed"] else f"FAILED: {found['differences']}"
    print(f"{name:<8} {mesh:<40} {text}", flush=True)  # noqa: T201
    return text


def checkpoint(before: str, after: str) -> str:
    """The relative difference of the first loss after the change of mesh."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        try:
            alone = launch.train(models.job("gpt", home, {"train.steps": 3}), home / "alone")
            run = launch.train(models.job("gpt", home, {**parse_strategy(before), "train.steps": 2}), home / "run")
            run = launch.resume(run.path, {**parse_strategy(after), "train.steps": 3})
        except VerbundError as error:
            text = f"FAILED: {error}"
        else:
            expected, found = (r.summary["loss"]["curve"][-1][1] for r in (alone, run))
            difference = abs(found - expected) / abs(expected)
            text = f"{difference:.0e}" if difference <= 1e-5 else f"FAILED: {difference:.1e}"
    print(f"{before:<20} → {after:<20} {text}", flush=True)  # noqa: T201
    return text


def document(table: dict[str, dict[str, str]], pairs: dict[str, dict[str, str]], seconds: float) -> str:
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = [
        "# Every mesh",
        "",
        (
            f"`make sweep` at revision {revision.stdout.strip() or 'unknown'}, {datetime.date.today()}, "
            f"{seconds / 60:.0f} minutes."
        ),
        "",
        (
            "Per model and mesh the largest relative difference of a gradient from a single process's, over two steps"
            " "
            "(limit 1e-4; losses and parameters are within their limits too), or why the mesh is refused."
        ),
        "",
        f"| mesh | {' | '.join(table)} |",
        f"|---|{'---|' * len(table)}",
    ]
    notes: dict[str, int] = {}
    for mesh in next(iter(table.values())):
        cells = []
        for row in table.values():
            text = row[mesh]
            if not text[0].isdigit():
                text = f"{text.split(':')[0]} ({notes.setdefault(text, len(notes) + 1)})"
            cells.append(text)
        lines.append(f"| {mesh} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    lines += [
        "",
        "## Saved under one mesh, loaded under another",
        "",
        "The relative difference of the next step's loss from that of a run that was never stopped (limit 1e-5).",
        "",
        f"| saved ╲ loaded | {' | '.join(pairs)} |",
        f"|---|{'---|' * len(pairs)}",
        *(f"| {name} | {' | '.join(row.values())} |" for name, row in pairs.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
