"""A server's turns in a secure round: it invites who has trained, and goes from exchange to exchange to the sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verbund.errors import InputError, RunFailed
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.round import Event, Phase
from verbund.exchange.federated.round_journal import RoundJournal
from verbund.job import Round
from verbund.stage.federated.desk import Desk
from verbund.stage.federated.orders import Order

_TERMS_SECONDS = 600.0


class SecureTurns:
    """What is done in the phase `securing`.

    Args:
        journal: the rounds and exchanges.
        desk: with the clients' connections, and the lock.
        settings: of the rounds.
        enrolment: with the public keys that clients were enrolled with.
        do: has the aggregator do an order within so many seconds.
    """

    def __init__(
        self,
        journal: RoundJournal,
        desk: Desk,
        settings: Round,
        enrolment: Enrolment,
        do: Callable[[Order, float], dict[str, Any]],
    ) -> None:
        self._journal, self._desk, self._settings = journal, desk, settings
        self._enrolment, self._do = enrolment, do

    def turn(self, passed: float) -> list[Event]:
        """What is due, within the desk's lock.

        Args:
            passed: seconds since the step began.
        """
        rounds, exchanges = self._journal.rounds, self._journal.exchanges
        assert exchanges is not None
        if not exchanges.open or exchanges.closing:
            return []
        expected, missing = exchanges.server.expected, exchanges.missing
        events: list[Event] = []
        for name, why in exchanges.cheated.items():
            if name not in expected:
                events += rounds.report(name, rounds.round, "refused", why)
        for name in missing:
            if self._desk.without(name) >= self._settings.lost_after:
                events += rounds.report(name, rounds.round, "lost", "no connection")
        if events:
            return events
        gone = frozenset(name for name in missing if rounds.members[name].state != "updated")
        over = passed >= self._settings.step_deadline
        if why_not := exchanges.shortfall(missing if over else gone):
            if not over and any(rounds.members[name].state == "lost" for name in gone):
                return []  # who has lost its connection may be back in time
            return rounds.unsummed(why_not, exchanges.step == "reveal")
        if missing - gone and not over:
            return []
        if exchanges.step != "reveal":
            return exchanges.advance()
        exchanges.closing = True
        return []

    @property
    def due(self) -> bool:
        """Whether `proceed` has something to do."""
        exchanges = self._journal.exchanges
        assert exchanges is not None
        return self._journal.rounds.phase is Phase.SECURING and (not exchanges.open or exchanges.closing)

    def proceed(self) -> None:
        """Invites a cohort, or takes the masks off the sum: what takes so long that nothing may wait for it.

        Raises:
            VerbundError: the aggregator's.
        """
        exchanges = self._journal.exchanges
        assert exchanges is not None
        if exchanges.closing:
            self._finish()
        else:
            self._invite()

    def _invite(self) -> None:
        journal, rounds, exchanges = self._journal, self._journal.rounds, self._journal.exchanges
        assert exchanges is not None
        cohort = rounds.closed
        order = {"order": "terms", "round": rounds.round, "privacy": journal.privacy, "clients": len(cohort)}
        found = self._do(order, _TERMS_SECONDS)
        with self._desk.changed:
            try:
                if not found["enough"]:
                    raise InputError(f"the privacy budget is not enough for a round of {len(cohort)} clients")
                run, length, headroom = journal.head.log, found["length"], found["headroom"]
                events = exchanges.invitation(run, self._keys(cohort), length, headroom)
                events = [{**event, "round": rounds.round, "clip": found["clip"]} for event in events]
            except InputError as error:
                events = rounds.unsummed(str(error), False)
            journal.record(events)
            self._desk.changed.notify_all()

    def _keys(self, cohort: list[str]) -> Mapping[str, str]:
        """By name, the public keys with which the cohort was enrolled.

        Raises:
            InputError: if one is enrolled no more.
        """
        from verbund.exchange.federated.secure import pinned

        known = {name: certificate for certificate, name in self._enrolment.known().items()}
        if strangers := [name for name in cohort if name not in known]:
            raise InputError(f"`{strangers[0]}` is enrolled no more")
        return {name: pinned(known[name]).hex() for name in cohort}

    def _finish(self) -> None:
        journal, rounds, exchanges = self._journal, self._journal.rounds, self._journal.exchanges
        assert exchanges is not None
        cohort, cheated = len(exchanges.server.round.cohort), dict(exchanges.cheated)
        try:
            result = exchanges.finish()
        except RunFailed as error:  # also of a client that has shared its secrets wrongly
            with self._desk.changed:
                journal.record(rounds.unsummed(str(error), True))
                self._desk.changed.notify_all()
            return
        facts = {
            "sha256": journal.updates.put(result.integers.astype("<i8").tobytes()),
            "weight": result.weight,
            "cohort": cohort,
            "dropped": list(result.dropped),
            "cheated": {**cheated, **result.cheated},
        }
        with self._desk.changed:
            journal.record(rounds.summed(result.survivors, facts))
            self._desk.changed.notify_all()
