"""Verification: a strategy's numbers beside those of a single process, or of another strategy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from verbund import checkpoint
from verbund.cluster.process import Cluster, ProcessSpec
from verbund.errors import InputError, RunFailed
from verbund.job import Job, parse_strategy
from verbund.mesh.axes import Division, Mesh
from verbund.stage import before
from verbund.stage.processes import supervised, workers
from verbund.stage.served import verified as served

LIMITS = {"loss": 1e-5, "gradients": 1e-4, "parameters": 1e-4, "buffers": 1e-4}
"""The largest relative differences that pass, in float32."""
FLOAT64 = 1e-4
"""What they are multiplied by in float64, which has nine more digits: far more than any model amplifies."""


def verify(
    job: Job,
    *,
    against: str | None = None,
    steps: int = 3,
    quiet: bool = True,
) -> dict[str, Any]:
    """Trains some steps under the job's strategy and as a single process, from the same start, and compares.

    Both train by plain SGD at the job's first learning rate: an adaptive optimiser would turn the rounding of a
    gradient that is nearly zero into a step of full size. The single process takes forward passes of as many samples
    as a worker does, so that like is compared with like.

    Some models (language models with their huge activations of a few features) amplify float32's rounding beyond any
    limit, in one process too. So where the limits are not kept both train once more in float64: if they agree there to
    four more digits, what differs is rounding, and the strategy has passed.

    Parameter servers with `bulk_synchronous` steps are started, and parameters and losses of all steps compared. What
    is inexact is left out, and islands add up gradients instead: compression, exchanges of islands that train alone,
    and other consistencies.

    Args:
        job: what to train.
        against: another strategy to compare with, e.g. `data=2`; default: a single process.
        steps: optimiser steps.
        quiet: no progress on standard error.

    Returns:
        `passed`; `strategy` and `against`; `losses` of both; and under `differences` for `loss`, `gradients`,
        `parameters` and `buffers` the largest relative `difference`, its `limit`, the `tensor` and the `step`; under
        `float64` the differences there, if they were needed; `left_out`, what of the strategies was not compared.

    Raises:
        InputError: if the job or a strategy is wrong.
        RunFailed: if a worker failed.
    """
    if steps < 1:
        raise InputError("at least one step is needed", where="--steps")
    sides = [_plain(job, steps, None), _plain(job, steps, against or "")]
    if against is None and not job.train.micro_batch and job.train.batch_norm != "global":
        sides[1] = _with(sides[1], {"train.micro_batch": _samples_of_a_pass(sides[0])})
    if served.exact(job):
        exchange = job.strategy.exchange.model_dump(exclude_defaults=True)
        sides[0] = _with(sides[0], {"strategy.exchange": exchange, **served.settings(steps)})
    notify = before.notifier(quiet)
    with before.cluster_of(sides[0]) as cluster:
        found = _compared(cluster, sides, steps, notify)
        if not found["passed"] and job.train.precision != "fp64" and not found["missing"]:
            notify("beyond the limits of float32: once more in float64")
            try:
                exact = _compared(cluster, [_with(side, {"train.precision": "fp64"}) for side in sides], steps, notify)
            except (InputError, RunFailed) as error:
                notify(f"float64 was not possible: {error}")
            else:
                found |= {"passed": exact["passed"], "float64": exact["differences"]}
    found["left_out"] = _inexact(job, against)
    return found


def _compared(cluster: Cluster, sides: list[Job], steps: int, notify: before.Notify) -> dict[str, Any]:
    results, folders = [], []
    with tempfile.TemporaryDirectory(dir=cluster.scratch) as scratch:
        cluster.share([Path(scratch)])
        prepared = before.prepared_data(sides[0], notify)
        for index, side in enumerate(map(cluster.settled, sides)):
            facts = before.dry_run(cluster, side, prepared)
            notify(f"{steps} steps under {_name(side)}")
            folder = Path(scratch) / str(index)
            folder.mkdir()
            folders.append(str(folder))
            found_out = {"costs": facts.costs, "deferred": facts.deferred}
            if side.strategy.exchange.served:
                where, part = served.run(cluster, side, prepared, facts, folder / "run")
                folders[-1] = str(where)
                results.append([part])
                continue
            settings = before.settings_of(side, prepared, **found_out, folder_out=str(folder), steps=steps)
            parts = supervised(cluster, side, workers(side, "verbund.stage.verifying:work", settings))
            for step in range(steps + 1):
                checkpoint.commit(folder, step, [part["records"][step] for part in parts], {})
            results.append(parts)
        notify("comparing")
        fused = {**results[1][0]["fused"], **results[0][0]["fused"]}
        kinds = served.KINDS if sides[0].strategy.exchange.served else [*served.KINDS, "gradients"]
        # Servers save no step 0.
        first = [0 if "gradients" in kinds else 1, 0]
        saved = [
            {step: str(checkpoint.folder(Path(folder), step)) for step in range(first[side], steps + 1)}
            for side, folder in enumerate(folders)
        ]
        told = {"saved": [list(paths.items()) for paths in saved], "fused": fused, "steps": steps, "kinds": kinds}
        found = _compare(cluster, sides[1], told)
    return _judged(sides, [parts[0]["losses"] for parts in results], found, results)


def _samples_of_a_pass(job: Job) -> int:
    """How many samples a forward pass of this strategy has, where nothing else says so."""
    mesh = Mesh.of(job.strategy, 0)
    division = Division(mesh.batch_workers, 1, 0, Division.passes_of(mesh))
    everybody = [division.micro_batches(job.train.global_batch, worker) for worker in range(mesh.batch_workers)]
    return max(high - low for passes in everybody for low, high in passes)


def _with(job: Job, changes: dict[str, Any]) -> Job:
    return Job.build(job.resolved(), changes, source="verify", folder=Path(job.folder))


_ALONE = {"federated": "clients train alone, and `verify` compares nothing of their rounds"}
_INEXACT = ("strategy.compression", "strategy.exchange")


def _plain(job: Job, steps: int, strategy: str | None) -> Job:
    changes: dict[str, Any] = {
        "train.optimizer": {"name": "sgd", "lr": job.train.optimizer.lr},
        "train.schedule": {"name": "constant"},
        "train.steps": steps,
        "train.precision": "fp64" if job.train.precision == "fp64" else "fp32",
        "cluster.threads": job.cluster.threads or 1,
    }
    if strategy is not None:
        changes |= parse_strategy(strategy)
    changes = {key: value for key, value in changes.items() if not key.startswith(_INEXACT)}
    changes |= {"strategy.compression": {"name": "none"}, "strategy.exchange": {"name": "all_reduce"}}
    return Job.build(job.resolved(), changes, source="verify", folder=Path(job.folder))


def _inexact(job: Job, against: str | None) -> list[str]:
    """Which compressions and exchanges of the strategies were not used, each with what it is."""
    strategies = [job.strategy]
    if against is not None:
        other = Job.build(job.resolved(), parse_strategy(against), source="verify", folder=Path(job.folder))
        strategies.append(other.strategy)
    methods = [s.exchange.compression if s.exchange.served else s.compression for s in strategies]
    compressions = dict.fromkeys(method.name for method in methods if method.name != "none")
    exchanges = dict.fromkeys(s.exchange.name for s in strategies if s.exchange.local or s.exchange.federated)
    servers = any(s.exchange.served for s in strategies[int(served.exact(job)) :])
    gradients = ["servers keep no gradients: losses and parameters were compared"] if served.exact(job) else []
    return [
        *(
            f"compression `{name}` is inexact: no comparison within rounding is possible, and gradients were added up "
            "as they are"
            for name in compressions
        ),
        *(
            f"under the exchange `{name}` {_ALONE.get(name, 'islands train alone')}: no comparison within rounding is "
            "possible, and gradients were added up in every step"
            for name in exchanges
        ),
        *(
            [
                (
                    "exchange `parameter_server`: no servers were started, and the islands added up their gradients in "
                    "every step; they are for a `strategy` whose consistency is `bulk_synchronous`, without `backup`. "
                    "Under others each push is a step, by which also decays whatever an optimiser remembers"
                )
            ]
            if servers
            else []
        ),
        *gradients,
    ]


def _compare(cluster: Cluster, job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    spec = ProcessSpec("comparison", 0, 1, "verbund.stage.verifying:compare", settings=settings)
    return supervised(cluster, job, [spec])[0]


def _judged(
    sides: list[Job], losses: list[list[float]], found: dict[str, Any], results: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    loss: dict[str, Any] = {"difference": 0.0, "tensor": None, "step": None}
    for step, (a, b) in enumerate(zip(*losses, strict=True)):
        difference = abs(a - b) / max(abs(b), 1e-30)
        if not difference <= loss["difference"]:
            loss.update(difference=difference, step=step)
    differences = {"loss": loss, **found["worst"]}
    factor = FLOAT64 if sides[0].train.precision == "fp64" else 1.0
    for kind, worst in differences.items():
        worst["limit"] = LIMITS[kind] * factor
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
    if (exact := found.get("float64")) is not None:
        largest = max(worst["difference"] for worst in exact.values())
        verdict = "what differs is rounding, which this model amplifies" if found["passed"] else "this is not rounding"
        shown.append(f"in float64 the largest difference is {largest:.1e}: {verdict}")
    shown += found.get("left_out", [])
    missing = found["missing"]
    return [*shown, *(f"only on one side: {name}" for name in missing[:8]), *(["…"] if len(missing) > 8 else [])]


def _name(job: Job) -> str:
    strategy = job.strategy
    words = [f"islands={strategy.islands}"] if strategy.islands > 1 else []
    words += [f"exchange={strategy.exchange.name}"] if strategy.exchange.served else []
    words += [f"{axis}={size}" for axis, size in strategy.axes.items()]
    if "pipeline" in strategy.axes:
        words.append(f"schedule={strategy.schedule}")
    if "shard" in strategy.axes:
        words.append(f"zero={strategy.zero}")
    return ",".join(words) or "a single process"
