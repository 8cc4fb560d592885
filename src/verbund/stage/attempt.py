"""One start of a training: workers, progress, checkpoints, and what the run comes to."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund import task
from verbund.cluster.islands import Islands
from verbund.cluster.membership import Membership
from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.quorum import Quorum
from verbund.cluster.replacements import Budget, Replacements
from verbund.cluster.requests import Requests
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.data import schema
from verbund.data.prepare import Prepared, needed
from verbund.errors import ClusterLost, InputError, Interrupted, RunFailed, VerbundError
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.observe.events import Journal, file_name
from verbund.observe.progress import Progress
from verbund.run import Run
from verbund.stage import continuing, network, refill
from verbund.stage.before import Facts, settings_of
from verbund.stage.commits import Commits
from verbund.stage.elastic import bounds, goes_on, leaves_out, unscalable
from verbund.stage.news import News
from verbund.stage.processes import units, with_servers, with_trace, workers
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
    """Trains until the end, a failure or an interrupt, and sums up.

    Args:
        cluster: where.
        run: its folder; the caller has its lock.
        job: with the hosts that there are.
        prepared: the data.
        facts: of the dry run.
        source: the checkpoint to go on from.
        quiet: nothing on standard error.
        interrupts: the user's.
        budget: of losses, over all starts.
        warnings: for the user, to begin with.

    Raises:
        InputError, RunFailed, ClusterLost, Interrupted: as `launch.train` does.
        Preempted: if it should begin again.
    """
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
    news = News(cluster, run, job, generation, journal, progress, commits)
    for note in facts.notes:
        news.mention(note, mesh=True)
    for note in [*(warnings or []), *filter(None, [refill.note(job)])]:
        news.mention(note)
    journal.event("membership", generation=generation, workers=job.world, joint=goes_on(job))
    start = time.monotonic()
    specs = _specs(cluster, run, job, prepared, facts, source, generation, start)
    who = _Who.of(run, job, specs, budget, news)
    supervisor = Supervisor(
        cluster,
        job.cluster,
        news.hear,
        interrupts,
        who.replacements,
        who.membership,
        who.requests,
        who.islands,
        who.quorum,
    )
    ranks = who.quorum.ranks if who.quorum is not None else lambda: range(job.world)
    news.quorum, news.promises = who.quorum, Promises(ranks, supervisor.tell_all)
    result: dict[str, Any] = {}
    cause: VerbundError | None = None
    try:
        if job.cluster.spread and len(job.cluster.hosts) > 1:
            journal.event("network", **network.measure(cluster, job, interrupts))
        result = supervisor.run(specs)[0]
    except Failed as failed:
        cause = _told(failed, run, journal)
    finally:
        news.close(supervisor.warnings)
        if who.requests is not None:
            who.requests.close()
    shutil.rmtree(run.requests, ignore_errors=True)
    shutil.rmtree(run.servers, ignore_errors=True)
    commits.discard_rest()
    if cause is None:
        names = [file_name("worker", rank, generation, life) for rank, life in who.lives(news).items()]
        cause = _not_kept(run, commits, result["steps"], names)
        if cause is None and result["stopped_by"] == "interrupt":
            begins_again = supervisor.preempted is not None and not interrupts.count
            cause = Preempted(f"{supervisor.preempted} was asked to end") if begins_again else _stopped(run, result)
    status = "done" if cause is None else "failed"
    if isinstance(cause, (Interrupted, Preempted)):
        status = "interrupted"
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


@dataclass(frozen=True)
class _Who:
    """Who decides which processes take part; what does not apply to a job is None."""

    world: int
    replacements: Replacements
    membership: Membership | None
    islands: Islands | None
    quorum: Quorum | None
    requests: Requests | None

    @staticmethod
    def of(run: Run, job: Job, specs: list[ProcessSpec], budget: Budget, news: News) -> _Who:
        strategy = job.strategy
        replacements = Replacements(units(job, specs), budget, news.replacement)
        islands = membership = quorum = None
        if strategy.exchange.served and unscalable(job) is None:
            islands = Islands(replacements.units[0], strategy.islands, bounds(job), news.members, news.islands)
        if goes_on(job):
            membership = Membership(specs, budget, bounds(job), news.members, news.era)
        if leaves_out(job):
            least, size = strategy.exchange.least(strategy.islands), job.world // strategy.islands
            grace, deadline = strategy.exchange.grace, job.cluster.step_deadline
            quorum = Quorum(strategy.islands, size, least, grace, deadline, news.mention, news.left)
        requests = _requests(run) if membership is not None or islands is not None else None
        return _Who(job.world, replacements, membership, islands, quorum, requests)

    def lives(self, news: News) -> dict[int, int]:
        """By rank of the workers that were there at the end, how many processes had it before."""
        if self.membership is not None:
            return self.membership.lives()
        ranks = self.quorum.ranks() if self.quorum is not None else range(self.world)
        return {rank: news.lives.get(("worker", rank), 0) for rank in ranks}


def _specs(
    cluster: Cluster,
    run: Run,
    job: Job,
    prepared: Prepared,
    facts: Facts,
    source: Path | None,
    generation: int,
    start: float,
) -> list[ProcessSpec]:
    """The processes that a training begins with."""
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
    if job.strategy.exchange.served:
        shutil.rmtree(run.servers, ignore_errors=True)  # of an attempt that was killed
        settings |= _of_servers(job, facts, state, start)
        return with_servers(cluster, job, settings, generation)
    entry = "verbund.stage.federated.simulate" if job.strategy.exchange.federated else "verbund.stage.train"
    return workers(job, f"{entry}:work", settings, generation)


def _told(failed: Failed, run: Run, journal: Journal) -> VerbundError:
    """The first cause, and all failures in the journal."""
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
    return cause


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
