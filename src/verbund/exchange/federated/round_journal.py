"""What a server remembers of its rounds, so that it can be killed at any point and go on in the same round.

    audit.jsonl   every event, on disk before it counts; a chain of hashes
    updates/      updates of the round under way, by SHA-256; on disk before their event. Under secure aggregation: what
                  clients have sent in its exchanges, none of it an update that could be read, and the sum
    versions/     parameters and the rule's state after each step, by SHA-256; on disk before their event

Updates are combined in the order of their clients' names: what was closed and not yet aggregated when the server was
killed comes to the same parameters when it is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbund.errors import InputError
from verbund.exchange.federated.audit import AuditLog, Head
from verbund.exchange.federated.buffered import BufferedRounds
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.round import Event, Rounds, Terms
from verbund.job import Secure

if TYPE_CHECKING:
    from verbund.exchange.federated.secure.exchanges import Exchanges

AUDIT = "audit.jsonl"
_OF_THE_LOG = frozenset(("n", "time", "former"))
_SETTLED = frozenset(("stepped", "abandoned", "skipped"))


class RoundJournal:
    """The rounds of a run, as they are on disk.

    Args:
        folder: is made if it is not there; this server's alone.
        terms: what rounds go by.
        told: is called with each event after it counts.
        secure: the section of the job, if there is one.

    Raises:
        InputError: if what was written is damaged.
    """

    def __init__(
        self,
        folder: Path,
        terms: Terms,
        told: Callable[[Event], None] = lambda event: None,
        secure: Secure | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / AUDIT
        self._log = AuditLog(self.path)
        self.updates = Content(folder / "updates")
        self.versions = Content(folder / "versions")
        self.rounds = BufferedRounds(terms) if terms.buffer else Rounds(terms)
        self.exchanges = self._exchanges(secure) if secure is not None else None
        """Those of the round under way, under secure aggregation."""
        self.sum: Event | None = None
        """What they have come to."""
        self.begun: dict[str, Any] | None = None
        """What the first event says: which job and task this is; None in a new folder."""
        self.current = ""
        """SHA-256 of the newest version."""
        self.rule = ""
        """SHA-256 of the rule's state at the newest version."""
        self.privacy: dict[str, Any] | None = None
        """What differential privacy has spent by the newest version, as the aggregator told it."""
        self.metrics: list[Event] = []
        """What clients' evaluations gave that were no part of a round."""
        self.taking_part: set[str] = set()
        """Clients that have joined, and have neither refused nor left since."""
        self.evaluated: Event | None = None
        """What came of them."""
        self.uploads: dict[str, str] = {}
        """By client the file that it sends or has sent last: others' steps do not take it away."""
        self._former = ""
        self._files_of: dict[int, str] = {}
        """SHA-256 of all versions that there were."""
        self._told = told
        for line in self._log.lines:
            self._apply({key: value for key, value in line.items() if key not in _OF_THE_LOG})
        self._check()

    @property
    def published(self) -> set[str]:
        """SHA-256 of the files that clients may have."""
        return ({self.current, self._former} | set(self._started.values())) - {""}

    def base(self, client: str) -> tuple[int, str]:
        """The version that a client is to begin from: its number, and its SHA-256."""
        member = self.rounds.members.get(client)
        if member is None or not member.round:
            return self.rounds.version, self.current
        return member.round - 1, self._files_of[member.round - 1]

    @property
    def _started(self) -> dict[str, str]:
        """Where nobody is waited for: from which file each client that trains has begun."""
        members = self.rounds.members.items()
        return {name: self.base(name)[1] for name, m in members if m.round and m.state in ("asked", "lost")}

    @property
    def head(self) -> Head:
        """The end of the chain."""
        return self._log.head

    @property
    def history(self) -> list[Event]:
        """The events that were there when the journal was opened."""
        return self._log.lines

    def begin(self, **facts: Any) -> None:
        """Writes the first event: what is trained, and `sha256` of version 0."""
        self._write({"event": "begun", **facts})

    def record(self, events: Iterable[Event]) -> None:
        """Writes events, and all that follows from them; each counts once it is on disk.

        Raises:
            RunFailed: if one cannot be written; it and what follows do not count.
        """
        for event in (None, *events):  # what followed when the last server was killed comes first
            if event is not None:
                self._write(event)
            while more := self.rounds.settle():
                for following in more:
                    self._write(following)

    def close(self) -> None:
        """Lets go of the log."""
        self._log.close()

    def _write(self, event: Event) -> None:
        self._log.append(event["event"], {key: value for key, value in event.items() if key != "event"})
        self._apply(event)
        if event["event"] in _SETTLED:
            self._sweep()
        self._told(event)

    def _apply(self, event: Event) -> None:
        if event["event"] in ("begun", "stepped"):
            self._former, self.current, self.rule = self.current, event["sha256"], event.get("rule", "")
            self.privacy = event.get("privacy")
            self._files_of[event.get("version", 0)] = event["sha256"]
        if event["event"] == "begun":
            self.begun = event
        if event["event"] == "metrics":
            self.metrics.append(event)
        if event["event"] == "evaluated":
            self.evaluated = event
        if event["event"] == "joined":
            self.taking_part.add(event["client"])
        if event["event"] in ("refused", "left"):
            self.taking_part.discard(event["client"])
        if event["event"] in ("summed", "round", *_SETTLED):
            self.sum = event if event["event"] == "summed" else None
        self.rounds.apply(event)
        if self.exchanges is not None:
            self.exchanges.apply(event)

    def _exchanges(self, secure: Secure) -> Exchanges:
        from verbund.exchange.federated.secure.exchanges import Exchanges  # packages that not everybody has

        return Exchanges(secure, self.updates.folder)

    def _files(self) -> set[str]:
        """SHA-256 of what clients have sent that the round under way needs, and of their sum."""
        if self.exchanges is None:
            return {update["sha256"] for update in self.rounds.updates.values()}
        return self.exchanges.files | ({self.sum["sha256"]} if self.sum is not None else set())

    def _sweep(self) -> None:
        """Removes what no round needs; the version before the newest one stays, as clients may be fetching it."""
        self.updates.keep(self._files() | set(self.uploads.values()))
        self.versions.keep({*self.published, self.rule})

    def _check(self) -> None:
        needed = [(self.updates, digest) for digest in self._files()]
        needed += [(self.versions, digest) for digest in (self.current, self.rule, *self._started.values()) if digest]
        for content, digest in needed:
            if not content.whole(digest):
                what = "a file is gone that the journal says is there"
                raise InputError(what, where=str(content.path(digest)), fix="Bring the whole folder back")
