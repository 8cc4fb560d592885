"""One start of a training: workers, progress, checkpoints, and what the run comes to."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from verbund import task
from verbund.cluster.islands import Islands
from verbund.cluster.membership import Era, Membership
from verbund.cluster.process import Cluster, Process, ProcessSpec
from verbund.cluster.quorum import Quorum
from verbund.cluster.replacements import Budget, Replacements
from verbund.cluster.requests import Requests
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.comm.wire import Message
from verbund.data import schema
from verbund.data.prepare import Prepared, needed
from verbund.errors import ClusterLost, InputError, Interrupted, RunFailed, VerbundError
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.observe.energy import EnergyMeter
from verbund.observe.events import Journal, file_name
from verbund.observe.network import Links
from verbund.observe.progress import Progress
from verbund.run import Run
from verbund.stage import continuing, network, refill
from verbund.stage.before import Facts, settings_of
from verbund.stage.commits import Commits
from verbund.stage.elastic import bounds, goes_on, leaves_out, unscalable
from verbund.stage.processes import units, with_servers, with_trace, workers
from verbund.stage.slow_workers import SlowWorkers
from verbund.stage.stopping import Promises


class Preempted(ClusterLost):
    """A process was asked by its machine to end, and all have ended, with a checkpoint of where they were."""


def attempt(
    cluster: Cluster,
    run: Run,
    job: Job,
    prepared: Prepared,
    facts: Facts,
    source: Path | None,
    quiet: bool,
    interrupts: Interrupts,
    budget: Budget,
    warnings: list[str] | None = None,
) -> Run:
    cluster.share([run.path])
    if job.strategy.exchange.served and cluster.apart:
        raise InputError(
            f"does not see {run.path}, where parameter servers keep what must outlive a host",
            where=f"host {cluster.apart[0]}",
            fix="Use a folder that all hosts share (`--run`), or another exchange",
        )
    generation = run.begin_attempt()
    keep_schema(run, job, prepared)
    journal = Journal(
        run.journal, "supervisor", 0, generation, limit_mb=job.observe.journal_mb, address=cluster.address
    )
    progress = Progress(facts.total_steps, job.train.seconds, quiet)
    commits = Commits(run, _parts(job), job.checkpoint, journal)
    for note in facts.notes:
        journal.event("note", text=note, mesh=True)
        progress.message(note)
    if (text := refill.note(job)) is not None:
        warnings = [*(warnings or []), text]
    for note in warnings or []:
        journal.event("note", text=note)
        progress.message(note)
    comes_and_goes = goes_on(job)
    journal.event("membership", generation=generation, workers=job.world, joint=comes_and_goes)

    board = _board(run, job)
    meter = EnergyMeter()
    meter.start()

    links = Links()
    slow = SlowWorkers(job.strategy)

    def handle(process: Process, message: Message) -> None:
        fields = message.fields
        if message.kind == "progress":
            meter.joules()  # often enough that no counter wraps unseen
            if cluster.address is not None:
                links.sample()  # of connections that are closed at the end the last count holds
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
        elif message.kind == "regained":
            journal.event("recovery", **{key: fields[key] for key in ("how", "step", "again")})
            progress.message(_regained(**fields))
        elif message.kind == "wish":
            promises.wish(fields["reason"])
            if quorum is not None:
                quorum.closing = True
        elif message.kind == "promise":
            promises.promise(process.spec.rank, fields["step"])
        elif message.kind == "paces":
            for text in slow.record(fields["rows"]):
                mention(text)
        elif message.kind == "note":
            mention(fields["text"])

    state = continuing.state_of(source)
    settings = settings_of(
        job,
        prepared,
        run=str(run.path.resolve()),
        checkpoint=str(source) if source else None,
        total_steps=facts.total_steps,
        costs=facts.costs,
        deferred=facts.deferred,
        probe=facts.probe,
        data=continuing.data_of(prepared),
    )
    start = time.monotonic()
    if job.strategy.exchange.served:
        shutil.rmtree(run.servers, ignore_errors=True)  # of an attempt that was killed
        settings |= _of_servers(job, facts, state, start)
        specs = with_servers(cluster, job, settings, generation)
    else:
        entry = "verbund.stage.federated.simulate" if job.strategy.exchange.federated else "verbund.stage.train"
        specs = workers(job, f"{entry}:work", settings, generation)
    replaced: dict[tuple[str, int], int] = {}

    def tell(fresh: list[ProcessSpec], why: str) -> None:
        replaced.update({(spec.role, spec.rank): spec.life for spec in fresh})
        names = ", ".join(spec.name for spec in fresh)
        journal.event("replacement", processes=names, why=why)
        progress.message(f"{why}: another process takes its place")

    def tell_members(text: str, replaced: str) -> None:
        if replaced:
            journal.event("replacement", processes=replaced, why=text)
        else:
            journal.event("note", text=text)
        progress.message(text)

    def tell_era(era: Era) -> None:
        members = list(era.members)
        journal.event("membership", generation=generation, workers=len(members), era=era.number, members=members)

    def tell_islands(ranks: list[int]) -> None:
        journal.event("membership", generation=generation, workers=len(ranks), era=0, members=ranks)

    def mention(text: str) -> None:
        journal.event("note", text=text)
        progress.message(text)

    def tell_left(era: Era, broken: bool) -> None:
        assert quorum is not None
        tell_era(Era(era.number, tuple(quorum.ranks())))
        if broken:
            promises.settle()

    replacements = Replacements(units(job, specs), budget, tell)
    islands = None
    if job.strategy.exchange.served and unscalable(job) is None:
        islands = Islands(replacements.units[0], job.strategy.islands, bounds(job), tell_members, tell_islands)
    membership = Membership(specs, budget, bounds(job), tell_members, tell_era) if comes_and_goes else None

    quorum = None
    if leaves_out(job):
        exchange, islands_ = job.strategy.exchange, job.strategy.islands
        least, size = exchange.least(islands_), job.world // islands_
        quorum = Quorum(islands_, size, least, exchange.grace, job.cluster.step_deadline, mention, tell_left)
    requests = _requests(run) if comes_and_goes or islands is not None else None
    supervisor = Supervisor(
        cluster, job.cluster, handle, interrupts, replacements, membership, requests, islands, quorum
    )
    promises = Promises(quorum.ranks if quorum is not None else lambda: range(job.world), supervisor.tell_all)
    status = "done"
    cause: VerbundError | None = None
    result: dict[str, Any] = {}
    try:
        if job.cluster.spread and len(job.cluster.hosts) > 1:
            journal.event("network", **network.measure(cluster, job, interrupts))
        result = supervisor.run(specs)[0]
    except Failed as failed:
        cause = with_trace(failed)
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
        if cluster.address is not None:
            journal.totals("links", links=links.sample(), wire=links.wire())
        for warning in supervisor.warnings:
            journal.event("note", text=warning)
            progress.message(warning)
        progress.close()
        if board is not None:
            board.close()
        if requests is not None:
            requests.close()
    shutil.rmtree(run.requests, ignore_errors=True)
    shutil.rmtree(run.servers, ignore_errors=True)
    commits.discard_rest()
    if (joules := meter.joules()) is not None:
        journal.totals("energy", joules=joules, how=meter.how)
    if cause is None:
        lives = {r: replaced.get(("worker", r), 0) for r in range(job.world)}
        if membership is not None:
            lives = membership.lives()
        if quorum is not None:
            lives = {rank: lives[rank] for rank in quorum.ranks()}
        names = [file_name("worker", rank, generation, life) for rank, life in lives.items()]
        cause = _not_kept(run, commits, result["steps"], names)
        if cause is None and result["stopped_by"] == "interrupt":
            begins_again = supervisor.preempted is not None and not interrupts.count
            cause = Preempted(f"{supervisor.preempted} was asked to end") if begins_again else _stopped(run, result)
    if cause is not None:
        status = "interrupted" if isinstance(cause, (Interrupted, Preempted)) else "failed"
    journal.event(
        "stopped",
        status=status,
        cause=cause.record() if cause else None,
        ended_by=result.get("stopped_by"),
        steps=result.get("steps"),
        samples=result.get("samples"),
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


def _regained(how: str, step: int, again: int) -> str:
    whose = "peers'" if how == "peers" else "mirrors in"
    many = {0: "no step is", 1: "one step is"}.get(again, f"{again} steps are")
    return f"training goes on after step {step} from {whose} memory; {many} done again"


def _requests(run: Run) -> Requests | None:
    """Where other commands ask for more or fewer workers; None where the file system has no sockets."""
    try:
        return Requests(run.requests)
    except (InputError, OSError):
        return None


def _parts(job: Job) -> int:
    """How many parts make a checkpoint: one of each worker; or of each server, and of the workers of one island."""
    exchange = job.strategy.exchange
    return job.world // job.strategy.islands + exchange.servers if exchange.served else job.world


def _of_servers(job: Job, facts: Facts, state: dict[str, Any], start: float) -> dict[str, Any]:
    """What servers and their coordinator have to know besides."""
    former = float(state.get("seconds", 0.0))
    kept = ("best", "best_step", "patient", "validations_without_gain")
    return {
        "begin": int(state.get("step", 0)),
        "begun": start - former,
        "until": start - former + job.train.seconds if job.train.seconds is not None else None,
        "judged": {key: state[key] for key in kept if key in state},
        "tickets_per_epoch": facts.tickets_per_epoch,
        "validates": facts.validation_samples > 0,
    }


def _not_kept(run: Run, commits: Commits, step: int, journals: list[str]) -> VerbundError | None:
    """Why what was trained is not whole on disk, if so: then the run has failed, whatever the workers say."""
    try:
        run.check_there(*journals)
        commits.check_saved(step)
    except RunFailed as error:
        return error
    return None


def keep_schema(run: Run, job: Job, prepared: Prepared) -> None:
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
        trained=result,
    )
    summary |= {"attempt": run.attempt, "warnings": warnings}
    run.write_summary(summary)
    write_report(run.path, summary)
