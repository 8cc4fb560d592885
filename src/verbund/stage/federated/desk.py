"""A server's desk: what clients ask for, each in a thread of its own, and what it does to the rounds.

    enrol    token, certificate                     a client becomes known                 (without a name yet)
    join     version of the protocol                the offer: job and task file
    refuse   keys of the client's policy, or failure  the client takes no part
    next     -                                      what to do: a round, an evaluation, nothing yet, the end
    get      sha256, offset                         a part of a file
    put      sha256, size, offset, part             how much of an update is there
    update   round, sha256, weight, …               whether it counts
    secure   round, number, step, sha256, message   an answer in the exchanges of secure aggregation
    report   round, state, reason                   no update will come
    metrics  version, state                         what an evaluation gave
    statistics  answer                              what its columns sum up to, or why that is not told
    leave    -                                      it has heard of the end

All of them may come again and change nothing then. Every answer has the head of the audit log.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from verbund.comm.wire import Connection, Message, Replies, Reply
from verbund.errors import InputError, VerbundError
from verbund.exchange.federated import cohort
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.round import Answer, Phase
from verbund.exchange.federated.round_journal import RoundJournal
from verbund.job import Round
from verbund.stage.federated.connected import Client
from verbund.stage.federated.offer import Offer
from verbund.stage.federated.requests import answer_of, facts_of, number, state_of, statistics_of, text

PROTOCOL = 2
HOLD_SECONDS = 15.0
"""How long `next` waits for something to do before it says that there is nothing yet."""
_STATES = frozenset(("failed", "declined"))
OUT_OF_BUDGET = "privacy.budget"
"""Why a client declines all further rounds."""


class Desk:
    """Answers clients.

    Args:
        journal: the rounds, which only threads that hold `changed` may touch.
        offer: what clients are to do.
        settings: of the rounds.
        enrolment: None where certificates of an authority say who is who.
        screen: looks into an update that is there; None if it can be used, else why not.
        notify: tells whoever runs the server.
    """

    def __init__(
        self,
        journal: RoundJournal,
        offer: Offer,
        settings: Round,
        enrolment: Enrolment | None,
        screen: Callable[[str, Mapping[str, Any]], str | None],
        notify: Callable[[str], None],
    ) -> None:
        self.changed = threading.Condition()
        self.clients: dict[str, Client] = {}
        self.ending = False
        """Whether the server is about to end, whatever the rounds' phase is."""
        self._journal, self._offer, self._settings = journal, offer, settings
        self._enrolment, self._screen, self._notify = enrolment, screen, notify
        self._begun = time.monotonic()
        self._strangers = Replies(lambda message: self._answer("", message))

    # Connections

    def welcome(self, connection: Connection) -> None:
        """Serves a connection until it ends; for a thread of its own."""
        name = connection.peer.names[0] if connection.peer.names else ""
        if not name:
            self._strangers.serve(connection)
            return
        with self.changed:
            client = self.clients.get(name)
            if client is None:
                client = self.clients[name] = Client(Replies(lambda message: self._answer(name, message)))
                self._notify(f"{name} is there")
            client.connections.append(connection)
            self.changed.notify_all()
        try:
            client.replies.serve(connection)
        finally:
            with self.changed:
                client.connections.remove(connection)
                client.gone = time.monotonic()
                client.past = (client.past[0] + connection.received_bytes, client.past[1] + connection.sent_bytes)
                self.changed.notify_all()

    def available(self) -> list[str]:
        """The clients that a round may ask. Within `changed`."""
        return [
            name
            for name, client in self.clients.items()
            if client.connections and client.joined and not client.refuses and not client.spent and self._fits(name)
        ]

    def able(self) -> set[str] | None:
        """The clients that take part and may still be asked for updates; None if no privacy budget is spent, so that
        anybody may still come. Within `changed`."""
        spent = {name for name, client in self.clients.items() if client.spent}
        return {name for name in self._journal.taking_part - spent if self._fits(name)} if spent else None

    def lost(self) -> list[str]:
        """The members of the round under way that have been without a connection for too long. Within `changed`."""
        return [
            name
            for name, member in self._journal.rounds.members.items()
            if member.state == "asked" and self.without(name) >= self._settings.lost_after
        ]

    def without(self, name: str) -> float:
        """Seconds since when a client has no connection; of one that never had one, since this server began."""
        client = self.clients.get(name)
        if client is None:
            return time.monotonic() - self._begun
        return 0.0 if client.connections else time.monotonic() - client.gone

    def expected(self, seconds: float) -> list[str]:
        """Clients that take part and are there, or may be back within so many seconds. Within `changed`."""
        return [name for name in sorted(self._journal.taking_part) if self.without(name) < seconds]

    def _fits(self, name: str) -> bool:
        labels = self._enrolment.labels(name) if self._enrolment is not None else {}
        return cohort.fits(labels, self._settings.labels)

    # Requests

    def _answer(self, name: str, message: Message) -> Reply:
        fields = message.fields
        if message.kind == "enrol":
            return self._enrol(fields)
        if not name:
            raise InputError("this client is not enrolled", fix="Give an enrolment token: `--token FILE`")
        match message.kind:
            case "join":
                return self._join(name, fields)
            case "refuse":
                return self._refuse(name, fields)
            case "next":
                return self._next(name)
            case "get":
                return self._get(name, fields)
            case "put":
                return self._put(name, message)
            case "update":
                return self._update(name, fields)
            case "secure":
                return self._secure(name, message)
            case "report":
                return self._report(name, fields)
            case "metrics":
                return self._metrics(name, fields)
            case "statistics":
                return self._statistics(name, fields)
            case "leave":
                return self._leave(name)
        raise InputError(f"`{message.kind[:40]}` is no request of this protocol")

    def _reply(self, kind: str, **fields: Any) -> Reply:
        return Reply(kind, {**fields, "head": self._journal.head.record()}, keep=False)

    def _enrol(self, fields: dict[str, Any]) -> Reply:
        if self._enrolment is None:
            raise InputError("this server goes by certificates of an authority, not by tokens")
        name, secret, certificate = (text(fields, key) for key in ("name", "secret", "certificate"))
        try:
            raw = base64.b64decode(certificate, validate=True)
        except ValueError:
            raise InputError("this is no certificate") from None
        self._enrolment.enrol(name, secret, raw)
        with self.changed:
            self._journal.record([{"event": "enrolled", "client": name}])
        self._notify(f"{name} was enrolled")
        return self._reply("enrolled")

    def _join(self, name: str, fields: dict[str, Any]) -> Reply:
        if fields.get("protocol") != PROTOCOL:
            what = f"the server speaks version {PROTOCOL} of the protocol, the client {fields.get('protocol')}"
            raise InputError(what, fix="Install the same version of verbund on both sides")
        with self.changed:
            client = self.clients[name]
            client.joined, client.refuses = True, False
            self._journal.record([{"event": "joined", "client": name}])
            self.changed.notify_all()
            return self._reply("offer", offer=self._offer.record(), name=name)

    def _refuse(self, name: str, fields: dict[str, Any]) -> Reply:
        keys = [str(key)[:40] for key in list(fields.get("keys") or [])[:20]]
        failure = str(fields.get("failure") or "")[:40]
        policy = f"its policy does not permit it ({', '.join(keys)})"
        why = f"its data or machine do not fit the job ({failure}; its owner is told more)" if failure else policy
        with self.changed:
            self.clients[name].refuses = True
            self._journal.record([{"event": "refused", "client": name, "keys": [failure] if failure else keys}])
            rounds = self._journal.rounds
            if (member := rounds.members.get(name)) is not None:  # a round that has begun with it does not wait for it
                self._journal.record(rounds.report(name, member.round or rounds.round, "declined", why))
            self.changed.notify_all()
            self._notify(f"{name} takes no part: {why}")
            return self._reply("noted")

    def _next(self, name: str) -> Reply:
        with self.changed:
            self.clients[name].joined = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._task(name) is not None, HOLD_SECONDS)
            task = self._task(name) or {"do": "wait"}
            reply = self._reply("task", **task)
            exchanges = self._journal.exchanges
            if task["do"] != "secure" or exchanges is None or (sent := exchanges.due(name)) is None:
                return reply
            told = {"step": sent.kind, "fields": sent.fields, **exchanges.invited}
            return Reply("task", {**reply.fields, **told}, sent.arrays, keep=False)

    def _task(self, name: str) -> dict[str, Any] | None:
        """What the client is to do now, if anything."""
        rounds, journal = self._journal.rounds, self._journal
        base = {"version": rounds.version, "sha256": journal.current, "size": _size(journal)}
        if rounds.phase is Phase.FAILED:
            return {"do": "failed", "why": "too few clients have sent updates"}
        if self.ending:
            return {"do": "end", "done": rounds.phase is Phase.DONE, **base}
        if rounds.phase is Phase.DONE:
            known = {event["client"] for event in journal.metrics if event["version"] == rounds.version}
            return None if name in known else {"do": "evaluate", **base}
        if self._offer.statistics and name not in journal.statistics:
            return {"do": "statistics"}
        if self._asked_to_train(name):
            version, digest = journal.base(name)
            base = {"version": version, "sha256": digest, "size": _bytes(journal.versions, digest)}
            members = rounds.terms.buffer or len(rounds.members)
            return {"do": "train", "round": version + 1, "attempt": rounds.attempt, "members": members, **base}
        if self._asked_secretly(name):
            return {"do": "secure", "round": rounds.round, **base}
        return None

    def _asked_to_train(self, name: str) -> bool:
        """Whether an update of the client is waited for."""
        rounds = self._journal.rounds
        open_ = rounds.phase is Phase.TRAINING or (rounds.terms.buffer and rounds.phase is Phase.AGGREGATING)
        return bool(open_) and name in rounds.members and rounds.members[name].state in ("asked", "lost")

    def _asked_secretly(self, name: str) -> bool:
        """Whether secure aggregation waits for a message of the client."""
        rounds, exchanges = self._journal.rounds, self._journal.exchanges
        if exchanges is None or rounds.phase is not Phase.SECURING or exchanges.due(name) is None:
            return False
        return rounds.members[name].state in ("updated", "lost")

    def _get(self, name: str, fields: dict[str, Any]) -> Reply:
        digest, offset = text(fields, "sha256"), number(fields, "offset")
        with self.changed:
            known = digest in self._journal.published
        if not known:
            raise InputError("there is no such file, or none any more", where=digest[:64])
        part = self._journal.versions.read(digest, offset)
        return Reply("part", {"head": []}, {"part": part}, keep=False)

    def _put(self, name: str, message: Message) -> Reply:
        digest = text(message.fields, "sha256")
        size, offset = (number(message.fields, key) for key in ("size", "offset"))
        updates = self._journal.updates
        with self.changed:
            rounds = self._journal.rounds
            if not (self._asked_secretly(name) if rounds.terms.secure else self._asked_to_train(name)):
                return self._reply("passed")  # its update will be told why it does not count
            if size > 4 * _size(self._journal) + (1 << 20):
                raise InputError(f"an update of {size} bytes is too large for this model")
            former, whole = self._journal.uploads.get(name, ""), updates.whole(digest)
            if former not in ("", digest) and not whole:
                updates.drop(former, name)
            self._journal.uploads[name] = digest
        part = message.arrays.get("part")
        if part is None:
            return self._reply("have", bytes=updates.received(digest, size, name))
        if part.dtype.name != "uint8" or part.ndim != 1:
            raise InputError("a part of a file is bytes")
        return self._reply("have", bytes=updates.append(digest, size, offset, part, name))

    def _update(self, name: str, fields: dict[str, Any]) -> Reply:
        round_, digest = number(fields, "round"), text(fields, "sha256")
        facts = facts_of(fields)
        with self.changed:
            events, answer = self._journal.rounds.update(name, round_, digest, facts)
        if events:
            if self._journal.exchanges is not None:
                why = self._journal.exchanges.unfit(digest, facts["weight"])
            elif not self._journal.updates.whole(digest):
                return self._reply("missing")  # a round that was abandoned has taken it along: it is sent again
            else:
                why = self._screen(digest, facts)
            with self.changed:
                if why is not None:
                    self._journal.record(self._journal.rounds.report(name, round_, "refused", why))
                    answer = Answer(False, why)
                    self._notify(f"the update of {name} is refused: {why}")
                else:  # the round may have been closed in the meantime
                    events, answer = self._journal.rounds.update(name, round_, digest, facts)
                    if events and self._journal.exchanges is None and not self._journal.updates.whole(digest):
                        return self._reply("missing")
                    self._journal.record(events)
                self.changed.notify_all()
        with self.changed:
            if not answer.counts and why_late(answer):
                self._journal.record([{"event": "late", "client": name, "round": round_}])
            return self._reply("answer", counts=answer.counts, why=answer.why, final=answer.final)

    def _secure(self, name: str, message: Message) -> Reply:
        given, exchanges, updates = answer_of(message), self._journal.exchanges, self._journal.updates
        if exchanges is None:
            raise InputError("this job has no secure aggregation")
        with self.changed:
            events, why = exchanges.answer(name, given.number, given.step, given.sha256)
            if events and not (self._asked_secretly(name) and given.round == self._journal.rounds.round):
                events, why = [], "the client takes no part in this round any more"
            if events:
                if given.content is not None:
                    updates.put(given.content)
                elif not updates.whole(given.sha256):
                    return self._reply("missing")
                told = {"round": given.round, "bytes": _bytes(updates, given.sha256)}
                self._journal.record([{**event, **told} for event in events])
                why = exchanges.cheated.get(name, "") if name not in exchanges.server.expected else ""
                self.changed.notify_all()
            return self._reply("noted", why=why)

    def _report(self, name: str, fields: dict[str, Any]) -> Reply:
        state, reason = text(fields, "state"), text(fields, "reason")[:80]
        if state not in _STATES:
            raise InputError(f"`{state[:40]}` is no state")
        with self.changed:
            events = self._journal.rounds.report(name, number(fields, "round"), state, reason)
            self._journal.record(events)
            self.clients[name].spent |= (state, reason) == ("declined", OUT_OF_BUDGET)
            self.changed.notify_all()
            if events:
                self._notify(f"{name} {state} in round {fields['round']}: {reason}")
            return self._reply("noted")

    def _leave(self, name: str) -> Reply:
        with self.changed:
            if name in self._journal.taking_part:
                self._journal.record([{"event": "left", "client": name}])
            self.changed.notify_all()
            return self._reply("noted")

    def _metrics(self, name: str, fields: dict[str, Any]) -> Reply:
        version, state = number(fields, "version"), fields.get("state")
        state = None if state is None else state_of(state)
        with self.changed:
            known = any(e["client"] == name and e["version"] == version for e in self._journal.metrics)
            if not known and version == self._journal.rounds.version:
                self._journal.record([{"event": "metrics", "client": name, "version": version, "state": state}])
                self.changed.notify_all()
            return self._reply("noted")

    def _statistics(self, name: str, fields: dict[str, Any]) -> Reply:
        answer = statistics_of(fields, self._offer.statistics)
        with self.changed:
            if self._offer.statistics and name not in self._journal.statistics:
                self._journal.record([{"event": "statistics", "client": name, "answer": answer}])
            return self._reply("noted")


def why_late(answer: Answer) -> bool:
    """Whether an update does not count for having come too late."""
    return "too late" in answer.why


def _bytes(content: Content, digest: str) -> int:
    return content.path(digest).stat().st_size


def _size(journal: RoundJournal) -> int:
    return journal.versions.path(journal.current).stat().st_size


def failure_of(error: VerbundError) -> str:
    """What a server learns of a client's failure: its kind, and nothing of what it says."""
    return type(error).__name__
