"""What is asked before a run goes on: whether anything is left to do, and whether it would still be the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verbund.checkpoint import Manifest
from verbund.data.prepare import Prepared
from verbund.errors import InputError
from verbund.job import Job
from verbund.run import Run

_ENDS = ("epochs", "steps", "seconds", "target", "patience")
# What decides which samples are trained on, and in which order, besides the data themselves.
_ORDER = ("seed", "data.validation_fraction", "data.window")


def state_of(checkpoint: Path | None) -> dict[str, Any]:
    """What a training was when it was saved; empty if nothing was. The checkpoint's files were verified before."""
    return Manifest.open(checkpoint, verify=False).state if checkpoint is not None else {}


def data_of(prepared: Prepared) -> list[str | None]:
    """The fingerprints of the training and the validation data; None where the task file brings its own."""
    return [Path(store).name if store else None for store in (prepared.train, prepared.validation)]


def nothing_left(run: Run, job: Job, state: dict[str, Any], total_steps: int | None) -> str | None:
    """Why there is nothing to train, and what to change if there should be; None if there is something.

    Args:
        run: as it was trained last.
        job: what is asked for now.
        state: of the newest checkpoint.
        total_steps: the steps after which the job ends, as far as they are known.
    """
    step = int(state.get("step", 0))
    done = f"{run.path}: {step} steps are done"
    if total_steps is not None and step > total_steps:
        return f"{done}, more than the {total_steps} that the job asks for now: nothing was trained."
    try:
        summary = run.summary
    except InputError:
        return None
    if summary.get("status") != "done" or summary.get("steps") != step:
        return None
    ended = summary.get("ended_by")
    if ended == "budget":
        if run.job.strategy.exchange.privacy != job.strategy.exchange.privacy:
            return None
        change = "--set strategy.exchange.privacy.budget=…"
        return f"{done}, and with them the privacy budget is spent. To train on, raise it: `{change}`"
    if step == total_steps or all(getattr(run.job.train, end) == getattr(job.train, end) for end in _ENDS):
        by = f" (it ended by `train.{ended}`)" if ended in _ENDS else ""
        key = ended if ended in ("epochs", "steps", "seconds") else "epochs" if job.train.epochs else "steps"
        change = f"raise or remove `train.{ended}`" if ended in ("target", "patience") else "raise the end"
        return f"{done}, and with them the run{by}. To train on, {change}, e.g. `--set train.{key}=…`"
    return None


def changes(run: Run, job: Job, state: dict[str, Any], prepared: Prepared) -> list[str]:
    """Warnings about what has changed since the newest checkpoint, so that the result is another than without the
    break.

    Raises:
        InputError: if the steps done and those to come could not be counted together.
    """
    batch = state.get("global_batch", job.train.global_batch)
    if batch != job.train.global_batch:
        raise InputError(
            f"the run was trained with global batches of {batch} samples, so that steps and epochs would be "
            f"miscounted with {job.train.global_batch}",
            where="train.global_batch",
            fix=f"Leave it at {batch}, or train anew",
        )
    warnings = []
    before, now = run.job.resolved(), job.resolved()
    for key in _ORDER:
        old, new = _value(before, key), _value(now, key)
        if old != new:
            warnings.append(
                f"`{key}` was {old} and is {new} now: the samples come in another order, so that in this epoch some "
                "come twice and others not at all"
            )
    known = state.get("data")
    if isinstance(known, list) and len(known) == 2:
        for what, old, new in zip(("training", "validation"), known, data_of(prepared), strict=True):
            if old != new:
                warnings.append(f"the {what} data have changed since the run's newest checkpoint: {_CONSEQUENCE[what]}")
    return warnings


_CONSEQUENCE = {
    "training": "in this epoch some samples may come twice and others not at all",
    "validation": "metrics before and after cannot be compared",
}


def _value(settings: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part, {})
    return settings
