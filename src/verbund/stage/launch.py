"""A stage as its caller sees it: check everything, start the processes, watch them, sum up.

This side never imports torch; what needs it (the dry run, the work) happens in processes forked from the warm server.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund import checkpoint, task
from verbund.cluster.local import LocalCluster
from verbund.cluster.process import Process, ProcessSpec
from verbund.cluster.supervisor import Failed, Supervisor
from verbund.comm.wire import Message
from verbund.data import schema
from verbund.data.check import Wanted, check_columns
from verbund.data.prepare import Evaluated, Prepared, cache_of, names_of, needed, prepare, prepare_evaluated
from verbund.errors import ClusterLost, InputError, Interrupted, JobError, Problem, RunFailed, VerbundError
from verbund.interop import huggingface
from verbund.interrupts import Interrupt, Interrupts
from verbund.job import Data, Job
from verbund.observe.energy import EnergyMeter
from verbund.observe.events import Journal
from verbund.observe.journal import read
from verbund.observe.progress import Progress
from verbund.run import Run
from verbund.stage import continuing
from verbund.stage.commits import Commits

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What the dry run found out."""

    tickets_per_epoch: int
    total_steps: int | None
    train_samples: int
    validation_samples: int
    parameters: int
    worker_bytes: int
    notes: list[str]
    costs: list[float] | None
    """Seconds of each layer at which a pipeline may be cut."""
    deferred: bool
    """Whether workers can build their parts of the model alone."""
    other_meshes: dict[str, int]
    """What a worker would need under other meshes of as many workers, in bytes."""


def train(job: Job, directory: Path | str | None = None, *, quiet: bool = True) -> Run:
    """Trains a job and returns its run.

    Args:
        job: what to train; `Job.read` reads one.
        directory: the run's directory, which must not exist or be empty; default: a new one below `runs/`.
        quiet: no progress on standard error.

    Raises:
        InputError: if anything is wrong with job, task or data, before any worker starts.
        RunFailed: if a worker failed; the error is the first cause.
        ClusterLost: if processes were lost.
        Interrupted: after Ctrl-C or SIGTERM, with a checkpoint saved.
    """
    _refuse_existing(directory)
    with _cluster(job) as cluster:
        prepared = _prepared(job, _notify(quiet))
        facts = _dry_run(cluster, job, prepared)
        with Interrupts() as interrupts:
            run = Run.create(Path(directory) if directory else None, job)
            with run.lock():
                return _train(cluster, run, job, prepared, facts, None, quiet, interrupts)


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
    notify = _notify(quiet)
    with run.lock():
        source, warnings = _newest(run)
        state = continuing.state_of(source)
        if done := continuing.nothing_left(run, job, state, job.train.steps):
            notify(done)
            return run
        return _resume(run, job, source, state, [*run.changed_files(), *warnings], quiet)


def _resume(run: Run, job: Job, source: Path | None, state: dict[str, Any], warnings: list[str], quiet: bool) -> Run:
    notify = _notify(quiet)
    with _cluster(job) as cluster:
        prepared = _prepared(job, notify, schema.kept(run.path))
        warnings += continuing.changes(run, job, state, prepared)
        facts = _dry_run(cluster, job, prepared)
        if done := continuing.nothing_left(run, job, state, facts.total_steps):
            notify(done)
            return run
        with Interrupts() as interrupts:
            run.rewrite_job(job)
            return _train(cluster, run, job, prepared, facts, source, quiet, interrupts, warnings)


def validate(
    directory: Path | str,
    *,
    data: str | None = None,
    workers: int | None = None,
    step: int | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """The metrics of a checkpoint of a run: the same bit for bit for any number of workers.

    Args:
        directory: the run.
        data: another source than the job's validation data.
        workers: another number of workers than the run's.
        step: the checkpoint; default: the newest.
        quiet: no progress on standard error.

    Returns:
        `step`, `samples`, `metrics`, `seconds`, `world`.
    """
    run = Run.open(Path(directory))
    job = _evaluation_job(run.job, workers)
    source = _chosen(run, step)
    known = schema.kept(run.path)
    evaluated = Evaluated(job.data.validation, "data.validation") if job.data.validation else None
    if data is not None:
        evaluated = Evaluated(_typed(data), "--data")
    if evaluated is None and not job.data.validation_fraction and job.data.train is not None:
        raise InputError("the job has no validation data", where=str(run.path), fix="Name a source with --data")
    with _cluster(job) as cluster:
        notify = _notify(quiet)
        if evaluated is None:
            prepared = _prepared(job, notify, known, training=False)
        else:
            prepared = _prepared_evaluated(job, evaluated, notify, known)
        settings = {"checkpoint": str(source)}
        return _evaluate(cluster, job, prepared, "verbund.stage.validate:work", settings)[0]


def predict(
    directory: Path | str,
    data: str,
    out: Path | str | None = None,
    *,
    workers: int | None = None,
    step: int | None = None,
    quiet: bool = True,
) -> Path:
    """Writes a model's predictions for every sample of `data`, in order.

    Args:
        directory: the run.
        data: a source with the job's input columns, or a folder of images; targets are not needed.
        out: the file to write, whose ending says how: .parquet, .csv, .jsonl; default `predictions.parquet` in the run.
        workers: another number of workers than the run's.
        step: the checkpoint; default: the newest.
        quiet: no progress on standard error.
    """
    from verbund.stage.predictions import check_target, merge

    run = Run.open(Path(directory))
    target = Path(out) if out else run.path / "predictions.parquet"
    check_target(target)
    job = _evaluation_job(run.job, workers)
    source = _chosen(run, step)
    known = schema.kept(run.path)
    with _cluster(job) as cluster:
        prepared = _prepared_evaluated(job, Evaluated(_typed(data), "DATA", labelled=False), _notify(quiet), known)
        parts = [target.with_name(f".{target.name}.part-{rank}") for rank in range(job.world)]
        named = None if "targets" in task.functions(job) else schema.vocabulary_of(known, names_of(job.data.target))
        settings = {
            "checkpoint": str(source),
            "parts": [str(part.resolve()) for part in parts],
            "classes": str(named) if named else None,
        }
        try:
            _evaluate(cluster, job, prepared, "verbund.stage.predict:work", settings)
            merge(parts, target)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
    return target


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
    with _cluster(job) as cluster:
        return _dry_run(cluster, job, _prepared(job, _notify(quiet)))


# -- before ------------------------------------------------------------------------------------------------------


@contextmanager
def _cluster(job: Job) -> Iterator[LocalCluster]:
    # What torch's compiler compiles is kept with the converted data, for the next run, and not in the folder for
    # temporary files.
    compiled = (Path(job.folder) / cache_of(job.data) / "compiled").resolve()
    cluster = LocalCluster(job.cluster.orphan_grace, _heavy(job), {"TORCHINDUCTOR_CACHE_DIR": str(compiled)})
    try:
        yield cluster
    finally:
        cluster.close()


def _heavy(job: Job) -> tuple[str, ...]:
    """What takes seconds to import and this job needs: it is imported once, in the warm server."""
    heavy = ["torch._dynamo"] if job.train.compile else []
    mesh = job.strategy.mesh
    if mesh.get("tensor", 1) * mesh.get("pipeline", 1) > 1:
        heavy.append("verbund.stage.preload_divided")
    if task.needs_transformers(job):
        heavy.append("transformers.modeling_utils")
    return tuple(heavy)


def _notify(quiet: bool) -> Notify:
    return (lambda _: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201


def _refuse_existing(directory: Path | str | None) -> None:
    if directory is not None and Path(directory).exists():
        path = Path(directory)
        if not path.is_dir() or any(path.iterdir()):
            raise InputError(
                "exists already",
                where=str(path),
                fix="Choose another directory, or `verbund resume` this one",
            )


def _prepared(job: Job, notify: Notify, known: Path | None = None, *, training: bool = True) -> Prepared:
    """Converts the data once, and reports all that is wrong with task and columns together."""
    if training and job.observe.tensorboard:
        from verbund.observe import tensorboard

        tensorboard.require()
    data = _data(job, notify)
    return _checked(job, data, lambda: prepare(data, folder=Path(job.folder), notify=notify, schema=known))


def _prepared_evaluated(job: Job, evaluated: Evaluated, notify: Notify, known: Path | None) -> Prepared:
    """The same for what is evaluated instead of the job's own validation set."""
    folder, own = Path(job.folder), task.functions(job)
    changes: dict[str, Any] = {} if evaluated.labelled else {"target": None}
    if job.data.train is None and not (job.train.objective and job.train.objective.name == "next_token"):
        # What the entries of the task's own Dataset are called unless the job names them.
        if "inputs" not in own:
            changes["input"] = job.data.input or "input"
        if "targets" not in own and evaluated.labelled:
            changes["target"] = job.data.target or "target"

    def convert() -> Prepared:
        return prepare_evaluated(evaluated, data, folder=folder, notify=notify, schema=known)

    data = _data(job, notify)
    prepared = _checked(job, data.model_copy(update=changes), convert)
    for note in prepared.notes:
        notify(note)
    return prepared


def _data(job: Job, notify: Notify) -> Data:
    """The job's data, read with the model's own tokenizer where the task is a language model's folder."""
    if job.task.startswith(task.HUGGING_FACE) and not task.check(job):
        return huggingface.with_tokenizer(job, notify)
    return job.data


def _checked(job: Job, data: Data, convert: Callable[[], Prepared]) -> Prepared:
    problems = task.check(job)
    try:
        prepared = convert()
    except InputError as error:
        raise _together(problems, error) from None
    problems += check_columns(prepared, data, Wanted.of(job, task.functions(job)))
    if problems:
        raise JobError(problems)
    return prepared


def _together(problems: list[Problem], error: InputError) -> InputError:
    if not problems:
        return error
    if isinstance(error, JobError):
        return JobError([*problems, *error.problems])
    return JobError([*problems, Problem(error.where or "data", error.what, error.fix)])


def _settings(job: Job, prepared: Prepared, **more: Any) -> dict[str, Any]:
    return {"job": job.resolved(), "folder": job.folder, "prepared": prepared.record(), **more}


def _dry_run(cluster: LocalCluster, job: Job, prepared: Prepared) -> Facts:
    """One micro-batch forward and backward, in a process of its own, before any worker starts."""
    spec = ProcessSpec("preflight", 0, 1, "verbund.stage.preflight:work", settings=_settings(job, prepared))
    supervisor = Supervisor(cluster, job.cluster, lambda *_: None)
    try:
        (result,) = supervisor.run([spec])
    except Failed as failed:
        raise _with_trace(failed) from None
    except (Interrupt, KeyboardInterrupt):
        raise Interrupted("interrupted while the job was checked: nothing was written") from None
    if supervisor.warnings:
        raise ClusterLost(supervisor.warnings[0])  # no worker can be started any more
    if result["problems"]:
        raise JobError([Problem(p["where"], p["what"], p["fix"]) for p in result["problems"]])
    facts = Facts(**result["facts"])
    available = _available_bytes()
    need = facts.worker_bytes * job.world
    divided = job.world > job.strategy.mesh.get("data", 1)
    if available is not None and need > available:
        fit = max(available // max(facts.worker_bytes, 1), 0)
        fixes = [f"use at most {fit} workers"] if fit and not divided else []
        fixes += [f"use the mesh {name}" for name, size in facts.other_meshes.items() if size * job.world <= available]
        raise InputError(
            f"{job.world} worker{'s' if job.world > 1 else ''} need about {need / 1e9:.1f} GB of memory ("
            f"{'estimated from' if divided else 'measured in'} a dry run of one), {available / 1e9:.1f} GB are free",
            where="strategy.mesh",
            fix=", or ".join(
                [*fixes, "a smaller `train.micro_batch`" if fixes else "Use a smaller `train.micro_batch`"]
            ),
        )
    return facts


def _available_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _newest(run: Run) -> tuple[Path | None, list[str]]:
    if not any(run.checkpoints.glob("step-*")):
        return None, ["no checkpoint was saved: the run starts anew"]
    return checkpoint.newest_valid(run.checkpoints)


def _chosen(run: Run, step: int | None) -> Path:
    """The checkpoint to evaluate, verified."""
    if step is None:
        path, warnings = checkpoint.newest_valid(run.checkpoints)
        for warning in warnings:
            print(f"verbund: {warning}", file=sys.stderr)  # noqa: T201
        return path
    path = checkpoint.folder(run.checkpoints, step)
    checkpoint.verify(path)
    return path


def _evaluation_job(job: Job, workers: int | None) -> Job:
    changes = {"strategy.mesh": {"data": workers}} if workers is not None else {}
    return Job.build(job.resolved(), changes, source="arguments", folder=Path(job.folder)) if changes else job


def _typed(source: str) -> str:
    """What the user typed as a source is relative to where they are, not to the job."""
    return source if source.startswith("sklearn:") or not source.strip() else os.path.abspath(source)


def _evaluate(
    cluster: LocalCluster, job: Job, prepared: Prepared, entry: str, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    return _supervised(cluster, job, _workers(job, entry, _settings(job, prepared, **settings)))


def _supervised(cluster: LocalCluster, job: Job, specs: list[ProcessSpec]) -> list[dict[str, Any]]:
    """The results of processes that are watched until they end."""
    supervisor = Supervisor(cluster, job.cluster, lambda *_: None)
    try:
        results = supervisor.run(specs)
    except Failed as failed:
        raise _with_trace(failed) from None
    except (Interrupt, KeyboardInterrupt):
        raise Interrupted("interrupted: nothing was written") from None
    return results


def _workers(job: Job, entry: str, settings: dict[str, Any], generation: int = 1) -> list[ProcessSpec]:
    return [ProcessSpec("worker", rank, job.world, entry, generation, settings) for rank in range(job.world)]


def _with_trace(failed: Failed) -> VerbundError:
    error = failed.error
    error.trace = failed.failures[0].trace
    return error


# -- training ----------------------------------------------------------------------------------------------------


def _train(
    cluster: LocalCluster,
    run: Run,
    job: Job,
    prepared: Prepared,
    facts: Facts,
    source: Path | None,
    quiet: bool,
    interrupts: Interrupts,
    warnings: list[str] | None = None,
) -> Run:
    generation = run.begin_attempt()
    _keep_schema(run, job, prepared)
    journal = Journal(run.journal, "supervisor", 0, generation, limit_mb=job.observe.journal_mb)
    progress = Progress(facts.total_steps, job.train.seconds, quiet)
    commits = Commits(run, job.world, job.checkpoint, journal)
    for note in [*facts.notes, *(warnings or [])]:
        journal.event("note", text=note)
        progress.message(note)
    journal.event("membership", generation=generation, workers=job.world)

    board = _board(run, job)
    meter = EnergyMeter()
    meter.start()

    def handle(process: Process, message: Message) -> None:
        fields = message.fields
        if message.kind == "progress":
            meter.joules()  # often enough that no counter wraps unseen
            progress.update(fields["step"], fields["loss"], fields["samples_per_second"])
            if board is not None:
                board.step(fields["step"], fields["loss"], samples_per_second=fields["samples_per_second"])
        elif message.kind == "validation":
            progress.validation(fields["step"], fields["metrics"])
            if board is not None:
                board.validation(fields["step"], fields["metrics"])
        elif message.kind == "saved":
            if warning := commits.saved(fields):
                progress.message(warning)
        elif message.kind == "note":
            journal.event("note", text=fields["text"])
            progress.message(fields["text"])

    settings = _settings(
        job,
        prepared,
        run=str(run.path.resolve()),
        checkpoint=str(source) if source else None,
        total_steps=facts.total_steps,
        costs=facts.costs,
        deferred=facts.deferred,
        data=continuing.data_of(prepared),
    )
    supervisor = Supervisor(cluster, job.cluster, handle, interrupts)
    start = time.monotonic()
    status = "done"
    cause: VerbundError | None = None
    result: dict[str, Any] = {}
    try:
        result = supervisor.run(_workers(job, "verbund.stage.train:work", settings, generation))[0]
    except Failed as failed:
        cause = _with_trace(failed)
        if isinstance(cause, ClusterLost):
            go_on = f"`verbund resume {run.path}` continues from the last checkpoint"
            cause.fix = f"{cause.fix}. {go_on}" if cause.fix else go_on
        for failure in failed.failures:
            journal.event(
                "failure",
                process=failure.process,
                error=failure.error.record(),
                secondary=failure.secondary,
                trace=failure.trace,
            )
    finally:
        for warning in supervisor.warnings:
            journal.event("note", text=warning)
            progress.message(warning)
        progress.close()
        if board is not None:
            board.close()
    if (joules := meter.joules()) is not None:
        journal.totals("energy", joules=joules, how=meter.how)
    if cause is None:
        cause = _not_kept(run, commits, result["steps"], generation, job.world)
        if cause is None and result["stopped_by"] == "interrupt":
            cause = _stopped(run, result)
    if cause is not None:
        status = "interrupted" if isinstance(cause, Interrupted) else "failed"
    journal.event(
        "stopped",
        status=status,
        cause=cause.record() if cause else None,
        ended_by=result.get("stopped_by"),
        seconds=round(time.monotonic() - start, 3),
    )
    journal.close()
    try:
        _sum_up(run, job, status, cause, result, [*commits.warnings, *supervisor.warnings])
        if cause is not None:
            cause.run = run.path
    except VerbundError as error:
        cause = cause or error  # the first one
    if cause is not None:
        raise cause
    if interrupts.count:
        raise Interrupted("interrupted, but the training was done: nothing is missing", where=str(run.path))
    return run


def _not_kept(run: Run, commits: Commits, step: int, generation: int, world: int) -> VerbundError | None:
    """Why what was trained is not whole on disk, if so: then the run has failed, whatever the workers say."""
    try:
        run.check_there(*(f"worker-{rank}-{generation}.jsonl" for rank in range(world)))
        commits.check_saved(step)
    except RunFailed as error:
        return error
    return None


def _keep_schema(run: Run, job: Job, prepared: Prepared) -> None:
    """The run keeps what other data need to be read as its training set was."""
    if prepared.train is None:
        return
    columns = None if job.task.startswith(task.HUGGING_FACE) else needed(job.data, task.functions(job))
    try:
        schema.keep(Path(prepared.train), run.path, columns)
    except OSError as error:
        raise RunFailed(f"cannot be written: {error.strerror}", where=str(run.path / schema.FOLDER)) from None


def _stopped(run: Run, result: dict[str, Any]) -> Interrupted:
    return Interrupted(
        f"interrupted after step {result.get('steps')}",
        where=str(run.path),
        fix=f"`verbund resume {run.path}` continues",
    )


def _board(run: Run, job: Job) -> Any:
    """What writes TensorBoard's event files while the run goes on, if the job wants them."""
    if not job.observe.tensorboard:
        return None
    from verbund.observe.tensorboard import Board

    return Board(run.path)


def _sum_up(
    run: Run, job: Job, status: str, cause: VerbundError | None, result: dict[str, Any], warnings: list[str]
) -> None:
    from verbund.observe.report import write_report
    from verbund.observe.summary import summarise

    summary = summarise(
        run.path,
        status=status,
        cause=cause.record() if cause else None,
        strategy=job.strategy.model_dump(),
        world=job.world,
        ended_by=result.get("stopped_by"),
    )
    summary |= {"attempt": run.attempt, "warnings": warnings}
    run.write_summary(summary)
    write_report(run.path, summary)
