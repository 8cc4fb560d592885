"""The command `verbund federate server`: rounds with clients that dial in, until the job's rounds are done.

The main thread supervises the process that aggregates, which has torch and the task; a thread holds the rounds; each
client has one of its own. What counts is in the round journal, so that the whole can be killed and started again.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.comm.wire import Certificates, Enrolled, Listener, listen
from verbund.errors import InputError, Interrupted, RunFailed, VerbundError
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.round import Phase, Terms
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.run import Run
from verbund.stage import before
from verbund.stage.federated import packages
from verbund.stage.federated.offer import Offer
from verbund.stage.federated.orders import Orders
from verbund.stage.federated.outcome import Recorder, close_run
from verbund.stage.federated.server import Server
from verbund.stage.processes import with_trace

FOLDER = "federated"
"""What a run has of its rounds."""


def terms_of(job: Job, clients: int | None = None) -> Terms:
    """What the rounds of a job go by.

    Raises:
        InputError: if it does not say how many clients make a round.
    """
    exchange = job.strategy.exchange
    known = clients or exchange.clients
    if known is None and not isinstance(exchange.cohort, int):
        fix = "Give `strategy.exchange.clients`, how many there are, or a whole number as `strategy.exchange.cohort`"
        raise InputError("the cohort is a share of nobody knows how many clients", where="job", fix=fix)
    cohort = exchange.cohort_size(known or 1)
    if exchange.secure is not None and cohort < exchange.secure.minimum:
        what = f"a cohort of {cohort} is less than `secure.minimum`, {exchange.secure.minimum}"
        raise InputError(what, where="job, strategy.exchange.cohort", fix="Let more clients take part in a round")
    held = exchange.round
    assert job.train.steps is not None, "the offer has asked for it"
    buffer = (exchange.rule.buffer or cohort) if exchange.rule.name == "fedbuff" else 0
    if buffer > cohort:
        what = f"a buffer of {buffer} updates is more than the {cohort} clients that train at a time"
        raise InputError(what, where="job, strategy.exchange.rule.buffer", fix="Lower it, or raise the cohort")
    if buffer and held.over_selection > 1.0:
        what = "`fedbuff` waits for nobody, so that nobody need be asked in vain"
        raise InputError(what, where="job, strategy.exchange.round.over_selection", fix="Leave it out")
    return Terms(
        rounds=job.train.steps,
        cohort=cohort,
        quorum=max(held.quorum_of(buffer or cohort), exchange.secure.minimum if exchange.secure is not None else 1),
        over_selection=held.over_selection,
        attempts=held.attempts,
        seed=job.seed,
        secure=exchange.secure is not None,
        buffer=buffer,
    )


def serve(
    job: Job,
    address: str,
    federation: Path | None,
    certificates: Certificates | None = None,
    directory: Path | None = None,
    *,
    quiet: bool = True,
) -> Run:
    """Holds a job's rounds until they are done.

    Args:
        job: whose exchange is `federated`.
        address: HOST:PORT to listen at.
        federation: the folder with the server's identity and those of its clients.
        certificates: instead of it, certificates that an authority has signed.
        directory: the run; one that was begun is gone on with.
        quiet: no progress on standard error.

    Raises:
        InputError: if the job cannot be trained so, or the run is another job's.
        RunFailed: if a round failed too often, or aggregation did.
        Interrupted: after Ctrl-C or SIGTERM; the same command goes on.
    """
    notify = before.notifier(quiet)
    Offer.of(job)  # refuses what clients could not do
    packages.check(job)
    terms = terms_of(job)
    run = _run(job, directory)
    enrolment = Enrolment(federation) if federation is not None and certificates is None else None
    credentials = certificates or (Enrolled(enrolment.identity, enrolment.known) if enrolment else None)
    with run.lock(), Interrupts() as interrupts, before.cluster_of(job) as cluster:
        listener = listen(f"tcp:{address}", credentials)
        try:
            notify(f"listening at {listener.address.removeprefix('tcp:')}; run: {run.path}")
            if enrolment is not None:
                notify(f"certificate: {enrolment.identity.fingerprint}")
            return _serve(job, run, terms, enrolment, listener, cluster, interrupts, notify)
        finally:
            listener.close()


def _run(job: Job, directory: Path | None) -> Run:
    """A new run, or the one that is there."""
    if directory is not None and (directory / "job.toml").is_file():
        run = Run.open(directory)
        if not (run.path / FOLDER).is_dir():
            raise InputError("is no run of a federated server", where=str(directory), fix="Choose another directory")
        return run
    return Run.create(directory, job)


def _serve(
    job: Job,
    run: Run,
    terms: Terms,
    enrolment: Enrolment | None,
    listener: Listener,
    cluster: Cluster,
    interrupts: Interrupts,
    notify: before.Notify,
) -> Run:
    generation = run.begin_attempt()
    begun = time.monotonic()
    orders = Orders()
    server = Server(job, run.path / FOLDER, run.checkpoints, terms, enrolment, orders, notify)
    recorder = Recorder(run, job, generation, server.journal.history)
    server.hears = recorder.add
    settings = {
        "job": job.resolved(),
        "folder": str(Path(job.folder).resolve()),
        "content": str(run.path / FOLDER),
        "clients": job.strategy.exchange.clients or terms.cohort,
    }
    failures: list[VerbundError] = []

    def hold() -> None:
        try:
            server.hold(listener, lambda: interrupts.count)
        except VerbundError as error:
            failures.append(error)
        except Exception as error:
            failures.append(RunFailed(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            orders.end()

    rounds = threading.Thread(target=hold, name="rounds", daemon=True)
    rounds.start()
    try:
        spec = ProcessSpec("aggregator", 0, 1, "verbund.stage.federated.aggregate:work", 1, settings)
        Supervisor(cluster, job.cluster, orders.handle, interrupts).run([spec])
    except Failed as failed:
        failures.append(with_trace(failed))
    finally:
        orders.close(failures[0] if failures else None)
        rounds.join(30.0)
        server.close()
    state = server.journal.rounds
    if not failures and state.phase is not Phase.DONE:
        fix = f"The same command with `--run {run.path}` goes on"
        failures.append(Interrupted(f"interrupted in round {state.round}", where=str(run.path), fix=fix))
    error = failures[0] if failures else None
    return close_run(run, job, recorder, server.desk.clients, error, time.monotonic() - begun)
