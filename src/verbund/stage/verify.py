"""Verification: a strategy's numbers beside those of a single process, or of another strategy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from verbund import checkpoint
from verbund.cluster.local import LocalCluster
from verbund.cluster.process import ProcessSpec
from verbund.errors import InputError
from verbund.job import Job, parse_strategy
from verbund.stage import launch

LIMITS = {"loss": 1e-5, "gradients": 1e-4, "parameters": 1e-4, "buffers": 1e-4}
"""The largest relative differences that pass, in float32."""


def verify(
    job: Job,
    *,
    against: str | None = None,
    steps: int = 3,
    quiet: bool = True,
) -> dict[str, Any]:
    """Trains some steps under the job's strategy and as a single process, from the same start, and compares.

    Both train by plain SGD at the job's first learning rate: an adaptive optimiser would turn the rounding of a
    gradient that is nearly zero into a step of full size.

    Args:
        job: what to train.
        against: another strategy to compare with, e.g. `data=2`; default: a single process.
        steps: optimiser steps.
        quiet: no progress on standard error.

    Returns:
        `passed`; `strategy` and `against`; `losses` of both; and under `differences` for `loss`, `gradients`,
        `parameters` and `buffers` the largest relative `difference`, its `limit`, the `tensor` and the `step`.

    Raises:
        InputError: if the job or a strategy is wrong.
        RunFailed: if a worker failed.
    """
    if steps < 1:
        raise InputError("at least one step is needed", where="--steps")
    sides = [_plain(job, steps, None), _plain(job, steps, against or "")]
    notify = launch._notify(quiet)
    with tempfile.TemporaryDirectory(prefix="verbund-verify-") as scratch, launch._cluster(job) as cluster:
        prepared = launch._prepared(job, notify)
        results, folders = [], []
        for index, side in enumerate(sides):
            facts = launch._dry_run(cluster, side, prepared)
            notify(f"{steps} steps under {_name(side)}")
            folder = Path(scratch) / str(index)
            folder.mkdir()
            folders.append(str(folder))
            found_out = {"costs": facts.costs, "deferred": facts.deferred}
            settings = launch._settings(side, prepared, **found_out, folder_out=str(folder), steps=steps)
            parts = launch._supervised(cluster, side, launch._workers(side, "verbund.stage.verifying:work", settings))
            for step in range(steps + 1):
                checkpoint.commit(folder, step, [part["records"][step] for part in parts], {})
            results.append(parts)
        notify("comparing")
        fused = {**results[1][0]["fused"], **results[0][0]["fused"]}
        found = _compare(cluster, job, {"folders": folders, "fused": fused, "steps": steps})
    return _judged(sides, [parts[0]["losses"] for parts in results], found, results)


def _plain(job: Job, steps: int, strategy: str | None) -> Job:
    changes: dict[str, Any] = {
        "train.optimizer": {"name": "sgd", "lr": job.train.optimizer.lr},
        "train.schedule": {"name": "constant"},
        "train.steps": steps,
        "cluster.threads": job.cluster.threads or 1,
    }
    if strategy is not None:
        changes |= parse_strategy(strategy)
    return Job.build(job.resolved(), changes, source="verify", folder=Path(job.folder))


def _compare(cluster: LocalCluster, job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    spec = ProcessSpec("comparison", 0, 1, "verbund.stage.verifying:compare", settings=settings)
    return launch._supervised(cluster, job, [spec])[0]


def _judged(
    sides: list[Job], losses: list[list[float]], found: dict[str, Any], results: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    loss: dict[str, Any] = {"difference": 0.0, "tensor": None, "step": None}
    for step, (a, b) in enumerate(zip(*losses, strict=True)):
        difference = abs(a - b) / max(abs(b), 1e-30)
        if not difference <= loss["difference"]:
            loss.update(difference=difference, step=step)
    differences = {"loss": loss, **found["worst"]}
    for kind, worst in differences.items():
        worst["limit"] = LIMITS[kind]
    passed = not found["missing"] and all(d["difference"] <= d["limit"] for d in differences.values())
    return {
        "passed": passed,
        "strategy": _name(sides[0]),
        "against": _name(sides[1]),
        "losses": losses,
        "differences": differences,
        "missing": found["missing"],
        "tensor_bytes": [[part["tensor_bytes"] for part in parts] for parts in results],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """What `verify` returned as a table for a terminal."""
    shown = [f"{'':<11} {'difference':>10} {'limit':>8}  at"]
    for kind, worst in found["differences"].items():
        step = worst["step"]
        at = f"step {step}" if step is not None else "everywhere equal"
        place = f"{worst['tensor']}, {at}" if worst["tensor"] else at
        shown.append(f"{kind:<11} {worst['difference']:>10.1e} {worst['limit']:>8.0e}  {place}")
    missing = found["missing"]
    return [*shown, *(f"only on one side: {name}" for name in missing[:8]), *(["…"] if len(missing) > 8 else [])]


def _name(job: Job) -> str:
    mesh = {axis: size for axis, size in job.strategy.mesh.items() if size > 1}
    return ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "a single process"
