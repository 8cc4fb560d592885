"""The command `verbund federate server`: rounds with clients that dial in, until the job's rounds are done.

The main thread supervises the process that aggregates, which has torch and the task; a thread holds the rounds; each
client has one of its own. What counts is in the round journal, so that the whole can be killed and started again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbund import checkpoint
from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.supervisor import Failed, Supervisor
from verbund.comm.wire import Certificates, Closed, Deadline, Enrolled, Listener, listen
from verbund.errors import InputError, Interrupted, RunFailed, VerbundError
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.round import Event, Phase, Terms
from verbund.exchange.federated.round_journal import RoundJournal
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.run import Run
from verbund.stage import before
from verbund.stage.federated.desk import Desk
from verbund.stage.federated.offer import Offer
from verbund.stage.federated.orders import Orders
from verbund.stage.federated.outcome import close_run
from verbund.stage.processes import with_trace

FOLDER = "federated"
"""What a run has of its rounds."""
_STEP_SECONDS = 3600.0
_TURN = 0.5


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
    held = exchange.round
    assert job.train.steps is not None, "the offer has asked for it"
    return Terms(
        rounds=job.train.steps,
        cohort=cohort,
        quorum=held.quorum_of(cohort),
        over_selection=held.over_selection,
        attempts=held.attempts,
        seed=job.seed,
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
    offer = Offer.of(job)
    terms = terms_of(job)
    run = _run(job, directory)
    enrolment = Enrolment(federation) if federation is not None and certificates is None else None
    credentials = certificates or (Enrolled(enrolment.identity, enrolment.known) if enrolment else None)
    with run.lock(), Interrupts() as interrupts, before.cluster_of(job) as cluster:
        listener = listen(f"tcp:{address}", credentials)
        try:
            server = _Server(job, run, offer, terms, enrolment, listener, notify)
            notify(f"listening at {listener.address.removeprefix('tcp:')}; run: {run.path}")
            if enrolment is not None:
                notify(f"certificate: {enrolment.identity.fingerprint}")
            return server.run(cluster, interrupts)
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


class _Server:
    """One life of a server.

    Args:
        job, run, offer, terms, enrolment: see `serve`.
        listener: for clients.
        notify: tells whoever runs it.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        offer: Offer,
        terms: Terms,
        enrolment: Enrolment | None,
        listener: Listener,
        notify: before.Notify,
    ) -> None:
        self._job, self._run, self._offer, self._notify = job, run, offer, notify
        self._clients = job.strategy.exchange.clients or terms.cohort
        self._listener = listener
        self._settings = job.strategy.exchange.round
        self._orders = Orders()
        self._begun = time.monotonic()
        self._since = time.monotonic()
        """When the phase began, in this life of the server."""
        self._times: list[dict[str, Any]] = []
        self._journal = RoundJournal(run.path / FOLDER, terms, self._told)
        begun = self._journal.begun
        if begun is not None and begun["offer"] != offer.digest:
            fix = "Give the job and the task file as they were, or another `--run`"
            raise InputError("this run was begun with another job or task file", where=str(run.path), fix=fix)
        self._desk = Desk(self._journal, offer, self._settings, enrolment, self._screen, notify)
        self._error: VerbundError | None = None
        self._stopping = threading.Event()

    def run(self, cluster: Cluster, interrupts: Interrupts) -> Run:
        """Serves until the rounds are done; the run."""
        self._run.begin_attempt()
        settings = {
            "job": self._job.resolved(),
            "folder": str(Path(self._job.folder).resolve()),
            "run": str(self._run.path),
            "content": str(self._run.path / FOLDER),
            "clients": self._clients,
        }
        spec = ProcessSpec("aggregator", 0, 1, "verbund.stage.federated.aggregate:work", 1, settings)
        supervisor = Supervisor(cluster, self._job.cluster, self._orders.handle, interrupts)
        rounds = threading.Thread(target=self._guarded, args=(interrupts,), name="rounds", daemon=True)
        accepting = threading.Thread(target=self._accept, name="accepting", daemon=True)
        rounds.start()
        try:
            self._accepting = accepting
            supervisor.run([spec])
        except Failed as failed:
            self._error = self._error or with_trace(failed)
        finally:
            self._orders.close(self._error)
            self._stop()
            rounds.join(30.0)
        error = self._error
        rounds_done = self._journal.rounds
        if error is None and rounds_done.phase is not Phase.DONE:
            error = Interrupted(
                f"interrupted in round {rounds_done.round}",
                where=str(self._run.path),
                fix=f"The same command with `--run {self._run.path}` goes on",
            )
        self._journal.close()
        return close_run(self._run, self._job, self._desk.clients, error, time.monotonic() - self._begun)

    # The thread of the rounds

    def _guarded(self, interrupts: Interrupts) -> None:
        try:
            self._hold(interrupts)
        except VerbundError as error:
            self._error = self._error or error
        except Exception as error:
            failure = RunFailed(f"the server failed: {type(error).__name__}: {error}")
            self._error = self._error or failure
            raise
        finally:
            self._orders.end()

    def _hold(self, interrupts: Interrupts) -> None:
        journal, desk = self._journal, self._desk
        if journal.begun is None:
            first = self._orders.do({"order": "initial"}, _STEP_SECONDS)
            journal.begin(offer=self._offer.digest, task=self._offer.task_digest, **_files(first))
        else:
            self._notify(f"going on in round {journal.rounds.round}")
            self._orders.do({"order": "load", "sha256": journal.current, "rule": journal.rule}, _STEP_SECONDS)
        self._since = time.monotonic()
        self._accepting.start()
        while not interrupts.count and journal.rounds.phase not in (Phase.DONE, Phase.FAILED):
            if journal.rounds.phase is Phase.AGGREGATING:
                self._aggregate()
                continue
            with desk.changed:
                if not self._turn():
                    desk.changed.wait(self._wait())
        if journal.rounds.phase is Phase.FAILED:
            self._farewell(interrupts)
            raise RunFailed(f"round {journal.rounds.round} failed: {journal.rounds.why}", where=str(self._run.path))
        if journal.rounds.phase is Phase.DONE:
            self._last_evaluation(interrupts)
            self._save()
        desk.ending = True
        self._farewell(interrupts)

    def _turn(self) -> bool:
        """Does what is due; whether anything was. Within `changed`."""
        rounds, desk = self._journal.rounds, self._desk
        passed = time.monotonic() - self._since
        events: list[Event] = []
        if rounds.phase is Phase.SELECTING:
            events = rounds.select(desk.available(), passed >= self._settings.gather)
        elif rounds.phase is Phase.TRAINING:
            for name in desk.lost():
                events += rounds.report(name, rounds.round, "lost", "no connection")
            events = events or (rounds.expired() if passed >= self._settings.deadline else [])
        self._journal.record(events)
        if events:
            desk.changed.notify_all()
        return bool(events)

    def _wait(self) -> float:
        """Seconds until something may be due by itself. Within `changed`."""
        rounds, desk = self._journal.rounds, self._desk
        limit = self._settings.gather if rounds.phase is Phase.SELECTING else self._settings.deadline
        due = [self._since + limit - time.monotonic()]
        asked = [name for name, member in rounds.members.items() if member.state == "asked"]
        due += [self._settings.lost_after - gone for name in asked if (gone := desk.without(name)) > 0]
        return min(max(min(due), 0.01), _TURN)  # an interrupt wakes nobody

    def _aggregate(self) -> None:
        journal, rounds = self._journal, self._journal.rounds
        updates = [rounds.updates[name] for name in rounds.closed]
        order = {
            "order": "step",
            "sha256": journal.current,
            "rule": journal.rule,
            "round": rounds.round,
            "clients": len(self._desk.clients),
            "updates": [_told_update(update) for update in updates],
        }
        found = self._orders.do(order, _STEP_SECONDS)
        with self._desk.changed:
            if refused := found.get("refused"):
                for name, why in refused.items():
                    self._notify(f"the update of {name} is refused: {why}")
                    journal.record(rounds.unusable(name, why))
            else:
                journal.record(rounds.stepped({**_files(found), "metrics": found["metrics"], "loss": found["loss"]}))
            self._desk.changed.notify_all()

    def _last_evaluation(self, interrupts: Interrupts) -> None:
        """Waits for what those clients say of the final model that are there, and sums it up."""
        desk, journal = self._desk, self._journal
        version = journal.rounds.version
        if journal.evaluated is not None:
            return
        deadline = time.monotonic() + min(self._settings.deadline, self._settings.gather)

        def missing() -> list[str]:
            known = {event["client"] for event in journal.metrics if event["version"] == version}
            return [name for name in desk.available() if name not in known]

        with desk.changed:
            while missing() and time.monotonic() < deadline and not interrupts.count:
                desk.changed.wait(_TURN)
            told = [event for event in journal.metrics if event["version"] == version and event["state"] is not None]
            states = {event["client"]: event["state"] for event in told}
        found = self._orders.do({"order": "metrics", "states": states}, _STEP_SECONDS)
        with desk.changed:
            journal.record([{"event": "evaluated", "version": version, "metrics": found["metrics"]}])

    def _save(self) -> None:
        journal = self._journal
        step = journal.rounds.version
        if (newest := checkpoint.store.latest(self._run.checkpoints)) is not None and newest.name.endswith(
            f"{step:08d}"
        ):
            return
        folder = checkpoint.store.partial_folder(self._run.checkpoints, step)
        part = self._orders.do({"order": "save", "sha256": journal.current, "folder": str(folder)}, _STEP_SECONDS)
        checkpoint.store.commit(self._run.checkpoints, step, [part["part"]], {"step": step, "samples": 0})

    def _farewell(self, interrupts: Interrupts) -> None:
        """Lets clients that are there hear of the end."""
        desk = self._desk
        deadline = time.monotonic() + 10.0
        with desk.changed:
            desk.changed.notify_all()
            while desk.waited_for() and time.monotonic() < deadline and interrupts.count < 2:
                desk.changed.wait(_TURN)

    def _screen(self, digest: str, facts: Mapping[str, Any]) -> str | None:
        order = {"order": "screen", "sha256": self._journal.current, "update": {**facts, "sha256": digest}}
        refused = self._orders.do(order, _STEP_SECONDS).get("refused")
        return None if refused is None else str(refused)

    def _told(self, event: Event) -> None:
        """What is shown of an event that has happened."""
        what = event["event"]
        if what in ("round", "abandoned", "stepped", "closed"):
            self._since = time.monotonic()
        match what:
            case "round":
                many = len(event["cohort"])
                self._notify(f"round {event['round']}: {many} client{'s' * (many != 1)} train")
            case "abandoned":
                self._notify(f"round {event['round']}, attempt {event['attempt']}: {event['why']}")
            case "stepped":
                loss = event["loss"]
                told = "" if loss is None else f", loss {loss:.4g}"
                values = "".join(f", {k} {v:.4g}" for k, v in event["metrics"].items() if isinstance(v, float))
                former = f"; before it{values}" if values else ""
                self._notify(f"round {event['round']} of {self._journal.rounds.terms.rounds} done{told}{former}")

    # The threads of the clients

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection = self._listener.accept(1.0)
            except Deadline:
                continue
            except Closed:
                return
            threading.Thread(target=self._desk.welcome, args=(connection,), name="client", daemon=True).start()

    def _stop(self) -> None:
        self._stopping.set()
        with self._desk.changed:
            self._desk.changed.notify_all()


def _files(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"sha256": found["sha256"], "rule": found["rule"]}


def _told_update(update: Event) -> dict[str, Any]:
    """What the aggregator needs of an update."""
    kept = ("client", "sha256", "weight", "local_steps", "base_version", "sums", "state")
    return {key: update[key] for key in kept if key in update}
