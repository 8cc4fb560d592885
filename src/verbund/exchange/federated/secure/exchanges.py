"""The five exchanges of a secure round as events, so that a server that is killed in any of them goes on in it.

    invited    number, cohort with its public keys, the terms: the cohort is asked for its keys
    answered   client, step, sha256: what a client has sent lies in a file
    advanced   step: it is over, whoever has not answered has dropped out, and the next one begins

`Server` is a function of what came in which order: applying the same events again leads to the same state, and the same
messages to clients. What lies in the files is what the protocol shows a server: public keys, sealed shares, masked
vectors, and shares of what takes the masks off their sum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbund.exchange.federated.content import Content
from verbund.exchange.federated.secure.failure import ClientCheated
from verbund.exchange.federated.secure.messages import Malformed, Sent, opened
from verbund.exchange.federated.secure.server import Server, Sum
from verbund.exchange.federated.secure.terms import Round, Step, Terms
from verbund.job.federated_privacy import Secure

Event = dict[str, Any]
_HASH = re.compile(r"[0-9a-f]{64}")
_OURS = frozenset(("answered", "advanced"))
_OVER = frozenset(("round", "abandoned", "skipped", "summed", "stepped"))


def roster_digest(keys: Mapping[str, str]) -> str:
    """What a round's terms name its public keys by: all that is signed is signed for these keys of all."""
    return hashlib.sha256(json.dumps(dict(sorted(keys.items()))).encode()).hexdigest()


def terms_of(run: str, keys: Mapping[str, str], settings: Secure, length: int, headroom: int) -> Terms:
    """The terms of a round, on either side.

    Args:
        run: the hash of the first line of the server's log.
        keys: by name the public key of each of the cohort, in hexadecimal digits.
        settings: the section `secure` of the job.
        length: elements of the vector.
        headroom: see `Terms`.
    """
    return Terms(f"{run}/{roster_digest(keys)}", settings, length, headroom)


class Exchanges:
    """Those of the round under way, if there are any.

    Args:
        settings: the section `secure` of the job.
        folder: where what clients send lies, by SHA-256.
    """

    def __init__(self, settings: Secure, folder: Path) -> None:
        self.settings, self._folder = settings, folder
        self.number = 0
        """Of the last invitation: it rises with every attempt."""
        self.closing = False
        """Whether the sum is being computed, and nothing more is taken."""
        self._events: list[Event] = []
        self._server: Server | None = None
        self._due: dict[str, Sent] = {}
        self._answers: dict[tuple[str, str], str] = {}

    @property
    def open(self) -> bool:
        """Whether a cohort has been invited, and there is no sum yet."""
        return bool(self._events)

    @property
    def invited(self) -> Event:
        """What clients need to know besides the messages: number, run, keys, length, headroom, clip."""
        return {key: value for key, value in self._events[0].items() if key not in ("event", "round")}

    @property
    def files(self) -> set[str]:
        """SHA-256 of what clients have sent."""
        return {event["sha256"] for event in self._events if event["event"] == "answered"}

    @property
    def step(self) -> Step | None:
        """What clients send now."""
        return self.server.step

    @property
    def missing(self) -> frozenset[str]:
        """Whose answers have not come yet."""
        return self.server.missing

    @property
    def cheated(self) -> Mapping[str, str]:
        """What was wrong with a client's messages, by name."""
        return self.server.cheated

    @property
    def server(self) -> Server:
        """The protocol's server, as the events have made it."""
        if self._server is None:
            invited, *later = self._events
            keys = invited["keys"]
            terms = terms_of(invited["run"], keys, self.settings, invited["length"], invited["headroom"])
            round_ = Round(terms, invited["number"], tuple(sorted(keys)))
            self._server = Server(round_, {name: bytes.fromhex(key) for name, key in keys.items()})
            self._due = dict.fromkeys(round_.cohort, self._server.invite())
            for event in later:
                self._do(event)
        return self._server

    def invitation(self, run: str, keys: Mapping[str, str], length: int, headroom: int) -> list[Event]:
        """Invites a cohort; see `terms_of`.

        Raises:
            InputError: if the round cannot be secure: too few clients, or too many for the bits that there are.
        """
        number = self.number + 1
        terms = terms_of(run, keys, self.settings, length, headroom)
        _ = Round(terms, number, tuple(sorted(keys))).near  # raises what is wrong with it
        told = {"run": run, "keys": dict(sorted(keys.items())), "length": length, "headroom": headroom}
        return [{"event": "invited", "number": number, **told}]

    def answer(self, client: str, number: int, step: str, digest: str) -> tuple[list[Event], str]:
        """A client has answered; what it has sent lies in its file. Events, and why it does not count ("": it does)."""
        if not self.open or number != self.number or self.closing:
            return [], "it came too late: these exchanges are over"
        if (known := self._answers.get((client, step))) is not None:
            return [], "" if known == digest else "another message of the client came first"
        if step != self.step or client not in self.missing:
            return [], f"`{step[:40]}` is not what is asked of it"
        return [{"event": "answered", "client": client, "number": number, "step": step, "sha256": digest}], ""

    def unfit(self, digest: str, weight: float) -> str | None:
        """Why what a client says of its update, without showing it, cannot be; None if it can."""
        if not _HASH.fullmatch(digest):
            return "it has no name"
        if weight != int(weight) or not 1 <= weight <= self.settings.max_weight:
            return f"its weight is {weight:g}; whole numbers up to {self.settings.max_weight} are allowed"
        return None

    def advance(self) -> list[Event]:
        """Ends a step that is not the last with those who have answered."""
        return [{"event": "advanced", "number": self.number, "step": self.step}]

    def shortfall(self, without: frozenset[str]) -> str | None:
        """Why there can be no sum without some of those who are missing; None if there can.

        Args:
            without: who is not waited for any more.
        """
        server = self.server
        left = len(server.expected - (server.missing & without))
        if left >= server.round.least:
            return None
        said = "".join(f"; {name}: {what}" for name, what in list(self.cheated.items())[:3])
        gone = sorted({*server.round.cohort} - (server.expected - server.missing))
        return (
            f"{left} of {server.round.size} clients are left in secure aggregation (`{server.step}`), "
            f"{server.round.least} are needed; missing: {', '.join(gone[:5])}{' …' if len(gone) > 5 else ''}{said}"
        )

    def due(self, client: str) -> Sent | None:
        """The message that a client is to answer now, if there is one."""
        if not self.open or self.closing or client not in self.missing:
            return None
        return self._due.get(client)

    def finish(self) -> Sum:
        """Takes the masks off; for a thread that holds nothing up. `closing` must be set.

        Raises:
            TooFewClients, ClientCheated, RunFailed: see `Server.advance`.
        """
        assert self.closing
        server = self.server
        server.advance()
        assert server.result is not None
        return server.result

    def apply(self, event: Event) -> None:
        """Changes the state as an event says; those of rounds that are over cost nothing."""
        what = event["event"]
        if what == "invited":
            self._forget()
            self.number = event["number"]
            self._events = [event]
        elif what in _OURS and self._events:
            self._events.append(event)
            if what == "answered":
                self._answers[event["client"], event["step"]] = event["sha256"]
            if self._server is not None:
                self._do(event)
        elif what in _OVER:
            self._forget()

    def _do(self, event: Event) -> None:
        assert self._server is not None
        if event["event"] == "advanced":
            self._due = self._server.advance()
            return
        client = event["client"]
        try:
            message = opened(Content(self._folder).path(event["sha256"]).read_bytes())
            self._server.receive(client, message)
        except Malformed as error:
            self._server.exclude(client, f"its message {error}")
        except ClientCheated:
            pass  # the server knows the name, and so does whoever asks for `cheated`

    def _forget(self) -> None:
        self._events, self._server, self._due, self._answers, self.closing = [], None, {}, {}, False
