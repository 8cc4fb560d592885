"""A federated server: rounds, clients in threads of their own, and orders to the process that aggregates.

What counts is in the round journal, so that a server can be killed at any point, and the next one goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from verbund import checkpoint
from verbund.comm.wire import Closed, Deadline, Listener
from verbund.errors import InputError, RunFailed
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.round import Event, Phase, Terms
from verbund.exchange.federated.round_journal import RoundJournal
from verbund.job import Job
from verbund.stage.federated.desk import Desk
from verbund.stage.federated.offer import Offer
from verbund.stage.federated.orders import Order
from verbund.stage.federated.secure_turns import SecureTurns

_STEP_SECONDS = 3600.0
_TURN = 0.5
_QUIET_SECONDS = 5.0
"""After so long it is said whom a round waits for."""
_FAREWELL_SECONDS = 10.0


class Doing(Protocol):
    """Whoever aggregates: `Orders` to a process, or the aggregator itself."""

    def do(self, order: Order, timeout: float) -> dict[str, Any]:
        """Does an order; what came of it."""


class Server:
    """One life of a server.

    Args:
        job: what is trained.
        folder: of the round journal.
        checkpoints: where the final model goes.
        terms: what rounds go by.
        enrolment: None where certificates of an authority say who is who.
        aggregator: does what needs torch.
        notify: tells whoever runs it.

    Raises:
        InputError: if the journal is damaged or another job's.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        checkpoints: Path,
        terms: Terms,
        enrolment: Enrolment | None,
        aggregator: Doing,
        notify: Callable[[str], None],
    ) -> None:
        self._checkpoints, self._aggregator, self._notify = checkpoints, aggregator, notify
        self._settings = job.strategy.exchange.round
        self._offer = Offer.of(job)
        self._since = time.monotonic()
        """When the phase began, in this life of the server."""
        self._waits: tuple[int, int, tuple[str, ...]] | None = None
        """Of which round and attempt, and with whom there, it was said that it waits."""
        self.hears: Callable[[Event], None] = lambda event: None
        """Is called with each event after it counts."""
        secure = job.strategy.exchange.secure
        self.journal = RoundJournal(folder, terms, self._told, secure)
        begun = self.journal.begun
        if begun is not None and begun["offer"] != self._offer.digest:
            fix = "Give the job and the task file as they were, or another `--run`"
            raise InputError("this run was begun with another job or task file", where=str(folder.parent), fix=fix)
        self.desk = Desk(self.journal, self._offer, self._settings, enrolment, self._screen, notify)
        self._secure: SecureTurns | None = None
        if secure is not None:
            if enrolment is None:
                what = "secure aggregation goes by the keys that clients were enrolled with, not by an authority's"
                raise InputError(what, where="--authority", fix="Let clients enrol, or leave `secure` out")
            self._secure = SecureTurns(self.journal, self.desk, self._settings, enrolment, aggregator.do)
        self._closing = threading.Event()

    def hold(self, listener: Listener, stopped: Callable[[], int]) -> None:
        """Holds rounds until they are done.

        Args:
            listener: where clients dial.
            stopped: how often an end was asked for.

        Raises:
            RunFailed: if a round failed too often.
            VerbundError: the aggregator's.
        """
        journal, desk = self.journal, self.desk
        if journal.begun is None:
            first = self._aggregator.do({"order": "initial"}, _STEP_SECONDS)
            journal.begin(offer=self._offer.digest, task=self._offer.task_digest, **_files(first))
        else:
            self._notify(f"going on in round {journal.rounds.round}")
            journal.record([])
            load = {"order": "load", "sha256": journal.current, "rule": journal.rule, "privacy": journal.privacy}
            self._aggregator.do(load, _STEP_SECONDS)
        self._mind_budget()
        self._since = time.monotonic()
        threading.Thread(target=self._accept, args=(listener,), name="accepting", daemon=True).start()
        while not stopped() and journal.rounds.phase not in (Phase.DONE, Phase.FAILED):
            if journal.rounds.phase is Phase.AGGREGATING:
                self._aggregate()
                continue
            if self._secure is not None and self._secure.due:
                self._secure.proceed()
                continue
            with desk.changed:
                if not self._turn():
                    desk.changed.wait(self._wait())
        if journal.rounds.phase is Phase.FAILED:
            self._farewell(stopped)
            raise RunFailed(f"round {journal.rounds.round} failed: {journal.rounds.why}")
        if journal.rounds.phase is Phase.DONE:
            self._last_evaluation(stopped)
            self._save()
        desk.ending = True
        self._farewell(stopped)

    def _turn(self) -> bool:
        """Does what is due; whether anything was. Within `changed`."""
        rounds, desk = self.journal.rounds, self.desk
        passed = time.monotonic() - self._since
        events: list[Event] = []
        buffered = bool(rounds.terms.buffer) and rounds.phase is Phase.TRAINING
        if rounds.phase is Phase.SELECTING or buffered:
            there, able = desk.available(), desk.able()
            if not buffered and able is not None and (len(able) < rounds.terms.quorum or rounds.last_attempt):
                events = rounds.out_of_budget(len(able))
            else:  # those whose privacy budget is spent are not waited for
                come = able is not None and able <= set(there)
                events = rounds.select(there, come or passed >= self._settings.gather)
            if not events and passed >= _QUIET_SECONDS and (not buffered or not there):
                self._tell_waiting(there)
        if rounds.phase is Phase.TRAINING:
            for name in desk.lost():
                round_ = rounds.members[name].round or rounds.round
                events += rounds.report(name, round_, "lost", "no connection")
            events = events or (rounds.expired() if passed >= self._settings.deadline else [])
        if rounds.phase is Phase.SECURING and self._secure is not None:
            events = self._secure.turn(passed)
            if self._secure.due:
                return True
        self.journal.record(events)
        if events:
            desk.changed.notify_all()
        return bool(events)

    def _tell_waiting(self, there: list[str]) -> None:
        """Says once whom a round waits for, and again when that has changed."""
        rounds = self.journal.rounds
        needed = max(rounds.terms.available, rounds.terms.cohort)
        waits = (rounds.round, rounds.attempt, tuple(sorted(there)))
        if waits != self._waits:
            self._waits = waits
            names = f" ({', '.join(waits[2][:5])}{', …' if len(there) > 5 else ''})" if there else ""
            self._notify(f"round {rounds.round} waits: {len(there)} of {needed} clients are there{names}")

    def _wait(self) -> float:
        """Seconds until something may be due by itself. Within `changed`."""
        rounds, desk = self.journal.rounds, self.desk
        limits = {Phase.SELECTING: self._settings.gather, Phase.SECURING: self._settings.step_deadline}
        limit = limits.get(rounds.phase, self._settings.deadline)
        due = [self._since + limit - time.monotonic()]
        asked = [name for name, member in rounds.members.items() if member.state == "asked"]
        due += [self._settings.lost_after - gone for name in asked if (gone := desk.without(name)) > 0]
        return min(max(min(due), 0.01), _TURN)  # an interrupt wakes nobody

    def _aggregate(self) -> None:
        journal, rounds = self.journal, self.journal.rounds
        updates = [rounds.updates[name] for name in rounds.closed]
        order = {
            "order": "step",
            "sha256": journal.current,
            "rule": journal.rule,
            "round": rounds.round,
            "privacy": journal.privacy,
            "clients": len(self.desk.clients),
            "updates": [_told_update(update, rounds.version) for update in updates],
            **({} if journal.sum is None else {"sum": journal.sum}),
        }
        found = self._aggregator.do(order, _STEP_SECONDS)
        with self.desk.changed:
            if refused := found.get("refused"):
                for name, why in refused.items():
                    self._notify(f"the update of {name} is refused: {why}")
                    journal.record(rounds.unusable(name, why))
            else:
                told = {key: found[key] for key in ("metrics", "loss", "weight", "norm", "agreement")}
                size = journal.versions.path(journal.current).stat().st_size
                journal.record(rounds.stepped({**_files(found), **told, "size": size}))
            self.desk.changed.notify_all()
        self._mind_budget()

    def _mind_budget(self) -> None:
        """Ends the training if the next round would exceed the privacy budget."""
        journal = self.journal
        privacy = journal.privacy
        if privacy is None:
            return
        if privacy["outlook"] is not None and journal.rounds.version == 0:
            self._notify(privacy["outlook"])
        with self.desk.changed:
            if not privacy["enough"]:
                journal.record(journal.rounds.end("budget"))
            self.desk.changed.notify_all()

    def _last_evaluation(self, stopped: Callable[[], int]) -> None:
        """Waits for what those clients say of the final model that are there, and sums it up."""
        desk, journal = self.desk, self.journal
        version = journal.rounds.version
        if journal.evaluated is not None:
            return
        deadline = time.monotonic() + min(self._settings.deadline, self._settings.gather)

        def missing() -> list[str]:
            known = {event["client"] for event in journal.metrics if event["version"] == version}
            return [name for name in desk.expected(self._settings.lost_after) if name not in known]

        with desk.changed:
            while missing() and time.monotonic() < deadline and not stopped():
                desk.changed.wait(_TURN)
            told = [event for event in journal.metrics if event["version"] == version and event["state"] is not None]
            states = {event["client"]: event["state"] for event in told}
        found = self._aggregator.do({"order": "metrics", "states": states}, _STEP_SECONDS)
        with desk.changed:
            journal.record([{"event": "evaluated", "version": version, "metrics": found["metrics"]}])

    def _save(self) -> None:
        journal = self.journal
        step = journal.rounds.version
        if (newest := checkpoint.store.latest(self._checkpoints)) is not None and newest.name.endswith(f"{step:08d}"):
            return
        folder = checkpoint.store.partial_folder(self._checkpoints, step)
        part = self._aggregator.do({"order": "save", "sha256": journal.current, "folder": str(folder)}, _STEP_SECONDS)
        checkpoint.store.commit(self._checkpoints, step, [part["part"]], {"step": step, "samples": 0})

    def _farewell(self, stopped: Callable[[], int]) -> None:
        """Lets clients that are there hear of the end."""
        desk = self.desk
        deadline = time.monotonic() + _FAREWELL_SECONDS
        with desk.changed:
            desk.changed.notify_all()
            while desk.expected(_FAREWELL_SECONDS) and time.monotonic() < deadline and stopped() < 2:
                desk.changed.wait(_TURN)

    def _screen(self, digest: str, facts: Mapping[str, Any]) -> str | None:
        order = {"order": "screen", "sha256": self.journal.current, "update": {**facts, "sha256": digest}}
        refused = self._aggregator.do(order, _STEP_SECONDS).get("refused")
        return None if refused is None else str(refused)

    def _told(self, event: Event) -> None:
        """What is shown of an event that has happened."""
        self.hears(event)
        what = event["event"]
        if what in ("round", "abandoned", "stepped", "closed", "invited", "advanced", "skipped"):
            self._since = time.monotonic()
        match what:
            case "round":
                many = len(event["cohort"])
                self._notify(f"round {event['round']}: {many} client{'s' * (many != 1)} train")
            case "skipped":
                self._notify(f"round {event['round']} comes to nothing, and the model stays as it was: {event['why']}")
            case "summed" if event["dropped"] or event["cheated"]:
                gone = [f"{name} ({event['cheated'].get(name, 'no answer')})" for name in event["dropped"]]
                gone += [f"{name} ({why})" for name, why in event["cheated"].items() if name not in event["dropped"]]
                self._notify(f"round {event['round']}: the sum of {len(event['clients'])} clients; {'; '.join(gone)}")
            case "abandoned":
                self._notify(f"round {event['round']}, attempt {event['attempt']}: {event['why']}")
            case "stepped":
                loss = event["loss"]
                told = "" if loss is None else f", loss {loss:.4g}"
                values = "".join(f", {k} {v:.4g}" for k, v in event["metrics"].items() if isinstance(v, float))
                former = f"; before it{values}" if values else ""
                self._notify(f"round {event['round']} of {self.journal.rounds.terms.rounds} done{told}{former}")

    # The threads of the clients

    def _accept(self, listener: Listener) -> None:
        while not self._closing.is_set():
            try:
                connection = listener.accept(1.0)
            except Deadline:
                continue
            except Closed:
                return
            threading.Thread(target=self.desk.welcome, args=(connection,), name="client", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections, and lets go of the journal."""
        self._closing.set()
        with self.desk.changed:
            self.desk.changed.notify_all()
            self.journal.close()


def _files(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("sha256", "rule", "privacy")}


def _told_update(update: Event, version: int) -> dict[str, Any]:
    """What the aggregator needs of an update; how good another version was is not told of this one."""
    kept = ["client", "sha256", "weight", "local_steps", "base_version", "sums"]
    kept += ["state"] if update["base_version"] == version else []
    return {key: update[key] for key in kept if key in update}
