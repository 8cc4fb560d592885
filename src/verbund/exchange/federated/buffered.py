"""Rounds that wait for nobody, as a state machine: clients start whenever they are free, every K updates make a step,
however old the parameters are that these began from (Nguyen et al., "Federated Learning with Buffered Asynchronous
Aggregation", 2022, algorithm 1).

    training -> aggregating -> training | done
        └-> training (abandoned: nobody has sent anything) -> failed (too many attempts)

A client trains from each version once at most: its samples are a function of its name and the version's number, and the
same update twice would tell nothing. Who has an update in the buffer starts again after the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verbund.exchange.federated import cohort
from verbund.exchange.federated.round import Answer, Event, Member, Phase, Rounds, Terms

_WAITED_FOR = ("asked", "lost")


class BufferedRounds(Rounds):
    """The state. Of a member `round` says from which version it has started: that number less one."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms, Phase.TRAINING)
        self._latest: dict[str, int] = {}
        """By client the round that it started in last, in this attempt."""

    def select(self, available: Iterable[str], waited_enough: bool) -> list[Event]:
        """Starts clients that are free; see `Rounds.select`."""
        if self.phase is not Phase.TRAINING:
            return []
        names = set(available)
        training = {name for name, member in self.members.items() if member.state == "asked"}
        waited_for = {name for name, member in self.members.items() if member.state in _WAITED_FOR}
        free = {n for n in names - waited_for - self.updates.keys() if self._latest.get(n, 0) < self.round}
        chosen = cohort.draw(self.terms.seed, self.round, self.attempt, free, self.terms.cohort - len(training))
        if chosen:
            return [
                {"event": "started", "round": self.round, "version": self.version, "client": name} for name in chosen
            ]
        if training or not (waited_enough or len(names) >= self.terms.cohort):
            return []
        return self.expired()  # all that are there had their turn

    def update(self, client: str, round_: int, digest: str, facts: Mapping[str, Any]) -> tuple[list[Event], Answer]:
        if self._counted.get(client) == (round_, digest):
            return [], Answer(True)
        if self.phase in (Phase.DONE, Phase.FAILED):
            return [], Answer(False, "it came too late: the training is over")
        member = self.members.get(client)
        if member is None or member.round != round_ or member.state not in _WAITED_FOR:
            return [], Answer(False, f"the client was not asked for it, or another one came first (round {round_})")
        # How old it is, is not for the client to say.
        told = {**facts, "base_version": round_ - 1}
        return [{"event": "update", "round": round_, "client": client, "sha256": digest, **told}], Answer(True)

    def report(self, client: str, round_: int, state: str, reason: str) -> list[Event]:
        member = self.members.get(client)
        if member is None or member.round != round_ or member.state not in _WAITED_FOR:
            return []
        if self.phase in (Phase.DONE, Phase.FAILED) or (state == "lost" and member.state == "lost"):
            return []
        return [{"event": "failed", "round": round_, "client": client, "state": state, "reason": reason}]

    def end(self, why: str) -> list[Event]:
        return [{"event": "ended", "why": why}] if self.phase is Phase.TRAINING else []

    def settle(self) -> list[Event]:
        if self.phase is Phase.TRAINING and len(self.updates) >= self.terms.buffer:
            return self._close()
        return []

    def apply(self, event: Event) -> None:
        match event["event"]:
            case "started":
                self.members[event["client"]] = Member(round=event["round"])
                self._latest[event["client"]] = event["round"]
            case "update":
                self.updates[event["client"]] = event
                self.members[event["client"]] = Member("updated", round=event["round"])
                self._counted[event["client"]] = (event["round"], event["sha256"])
            case "failed":
                self.members[event["client"]] = Member(event["state"], event["reason"], event["round"])
            case "unusable":
                del self.updates[event["client"]]
                self.members[event["client"]] = Member("refused", event["reason"])
                self.phase, self.closed = Phase.TRAINING, []
            case "abandoned":
                self.why, self.attempt = event["why"], event["attempt"] + 1
                self._latest = {}
            case "stepped":
                for client in self.closed:
                    del self.updates[client]
                    self.members.pop(client, None)
                self.version, self.attempt, self.closed = event["version"], 1, []
                self.phase = Phase.DONE if self.version >= self.terms.rounds else Phase.TRAINING
            case _:
                super().apply(event)

    def _close(self) -> list[Event]:
        """The updates that came first."""
        first = sorted(list(self.updates)[: self.terms.buffer])
        return [{"event": "closed", "round": self.round, "attempt": self.attempt, "clients": first}]
