"""The server's side of one round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.comm.wire.bits import Bits
from verbund.comm.wire.frames import Message
from verbund.errors import RunFailed
from verbund.exchange.federated.secure import keys
from verbund.exchange.federated.secure.failure import ClientCheated, TooFewClients
from verbund.exchange.federated.secure.fixed_point import FixedPoint, as_integers
from verbund.exchange.federated.secure.identity import SIGNATURE_BYTES, signed
from verbund.exchange.federated.secure.keys import CHECK_BYTES, SECRET_BYTES
from verbund.exchange.federated.secure.messages import (
    SEALED_BYTES,
    Malformed,
    Sent,
    advertisement,
    bitmap,
    clients,
    numbered,
    octets,
    unpacked,
)
from verbund.exchange.federated.secure.shamir import SHARE_BYTES
from verbund.exchange.federated.secure.terms import STEPS, Round, Step
from verbund.exchange.federated.secure.unmask import Revealed, mask_keys, subtract


@dataclass(frozen=True)
class Sum:
    """What a round came to.

    Args:
        integers: the weighted sum of the survivors' integers, int64.
        weight: the sum of their weights.
        survivors: whose vectors are in it.
        dropped: who of the cohort is not.
        cheated: what was wrong with a client's messages, by name.
    """

    integers: NDArray[np.int64]
    weight: int
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]
    cheated: Mapping[str, str]

    def mean(self, fixed: FixedPoint) -> NDArray[np.float64]:
        """The weighted mean of the survivors' vectors."""
        return self.total(fixed) / self.weight

    def total(self, fixed: FixedPoint) -> NDArray[np.float64]:
        """Their weighted sum."""
        return self.integers.astype(np.float64) * fixed.step


@dataclass
class _Member:
    """What the server has of a client that has advertised."""

    public: bytes
    signature: bytes
    commitment: bytes
    weight: int
    drawn: frozenset[int]
    sealed: dict[int, bytes] = field(default_factory=dict)
    checks: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    consent: bytes = b""


class Server:
    """Collects what clients send, step by step, and adds their vectors up as they come.

    After `invite` has been sent, `receive` takes the answers; `advance` ends the step with those that have come by
    then, as all have (`missing` is empty) or time is up, and gives the next messages. Clients that did not answer have
    dropped out. After the last step `result` is there.

    Args:
        round: what to do.
        roster: the public keys of enrolled clients, by name.
    """

    def __init__(self, round: Round, roster: Mapping[str, bytes]) -> None:
        self.round = round
        self.result: Sum | None = None
        self.cheated: dict[str, str] = {}
        """What was wrong with a client's messages, by name."""
        self._roster = roster
        self._number = {name: index for index, name in enumerate(round.cohort)}
        self._step = 0
        self._expected = frozenset(range(round.size))
        self._answered: set[int] = set()
        self._members: dict[int, _Member] = {}
        self._shown: frozenset[int] = frozenset()  # whose keys the others have seen
        self._sharing: frozenset[int] = frozenset()  # who has sent shares
        self._survivors: frozenset[int] = frozenset()
        self._total = np.zeros(round.terms.length, round.word)
        self._revealed: Revealed

    def invite(self) -> Sent:
        """The first message, the same for the whole cohort."""
        fields = {"round": self.round.number, "cohort": list(self.round.cohort), "terms": self.round.terms.digest()}
        return Sent("invite", fields)

    @property
    def step(self) -> Step | None:
        """What clients send next; None when the round is over."""
        return STEPS[self._step] if self._step < len(STEPS) else None

    @property
    def expected(self) -> frozenset[str]:
        """Whose answers this step may have."""
        return frozenset(self.round.cohort[i] for i in self._expected)

    @property
    def missing(self) -> frozenset[str]:
        """Whose answers have not come yet."""
        return frozenset(self.round.cohort[i] for i in self._expected - self._answered)

    def receive(self, client: str, message: Message) -> None:
        """Takes a client's answer.

        Args:
            client: whose connection it came by.
            message: what came.

        Raises:
            ClientCheated: if it is wrong. The client has dropped out, the round goes on without it.
        """
        index = self._number.get(client)
        if index is None or self.step is None:
            raise ClientCheated(client, "it takes no part in this round")
        try:
            if index not in self._expected:
                raise Malformed("comes from a client that has dropped out of this round")
            if index in self._answered:  # what it has sent before stays
                raise ClientCheated(client, "its message comes a second time")
            if message.kind != self.step:
                raise Malformed(f"is `{message.kind}` where `{self.step}` is due")
            getattr(self, f"_take_{self.step}")(index, message)
        except Malformed as error:
            self.exclude(client, f"its message {error}")
            raise ClientCheated(client, f"its message {error}") from None
        self._answered.add(index)

    def exclude(self, client: str, why: str) -> None:
        """A client's message is wrong: it has dropped out."""
        self._expected -= {self._number[client]}
        self.cheated.setdefault(client, why)

    def advance(self) -> dict[str, Sent]:
        """Ends the step and gives the next messages, by client; none after the last step.

        Raises:
            TooFewClients: if fewer have answered than the sum may be shown of. Nothing can be learnt of this round.
            ClientCheated: if a client has shared its secrets so that they cannot be put together.
            RunFailed: if the sum cannot be that of values in range.
        """
        step = self.step
        if step is None:
            raise RuntimeError("the round is over")
        answered = frozenset(self._answered)
        if len(answered) < self.round.least:
            gone = sorted(set(range(self.round.size)) - answered)
            names = ", ".join(self.round.cohort[i] for i in gone[:5]) + (" …" if len(gone) > 5 else "")
            said = "; ".join(f"{name}: {what}" for name, what in list(self.cheated.items())[:3])
            raise TooFewClients(
                f"{len(answered)} of {self.round.size} clients have answered with `{step}`, {self.round.least} are "
                f"needed; missing: {names}" + (f" ({said})" if said else ""),
                where=f"round {self.round.number}",
                fix="Nothing was revealed of their updates; the next round may have more",
            )
        self._expected, self._answered = answered, set()
        self._step += 1
        if step == "advertise":
            self._shown = answered
            return self._each(self._keys(i, answered) for i in sorted(answered))
        if step == "shares":
            self._sharing = answered
            return self._each(self._deliver(i) for i in sorted(answered))
        if step == "masked":
            self._survivors = answered
            found = Sent("survivors", arrays={"survived": Bits(bitmap(answered, self.round.size), 1)})
            return self._each(found for _ in answered)
        if step == "consent":
            self._revealed = Revealed(self.round)
            return self._each(self._consents(i) for i in sorted(answered))
        self._finish()
        return {}

    def _each(self, messages: Iterable[Sent]) -> dict[str, Sent]:
        return {self.round.cohort[i]: sent for i, sent in zip(sorted(self._expected), messages, strict=True)}

    def _near(self, index: int, among: frozenset[int]) -> list[int]:
        """Who of `among` has a mask in common with a client: whom it has drawn, and who has drawn it."""
        drawn = self._members[index].drawn
        return [i for i in sorted(among) if i != index and (i in drawn or index in self._members[i].drawn)]

    def _take_advertise(self, index: int, message: Message) -> None:
        round_, name = self.round, self.round.cohort[index]
        public = octets(message, "keys", 2 * SECRET_BYTES).tobytes()
        signature = octets(message, "signature", SIGNATURE_BYTES).tobytes()
        weight = message.fields.get("weight")
        if type(weight) is not int or not 1 <= weight <= round_.terms.settings.max_weight:
            raise Malformed(f"has the weight {weight!r}; {round_.terms.settings.max_weight} is the largest")
        drawn = set(range(round_.size)) - {index}
        if not round_.complete:
            drawn = set(clients(message, "drawn", round_.size))
            if len(drawn) != round_.near.degree or index in drawn:
                raise Malformed(f"has drawn {len(drawn)} neighbours, not {round_.near.degree} others")
        if not signed(self._roster[name], signature, "keys", round_.context, advertisement(index, public)):
            raise Malformed(f"has keys that `{name}`, as it was enrolled, has not signed for this round")
        commitment = octets(message, "commitment", 32).tobytes()
        self._members[index] = _Member(public, signature, commitment, weight, frozenset(drawn))

    def _keys(self, index: int, answered: frozenset[int]) -> Sent:
        peers = self._near(index, answered)
        members = [self._members[i] for i in peers]
        arrays: dict[str, Any] = {
            "clients": numbered(peers),
            "keys": _rows([member.public for member in members], 2 * SECRET_BYTES),
            "signatures": _rows([member.signature for member in members], SIGNATURE_BYTES),
        }
        return Sent("keys", arrays=arrays)

    def _take_shares(self, index: int, message: Message) -> None:
        member = self._members[index]
        alive = sorted(member.drawn & self._shown)
        if clients(message, "clients", self.round.size) != alive:
            raise Malformed("has shares for others than those that it has drawn and was shown")
        sealed = octets(message, "sealed", len(alive), SEALED_BYTES)
        checks = octets(message, "checks", len(alive) + 1, 2, CHECK_BYTES)
        member.sealed = {holder: box.tobytes() for holder, box in zip(alive, sealed, strict=True)}
        member.checks = {
            holder: (pair[0].tobytes(), pair[1].tobytes())
            for holder, pair in zip(sorted([*alive, index]), checks, strict=True)
        }

    def _deliver(self, index: int) -> Sent:
        owners = [i for i in sorted(self._sharing) if index in self._members[i].sealed]
        arrays: dict[str, Any] = {
            "masks": numbered(self._near(index, self._sharing)),
            "clients": numbered(owners),
            "sealed": _rows([self._members[i].sealed[index] for i in owners], SEALED_BYTES),
            "checks": _rows([b"".join(self._members[i].checks[index]) for i in owners], 2 * CHECK_BYTES).reshape(
                -1, 2, CHECK_BYTES
            ),
        }
        return Sent("deliver", arrays=arrays)

    def _take_masked(self, index: int, message: Message) -> None:
        bad = message.fields.get("bad")
        if not isinstance(bad, list) or not all(type(i) is int and 0 <= i < self.round.size for i in bad):
            raise Malformed("does not say whose shares are bad")
        self._total += unpacked(message, self.round.terms.length, self.round.bits, self.round.word)
        for owner in bad:
            what = f"client {self.round.cohort[index]} cannot open the shares that it was sent, or they are wrong"
            self.cheated.setdefault(self.round.cohort[owner], what)

    def _take_consent(self, index: int, message: Message) -> None:
        signature = octets(message, "signature", SIGNATURE_BYTES).tobytes()
        said = bitmap(self._survivors, self.round.size).tobytes()
        if not signed(self._roster[self.round.cohort[index]], signature, "survivors", self.round.context, said):
            raise Malformed("has no valid signature of the list of survivors")
        self._members[index].consent = signature

    def _consents(self, index: int) -> Sent:
        peers = sorted(self._members[index].drawn & self._expected)
        signatures = _rows([self._members[i].consent for i in peers], SIGNATURE_BYTES)
        return Sent("consents", arrays={"clients": numbered(peers), "signatures": signatures})

    def _take_reveal(self, index: int, message: Message) -> None:
        for use, place, right in (("seed", 0, self._survivors), ("key", 1, self._sharing - self._survivors)):
            owners = clients(message, f"{use}s_of", self.round.size)
            shares = octets(message, f"{use}s", len(owners), SHARE_BYTES)
            for owner, part in zip(owners, shares, strict=True):
                if owner not in right or index not in self._members[owner].checks:
                    raise Malformed(f"has a share of {self.round.cohort[owner]}'s {use}, which nobody has asked it for")
                given = keys.check(part.tobytes(), self.round.context, use, owner, index)
                if given != self._members[owner].checks[index][place]:
                    raise Malformed(f"has another share of {self.round.cohort[owner]}'s {use} than it was given")
                holders = sorted([*self._members[owner].drawn, owner])
                self._revealed.add(owner, holders.index(index) + 1, part.tobytes())

    def _finish(self) -> None:
        round_, members = self.round, self._members
        streams = []
        for owner in sorted(self._survivors):
            seed = self._put_together(owner)
            if keys.commitment(seed, round_.context) != members[owner].commitment:
                raise ClientCheated(round_.cohort[owner], "its shares give another seed than it has committed to")
            streams.append((keys.own_mask(seed, round_.context), -1))
        for owner in sorted(self._sharing - self._survivors):
            peers = {i: members[i].public[:SECRET_BYTES] for i in self._near(owner, self._survivors)}
            if not peers:
                continue
            private = self._put_together(owner)
            if keys.public(private) != members[owner].public[:SECRET_BYTES]:
                raise ClientCheated(round_.cohort[owner], "its shares give another key than it has advertised")
            streams += mask_keys(private, owner, peers, round_.context)
        subtract(self._total, streams)
        integers = as_integers(self._total, round_.bits)
        weight = sum(members[i].weight for i in self._survivors)
        most = weight * ((1 << (round_.terms.settings.bits - 1)) - 1) + round_.terms.headroom
        if integers.size and max(-int(integers.min()), int(integers.max())) > most:
            raise RunFailed(
                "the sum is beyond what values in range can add up to: a client has sent values out of range, or "
                "another mask than it has agreed on. Masks hide which",
                where=f"round {round_.number}",
                fix="The round is lost; nothing of it is used",
            )
        names = round_.cohort
        self.result = Sum(
            integers,
            weight,
            tuple(names[i] for i in sorted(self._survivors)),
            tuple(name for i, name in enumerate(names) if i not in self._survivors),
            dict(self.cheated),
        )

    def _put_together(self, owner: int) -> bytes:
        secret = self._revealed.secret(owner)
        if secret is None:
            name = self.round.cohort[owner]
            raise TooFewClients(
                f"{self._revealed.count(owner)} of {self.round.near.shares} shares of {name}'s secrets are there"
                + (f"; {name}: {self.cheated[name]}" if name in self.cheated else ""),
                where=f"round {self.round.number}",
                fix="The sum cannot be unmasked; the next round may have more clients",
            )
        return secret


def _rows(rows: list[bytes], width: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, width)
