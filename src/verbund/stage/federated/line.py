"""A client's line to its server: requests that are repeated until they are answered, over connections that it dials."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbund.comm.wire import Calls, Certificates, Closed, Deadline, Message, Pinned, Refused, dial
from verbund.comm.wire.address import parse
from verbund.errors import ClusterLost, InputError, Interrupted
from verbund.exchange.federated.audit import NOTHING, Head
from verbund.exchange.federated.content import PART_BYTES, Content
from verbund.exchange.federated.enrolment import Token
from verbund.stage.federated.desk import PROTOCOL
from verbund.stage.federated.home import Home
from verbund.stage.federated.offer import Offer

_LEAVE_SECONDS = 3.0
_LOOK = 0.25
"""Seconds between two looks whether the owner wants an end."""


@dataclass(frozen=True)
class Joined:
    """What the server says to a client that joins."""

    offer: Offer
    name: str


def enrol(address: str, token: Token, home: Home, patience: float) -> None:
    """Makes a client's identity known by a token, and pins the server's.

    Raises:
        InputError: if the server is another one than the token's, or does not take it.
        ClusterLost: if nobody listens there.
    """
    line = Line(address, Pinned(token.fingerprint), patience)
    try:
        certificate = base64.b64encode(home.identity.certificate).decode()
        line.ask("enrol", {"name": token.name, "secret": token.secret, "certificate": certificate})
    finally:
        line.close()
    home.pin(token.fingerprint, token.name)
    home.note("enrolled", name=token.name, fingerprint=token.fingerprint)


class Line:
    """Requests to one server.

    Args:
        address: HOST:PORT.
        credentials: why the two trust each other.
        patience: seconds without an answer after which the server is given up.

    Raises:
        InputError: if the address is none.
    """

    def __init__(self, address: str, credentials: Pinned | Certificates, patience: float) -> None:
        parse(f"tcp:{address}")  # raises what is wrong with it
        self._address, self._patience = address, patience
        self._calls = Calls(lambda seconds: dial(f"tcp:{address}", credentials, seconds), f"the server at {address}")
        self.head = Head(0, NOTHING)
        """The end of the server's audit log, as it was told last."""
        self.stopped: Callable[[], bool] = lambda: False
        """Whether the owner wants an end."""
        self.sent = 0
        self.received = 0

    def join(self) -> Joined:
        """Asks what is to be trained."""
        answer = self.ask("join", {"protocol": PROTOCOL})
        return Joined(Offer.from_record(answer.fields["offer"]), str(answer.fields["name"]))

    def refuse(self, keys: list[str], failure: str = "") -> None:
        """Says that no part is taken: by which keys of the policy, or for which kind of failure."""
        self.ask("refuse", {"keys": keys, "failure": failure})

    def leave(self) -> None:
        """Says that nothing more is needed. The server may be gone already."""
        with suppress(ClusterLost, Interrupted):
            self.ask("leave", {}, _LEAVE_SECONDS)

    def next(self) -> Message:
        """What is to be done now."""
        return self.ask("next", {})

    def fetch(self, digest: str, size: int, content: Content) -> Path:
        """Gets a file, from where it was left off; where it is."""
        if size > 1 << 40 or size < 0:
            raise InputError(f"the server speaks of a file of {size} bytes")
        while (have := content.received(digest, size)) < size or not content.whole(digest):
            part = self.ask("get", {"sha256": digest, "offset": have}).arrays.get("part")
            if part is None or part.dtype != np.uint8 or not part.size:
                raise InputError("the server sent no part of a file")
            content.append(digest, size, have, part)
            self.received += part.size
        return content.path(digest)

    def send(self, digest: str, content: Content) -> bool:
        """Sends a file, from where it was left off; whether it is there (else nobody waits for it any more)."""
        size = content.path(digest).stat().st_size
        answer = self.ask("put", {"sha256": digest, "size": size, "offset": 0})
        while answer.kind == "have" and int(answer.fields["bytes"]) < size:
            offset = int(answer.fields["bytes"])
            part = content.read(digest, offset, PART_BYTES)
            answer = self.ask("put", {"sha256": digest, "size": size, "offset": offset}, part=part)
            self.sent += part.size
        return answer.kind == "have"

    def ask(self, kind: str, fields: dict[str, Any], patience: float | None = None, **arrays: Any) -> Message:
        """A request's answer.

        Raises:
            InputError: if the two do not trust each other, or the server's own.
            ClusterLost: if there is none for too long.
            Interrupted: if the owner wants an end.
        """
        patience = patience or self._patience
        call = self._calls.start(kind, fields, patience, None, **arrays)
        try:
            while not call.wait(_LOOK):
                if self.stopped():
                    call.give_up()
                    raise Interrupted("interrupted")
            message = call.result()
        except Refused as error:
            fix = "Is it the server of the token, and is this client still enrolled there?"
            raise InputError(str(error), where="--server", fix=fix) from None
        except (Deadline, Closed) as error:
            what = f"the server gave no answer for {patience:.0f} s: {error}"
            raise ClusterLost(what, where="--server", fix="The same command goes on when it is back") from None
        if (head := Head.of(message.fields.get("head"))) is not None:
            if self.head.count and (head.log != self.head.log or head.count < self.head.count):
                what = f"the server's log had {self.head.count} lines, and is now another one of {head.count}"
                raise InputError(what, where="--server", fix="Another run is held there, or its log was rewritten: ask")
            self.head = head
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._calls.close()
