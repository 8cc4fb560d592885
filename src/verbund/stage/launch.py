"""A stage as its caller sees it: check everything, start the processes, watch them, sum up.

This side never imports torch; what needs it (the dry run, the work) happens in processes forked from the warm server.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund import checkpoint, task
from verbund.cluster.process import Cluster
from verbund.data import schema
from verbund.data.prepare import Evaluated, Prepared, names_of
from verbund.errors import CheckpointError, ClusterLost, InputError
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.observe.journal import read
from verbund.run import Run
from verbund.stage import before, continuing, elastic
from verbund.stage.before import Facts
from verbund.stage.processes import supervised, workers
from verbund.stage.restarts import newest, persistent

_ENDING_SECONDS = 10.0
"""That processes take to end, beyond what they have for their last step."""


def train(job: Job, directory: Path | str | None = None, *, quiet: bool = True) -> Run:
    """Trains a job and returns its run.

    Args:
        job: what to train; `Job.read` reads one.
        directory: the run's directory, which must not exist or be empty; default: a new one below `runs/`.
        quiet: no progress on standard error.

    Raises:
        InputError: if anything is wrong with job, task or data, before any worker starts.
        RunFailed: if a worker failed; the error is the first cause.
        ClusterLost: if processes were lost beyond `cluster.replacements`.
        Interrupted: after Ctrl-C or SIGTERM, with a checkpoint saved.
    """
    before.refuse_existing(directory)
    elastic.check(job)
    with before.cluster_of(job) as cluster:
        prepared = before.prepared_data(job, before.notifier(quiet))
        facts = before.dry_run(cluster, cluster.settled(job), prepared)
        before.check_disk(Path(directory or "."), job, facts)
        with Interrupts() as interrupts:
            run = Run.create(Path(directory) if directory else None, job)
            with run.lock():
                return persistent(cluster, run, job, prepared, facts, None, quiet, interrupts)


def resume(directory: Path | str, changes: dict[str, Any] | None = None, *, quiet: bool = True) -> Run:
    """Continues a run from its newest valid checkpoint, with the same or another number of workers.

    Args:
        directory: the run.
        changes: dotted keys of the job to new values, e.g. `{"train.epochs": 10}`.
        quiet: no progress on standard error.

    Returns:
        the run; as it was if all that the job asks for is done.
    """
    run = Run.open(Path(directory))
    job = run.job
    if changes:
        job = Job.build(job.resolved(), changes, source=str(run.path / "job.toml"), folder=Path(job.folder))
    notify = before.notifier(quiet)
    with run.lock():
        run.wait_for_workers(run.job.cluster.orphan_grace + _ENDING_SECONDS, notify)
        source, warnings = newest(run)
        state = continuing.state_of(source)
        if done := continuing.nothing_left(run, job, state, job.train.steps):
            notify(done)
            return run
        return _resume(run, job, source, state, [*run.changed_files(), *warnings], quiet)


def _resume(run: Run, job: Job, source: Path | None, state: dict[str, Any], warnings: list[str], quiet: bool) -> Run:
    notify = before.notifier(quiet)
    elastic.check(job)
    with before.cluster_of(job) as cluster:
        prepared = before.prepared_data(job, notify, schema.kept(run.path))
        warnings += continuing.changes(run, job, state, prepared)
        facts = before.dry_run(cluster, cluster.settled(job), prepared)
        if done := continuing.nothing_left(run, job, state, facts.total_steps):
            notify(done)
            return run
        before.check_disk(run.path, job, facts)
        with Interrupts() as interrupts:
            run.rewrite_job(job)
            return persistent(cluster, run, job, prepared, facts, source, quiet, interrupts, warnings)


def validate(
    directory: Path | str,
    *,
    data: str | None = None,
    workers: int | None = None,
    strategy: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    step: int | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """The metrics of a checkpoint of a run: the same bit for bit for any number of workers.

    Args:
        directory: the run.
        data: another source than the job's validation data.
        workers: so many workers, each with the whole model.
        strategy: dotted keys of another strategy than the run's, as `parse_strategy` gives them.
        cluster: dotted keys of another cluster than the run's, as `parse_cluster` gives them.
        step: the checkpoint; default: the newest.
        quiet: no progress on standard error.

    Returns:
        `step`, `samples`, `metrics`, `seconds`, `world`.
    """
    run = Run.open(Path(directory))
    job = _evaluation_job(run.job, workers, strategy, cluster)
    known = schema.kept(run.path)
    evaluated = Evaluated(job.data.validation, "data.validation") if job.data.validation else None
    if data is not None:
        evaluated = Evaluated(_typed(data), "--data")
    if evaluated is None and not job.data.validation_fraction and job.data.train is not None:
        raise InputError("the job has no validation data", where=str(run.path), fix="Name a source with --data")
    with chosen(run, step) as source, before.cluster_of(job) as started:
        notify = before.notifier(quiet)
        if evaluated is None:
            prepared = before.prepared_data(job, notify, known, training=False)
        else:
            prepared = before.prepared_evaluation(job, evaluated, notify, known)
        job = started.settled(job)
        started.share([run.path])
        settings = {"checkpoint": str(source)}
        return _evaluate(started, job, prepared, "verbund.stage.validate:work", settings)[0]


def predict(
    directory: Path | str,
    data: str,
    out: Path | str | None = None,
    *,
    workers: int | None = None,
    strategy: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    step: int | None = None,
    live: bool = False,
    quiet: bool = True,
) -> Path:
    """Writes a model's predictions for every sample of `data`, in order.

    Args:
        directory: the run.
        data: a source with the job's input columns, or a folder of images; targets are not needed.
        out: the file to write, whose ending says how: .parquet, .csv, .jsonl; default `predictions.parquet` in the run.
        workers: so many workers, each with the whole model.
        strategy: dotted keys of another strategy than the run's, as `parse_strategy` gives them.
        cluster: dotted keys of another cluster than the run's, as `parse_cluster` gives them.
        step: the checkpoint; default: the newest.
        live: with what the parameter servers of the run have now, while it is being trained; no checkpoint is read.
        quiet: no progress on standard error.
    """
    return predicted(
        directory, data, out, workers=workers, strategy=strategy, cluster=cluster, step=step, live=live, quiet=quiet
    ).path


@dataclass(frozen=True)
class Predicted:
    """Predictions that were written.

    Args:
        path: the file.
        versions: of live servers: the oldest and the newest version that the parameters had; a version is a step.
    """

    path: Path
    versions: tuple[int, int] | None = None


def predicted(
    directory: Path | str,
    data: str,
    out: Path | str | None = None,
    *,
    workers: int | None = None,
    strategy: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    step: int | None = None,
    live: bool = False,
    quiet: bool = True,
) -> Predicted:
    """Writes predictions; see `predict`."""
    from verbund.stage.predictions import check_target, merge

    run = Run.open(Path(directory))
    target = Path(out) if out else run.path / "predictions.parquet"
    check_target(target)
    if live:
        _check_live(run, step)
    job = _evaluation_job(run.job, workers, strategy, cluster)
    known = schema.kept(run.path)
    with nullcontext(run.path) if live else chosen(run, step) as source, before.cluster_of(job) as started:
        prepared = before.prepared_evaluation(
            job, Evaluated(_typed(data), "DATA", labelled=False), before.notifier(quiet), known
        )
        job = started.settled(job)
        started.share([run.path, target.parent])
        parts = [target.with_name(f".{target.name}.part-{rank}") for rank in range(job.world)]
        named = None if "targets" in task.functions(job) else schema.vocabulary_of(known, names_of(job.data.target))
        settings = {
            "source": str(source),
            "live": live,
            "parts": [str(part.resolve()) for part in parts],
            "classes": json.loads(named.read_text(encoding="utf-8")) if named else None,
        }
        try:
            results = _evaluate(started, job, prepared, "verbund.stage.predict:work", settings)
            merge(parts, target)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
    versions = [version for result in results for version in result.get("versions", ())]
    return Predicted(target, (min(versions), max(versions)) if versions else None)


def _check_live(run: Run, step: int | None) -> None:
    """Whether there are servers to read from.

    Raises:
        InputError: if not.
    """
    fix = "Leave `--live` out: the newest checkpoint is read then"
    if step is not None:
        raise InputError("--live reads from servers, and --step names a checkpoint", where="arguments", fix=fix)
    if not run.job.strategy.exchange.served:
        what = f"the run has no parameter servers: its exchange is `{run.job.strategy.exchange.name}`"
        raise InputError(what, where=str(run.path), fix=fix)
    if not run.being_trained:
        raise InputError("the run is not being trained: it has no servers", where=str(run.path), fix=fix)


def report(directory: Path | str, trace: Path | None = None) -> tuple[dict[str, Any], Path]:
    """Writes a run's report anew from its journal, and its summary if that is damaged; also while the run goes on or
    after it was killed.

    Args:
        directory: the run.
        trace: a file for a Chrome trace of the run's spans.

    Returns:
        the summary and the report's path.
    """
    from verbund.observe.report import write_report
    from verbund.observe.summary import summarise
    from verbund.observe.trace import write_trace

    run = Run.open(Path(directory))
    damaged = False
    try:
        known = run.summary
    except InputError:
        known, damaged = _ended(run), True
    if run.being_trained:
        known = {"status": "running"}
    elif not known or known.get("attempt", run.attempt) != run.attempt:  # the newest attempt left no summary
        fix = f"`verbund resume {run.path}` continues from the last checkpoint"
        known = {
            "status": "failed",
            "cause": ClusterLost("the run's process is gone, killed perhaps", fix=fix).record(),
        }
    summary = summarise(
        run.path,
        status=known["status"],
        cause=known.get("cause"),
        strategy=run.job.strategy.model_dump(),
        world=run.job.world,
        ended_by=known.get("ended_by"),
        trained=known,
    )
    summary |= {key: known[key] for key in ("attempt", "warnings") if key in known}
    if damaged:
        summary["attempt"] = run.attempt
        run.write_summary(summary)
    if trace is not None:
        write_trace(run.path, trace)
    return summary, write_report(run.path, summary)


def _ended(run: Run) -> dict[str, Any]:
    """How the run's newest start ended, from its journal; empty if it did not."""
    journals = [journal for journal in read(run.journal) if journal.role == "supervisor"]
    events = journals[-1].events if journals else []
    return next((event for event in reversed(events) if event["name"] == "stopped"), {})


def check(job: Job, *, quiet: bool = True) -> Facts:
    """Everything that `train` checks before it starts workers.

    Raises:
        InputError: with all problems found.
    """
    with before.cluster_of(job) as cluster:
        prepared = before.prepared_data(job, before.notifier(quiet))
        return before.dry_run(cluster, cluster.settled(job), prepared)


@contextmanager
def chosen(run: Run, step: int | None) -> Iterator[Path]:
    """The checkpoint to evaluate, verified; within the block a run that goes on does not remove it.

    Raises:
        CheckpointError: if there is none that is whole.
    """
    while True:
        pointed = checkpoint.store.latest(run.checkpoints)
        path: Path | None = None
        warnings: list[str] = []
        try:
            if step is None:
                path, warnings = checkpoint.newest_valid(run.checkpoints)
            else:
                path = checkpoint.folder(run.checkpoints, step)
                checkpoint.verify(path)
        except CheckpointError:
            if checkpoint.store.latest(run.checkpoints) == pointed:
                raise  # else a run that goes on has saved another, and may have removed this one meanwhile
        if path is None:
            continue
        with checkpoint.store.held(path) as there:
            if there:
                for warning in warnings:
                    print(f"verbund: {warning}", file=sys.stderr)  # noqa: T201
                yield path
                return


def _evaluation_job(
    job: Job, workers: int | None, strategy: dict[str, Any] | None, cluster: dict[str, Any] | None
) -> Job:
    changes: dict[str, Any] = {**(strategy or {}), **(cluster or {})}
    if workers is not None:
        changes |= {"strategy.mesh": {"data": workers}, "strategy.islands": 1, "strategy.exchange": "all_reduce"}
    evaluated = Job.build(job.resolved(), changes, source="arguments", folder=Path(job.folder)) if changes else job
    if evaluated.strategy.exchange.served:  # a checkpoint has all parameters: no server is needed
        # Between hosts islands are joined by what is encrypted, as they were in training.
        without = {"strategy.exchange": "local_sgd" if evaluated.cluster.spread else "all_reduce"}
        return Job.build(evaluated.resolved(), without, source="arguments", folder=Path(job.folder))
    return evaluated


def _typed(source: str) -> str:
    """What the user typed as a source is relative to where they are, not to the job."""
    return source if source.startswith("sklearn:") or not source.strip() else os.path.abspath(source)


def _evaluate(
    cluster: Cluster, job: Job, prepared: Prepared, entry: str, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    before.supply(cluster, job, prepared)
    return supervised(cluster, job, workers(job, entry, before.settings_of(job, prepared, **settings)))
