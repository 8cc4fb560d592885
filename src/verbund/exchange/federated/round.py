"""The rounds of a federated training as a state machine without clock, network or disk.

    selecting -> training [-> securing] -> aggregating -> selecting | done
                    └-> selecting (abandoned: too few updates) -> failed (too many attempts)

Under secure aggregation an update is no more than the word that a client has one; who has given it is the cohort of the
five exchanges (`secure.exchanges`), which come to a sum.

What comes from outside makes events; an event changes the state when it is applied, and nothing else does. Who writes
each event to disk before it is applied can be killed at any point: applying the same events again leads to the same
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from verbund.exchange.federated import cohort

Event = dict[str, Any]
"""Plain JSON values; `event` says what happened: round, update, failed, closed, summed, skipped, abandoned, stepped,
ended, gave_up."""


class Phase(StrEnum):
    SELECTING = "selecting"
    TRAINING = "training"
    SECURING = "securing"
    AGGREGATING = "aggregating"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Terms:
    """What rounds go by.

    Args:
        rounds: after so many server steps the training is done.
        cohort: updates that close a round.
        quorum: updates without which a round is not aggregated.
        over_selection: how many times more clients than `cohort` are asked.
        available: clients that must be there before a round begins, unless waiting for them took too long.
        attempts: how often one round is begun before the training fails.
        seed: of the draws.
        secure: whether updates are added up under masks.
        buffer: updates that make a step where nobody is waited for (`BufferedRounds`), `cohort` being how many clients
            train at a time; 0: rounds are synchronous.
    """

    rounds: int
    cohort: int
    quorum: int
    over_selection: float = 1.0
    available: int = 1
    attempts: int = 3
    seed: int = 0
    secure: bool = False
    buffer: int = 0


@dataclass
class Member:
    """A client that was asked in the round under way, or in `round`: `state` is asked, updated, failed or lost."""

    state: str = "asked"
    reason: str = ""
    round: int = 0


@dataclass(frozen=True)
class Answer:
    """What a client hears of its update: whether it counts, and if not, why.

    Args:
        final: False under secure aggregation while the sum is still to come, in which it may be or not.
    """

    counts: bool
    why: str = ""
    final: bool = True


@dataclass
class Rounds:
    """The state. `round` is the number of the one under way, from 1; it begins from version `round - 1`."""

    terms: Terms
    phase: Phase = Phase.SELECTING
    version: int = 0
    attempt: int = 1
    members: dict[str, Member] = field(default_factory=dict)
    updates: dict[str, Event] = field(default_factory=dict)
    """The update of each member that has sent one."""
    closed: list[str] = field(default_factory=list)
    """Whose updates are aggregated, in the order of their names."""
    why: str = ""
    """Of the last attempt that was abandoned, or of the failure."""
    _counted: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By client the last round that its update counted in, and the update's hash."""
    _skipped: int = 0
    """Rounds in a row whose sum was lost."""

    @property
    def round(self) -> int:
        return self.version + 1

    # What comes from outside

    def select(self, available: Iterable[str], waited_enough: bool) -> list[Event]:
        """Begins a round if enough clients are there.

        Args:
            available: the names of clients that may be asked.
            waited_enough: whether the time is over in which more could have come.
        """
        if self.phase is not Phase.SELECTING:
            return []
        names = set(available)
        terms = self.terms
        if len(names) < max(terms.available, terms.cohort) and not (waited_enough and len(names) >= terms.quorum):
            if not waited_enough:
                return []
            return self._abandon(f"{len(names)} clients were there, and the quorum is {terms.quorum}")
        count = cohort.selected(terms.cohort, terms.over_selection)
        chosen = cohort.draw(terms.seed, self.round, self.attempt, names, count)
        return [
            {"event": "round", "round": self.round, "attempt": self.attempt, "version": self.version, "cohort": chosen}
        ]

    def update(self, client: str, round_: int, digest: str, facts: Mapping[str, Any]) -> tuple[list[Event], Answer]:
        """An update came.

        Args:
            client: whose it is.
            round_: for which round.
            digest: SHA-256 of it; one that comes again is told what the first was told.
            facts: what is kept of it besides.
        """
        counted = self._counted.get(client, (0, ""))
        if round_ < self.round or self.phase in (Phase.DONE, Phase.FAILED):
            if counted == (round_, digest):
                return [], Answer(True)
            return [], Answer(False, f"it came too late: round {round_} was closed without it")
        member = self.members.get(client)
        if round_ > self.round or member is None or self.phase is Phase.SELECTING:
            return [], Answer(False, f"the client was not asked for it in attempt {self.attempt} of round {self.round}")
        if client in self.updates:
            if self.updates[client]["sha256"] == digest:
                return [], Answer(client in self.closed or self.phase is Phase.TRAINING, final=not self.terms.secure)
            return [], Answer(False, "another update of the client came first")
        if self.phase is not Phase.TRAINING:
            return [], Answer(False, f"it came too late: round {round_} was closed without it")
        return [
            {"event": "update", "round": self.round, "client": client, "sha256": digest, **facts},
        ], Answer(True, final=not self.terms.secure)

    def report(self, client: str, round_: int, state: str, reason: str) -> list[Event]:
        """A member of the round under way will send nothing: `state` failed, refused, declined or lost."""
        member = self.members.get(client)
        waited = {Phase.TRAINING: "asked", Phase.SECURING: "updated"}.get(self.phase)
        if waited is None or round_ != self.round or member is None:
            return []
        if member.state not in (waited, "lost") or (state == "lost" and member.state == "lost"):
            return []
        return [{"event": "failed", "round": self.round, "client": client, "state": state, "reason": reason}]

    def expired(self) -> list[Event]:
        """The round's deadline has passed."""
        if self.phase is not Phase.TRAINING:
            return []
        if len(self.updates) >= self.terms.quorum:
            return self._close()
        return self._abandon(self._shortfall("when its time was over"))

    def summed(self, survivors: Iterable[str], facts: Mapping[str, Any]) -> list[Event]:
        """Secure aggregation has come to a sum, which is on disk.

        Args:
            survivors: whose vectors are in it.
            facts: what is kept of it besides.
        """
        if self.phase is not Phase.SECURING:
            return []
        return [{"event": "summed", "round": self.round, "clients": sorted(survivors), **facts}]

    def unsummed(self, why: str, revealed: bool) -> list[Event]:
        """Secure aggregation has come to nothing.

        Args:
            why: it has.
            revealed: whether clients were asked for shares. If so they send no other vector in this round: the
                difference of two of its sums could be a single client's. The round is over, and the model stays as it
                was; after as many such rounds in a row as there are attempts the training fails.
        """
        if self.phase is not Phase.SECURING:
            return []
        if not revealed:
            return self._abandon(why)
        if self._skipped + 1 >= self.terms.attempts:
            return [{"event": "gave_up", "round": self.round, "attempt": self.attempt, "why": why}]
        return [{"event": "skipped", "round": self.round, "version": self.round, "why": why}]

    def stepped(self, facts: Mapping[str, Any]) -> list[Event]:
        """The updates of the closed round were aggregated, and the new parameters are on disk."""
        if self.phase is not Phase.AGGREGATING:
            return []
        return [{"event": "stepped", "round": self.round, "version": self.round, **facts}]

    def unusable(self, client: str, reason: str) -> list[Event]:
        """A closed round's update turned out not to be usable: it goes on without it."""
        if self.phase is not Phase.AGGREGATING or client not in self.closed:
            return []
        return [{"event": "unusable", "round": self.round, "client": client, "reason": reason}]

    def end(self, why: str) -> list[Event]:
        """Training ends before all rounds are done, e.g. as its target is reached."""
        return [{"event": "ended", "why": why}] if self.phase is Phase.SELECTING else []

    def settle(self) -> list[Event]:
        """What follows from the state by itself; to be asked after every event, until nothing follows."""
        short = len(self.closed) < min(self.terms.quorum, len(self.members))
        if self.phase is Phase.AGGREGATING and short and not self.terms.secure:
            return self._abandon(self._shortfall("after updates were refused"))
        if self.phase is not Phase.TRAINING:
            return []
        asked = sum(member.state == "asked" for member in self.members.values())
        if len(self.updates) >= min(self.terms.cohort, len(self.members)) or (
            asked == 0 and len(self.updates) >= self.terms.quorum
        ):
            return self._close()
        lost = sum(member.state == "lost" for member in self.members.values())
        if len(self.updates) + asked + lost < self.terms.quorum or (asked == 0 and lost == 0):
            return self._abandon(self._shortfall("and no more can come"))
        return []

    # What events do

    def apply(self, event: Event) -> None:
        """Changes the state as an event says; events that are none of the rounds' change nothing."""
        match event["event"]:
            case "round":
                self.phase = Phase.TRAINING
                self.attempt = event["attempt"]
                self.members = {name: Member() for name in event["cohort"]}
                self.updates, self.closed = {}, []
            case "update":
                self.updates[event["client"]] = event
                self.members[event["client"]] = Member("updated")
            case "failed":
                self.members[event["client"]] = Member(event["state"], event["reason"])
            case "closed":
                self.phase = Phase.SECURING if self.terms.secure else Phase.AGGREGATING
                self.closed = list(event["clients"])
            case "answered":
                self.members[event["client"]] = Member("updated")  # it was lost, and is back
            case "summed":
                self.phase, self.closed = Phase.AGGREGATING, list(event["clients"])
            case "skipped":
                self._skipped += 1
                self._next(event["version"])
            case "unusable":
                self.closed.remove(event["client"])
                del self.updates[event["client"]]
                self.members[event["client"]] = Member("refused", event["reason"])
            case "abandoned":
                self.phase, self.why = Phase.SELECTING, event["why"]
                self.attempt = event["attempt"] + 1
                self.members, self.updates, self.closed = {}, {}, []
            case "stepped":
                for client in self.closed:
                    self._counted[client] = (event["round"], self.updates[client]["sha256"])
                self._skipped = 0
                self._next(event["version"])
            case "ended":
                self.phase, self.why = Phase.DONE, event["why"]
            case "gave_up":
                self.phase, self.why = Phase.FAILED, event["why"]

    def _next(self, version: int) -> None:
        self.version, self.attempt = version, 1
        self.members, self.updates, self.closed = {}, {}, []
        self.phase = Phase.DONE if self.version >= self.terms.rounds else Phase.SELECTING

    def _close(self) -> list[Event]:
        return [{"event": "closed", "round": self.round, "attempt": self.attempt, "clients": sorted(self.updates)}]

    def _abandon(self, why: str) -> list[Event]:
        if self.attempt >= self.terms.attempts:
            return [{"event": "gave_up", "round": self.round, "attempt": self.attempt, "why": why}]
        return [{"event": "abandoned", "round": self.round, "attempt": self.attempt, "why": why}]

    def _shortfall(self, when: str) -> str:
        missing = "; ".join(
            f"{name}: {member.state}{f' ({member.reason})' if member.reason else ''}"
            for name, member in sorted(self.members.items())
            if name not in self.updates
        )
        return f"{len(self.updates)} of at least {self.terms.quorum} updates were there {when}: {missing}"
