"""A client's side of one round."""

from __future__ import annotations

import secrets as system
from collections.abc import Callable, Mapping

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from verbund.comm.wire.frames import Message, Payload
from verbund.errors import InputError
from verbund.exchange.federated.secure import keys
from verbund.exchange.federated.secure.failure import ServerCheated
from verbund.exchange.federated.secure.identity import SIGNATURE_BYTES, Identity, signed
from verbund.exchange.federated.secure.keys import CHECK_BYTES, SECRET_BYTES, Agreement
from verbund.exchange.federated.secure.masks import Contribution, Masks
from verbund.exchange.federated.secure.messages import (
    SEALED_BYTES,
    Malformed,
    Sent,
    advertisement,
    bitmap,
    clients,
    numbered,
    octets,
    packed,
)
from verbund.exchange.federated.secure.shamir import SHARE_BYTES, share
from verbund.exchange.federated.secure.terms import Round, Terms


class Client:
    """Answers the server's messages, one by one and each once, and checks all that it relies on.

    It makes fresh keys for the round and erases them as soon as they are of no more use; of any other client it reveals
    one share at most, of the seed or of the key.

    Args:
        name: its own.
        identity: its signing key.
        roster: the public keys of all clients that have been enrolled, by name, its own among them.
        terms: those of its own settings.
        contribution: gives its vector, masked; called once, when the masks are known.
        weight: what it counts, a whole number that everybody may know. The contribution has it as a factor.
        after: the number of the last round that it has begun. It takes part in no earlier one, nor in this one again.

    Raises:
        InputError: if the weight is not allowed by the terms.
    """

    def __init__(
        self,
        name: str,
        identity: Identity,
        roster: Mapping[str, bytes],
        terms: Terms,
        contribution: Contribution,
        weight: int = 1,
        after: int = -1,
    ) -> None:
        if not 1 <= weight <= terms.settings.max_weight:
            raise InputError(
                f"a weight of {weight}; whole numbers from 1 to {terms.settings.max_weight} are allowed",
                where=f"client {name}",
                fix="Cap it, or raise `secure.max_weight` on the server and all clients",
            )
        if roster.get(name) != identity.public:
            raise InputError(f"the roster has another public key for `{name}`", where="roster", fix="Enrol it anew")
        self.name = name
        self.begun: int | None = None
        """The number of the round, once it has been invited: keep it as the next `after` before the answer is sent."""
        self.done = False
        """Whether it has revealed its shares, and the round is over for it."""
        self.suspected: list[str] = []
        """Clients whose shares could not be opened or were wrong."""
        self._identity, self._roster, self._terms = identity, roster, terms
        self._contribution: Contribution | None = contribution
        self._weight, self._after = weight, after
        self._next = "invite"
        self._round: Round
        self._index: int
        self._private: dict[str, bytearray] = {}  # of the pairwise masks, of sealed shares; the seed of its own mask
        self._drawn: list[int] = []
        self._peers: dict[int, bytes] = {}  # both public keys of each neighbour
        self._held: dict[int, tuple[bytes, bytes]] = {}  # by owner: the share of its seed, of its key
        self._masked_with: frozenset[int] = frozenset()
        self._survivors: frozenset[int] = frozenset()
        self._signed = b""

    def receive(self, message: Message) -> Sent:
        """The answer to the server's next message.

        Raises:
            ServerCheated: if the message would let the server learn more than the sum, or is not of this round.
            InputError: if the round's size is beyond what the settings allow, or the client's own vector is wrong.
        """
        answers: dict[str, tuple[Callable[[Message], Sent], str]] = {
            "invite": (self._advertise, "keys"),
            "keys": (self._share, "deliver"),
            "deliver": (self._mask, "survivors"),
            "survivors": (self._consent, "consents"),
            "consents": (self._reveal, "nothing"),
        }
        try:
            if message.kind != self._next:
                raise Malformed(f"is `{message.kind}` where {self._next} is due; nothing is answered twice")
            answer, self._next = answers[self._next]
            return answer(message)
        except Malformed as error:
            self.erase()
            raise ServerCheated(
                f"the server's message {error}", where=f"client {self.name}", fix="Nothing was revealed to it"
            ) from None
        except BaseException:
            self.erase()
            raise

    def erase(self) -> None:
        """Ends the round and overwrites its secrets, as far as Python lets one."""
        self._next = "nothing"
        for private in self._private.values():
            private[:] = bytes(len(private))
        self._private, self._held, self._contribution = {}, {}, None

    def _advertise(self, message: Message) -> Sent:
        number, cohort = message.fields.get("round"), message.fields.get("cohort")
        if type(number) is not int or not isinstance(cohort, list) or not all(isinstance(n, str) for n in cohort):
            raise Malformed("has no round or no cohort")
        if number <= self._after:
            raise Malformed(f"invites to round {number}; the last one that this client has begun is {self._after}")
        if message.fields.get("terms") != self._terms.digest():
            raise Malformed("has other terms than this client's settings; they must be the same on both sides")
        if cohort != sorted(set(cohort)) or self.name not in cohort:
            raise Malformed("has a cohort that is not sorted, or that this client is not in")
        if strangers := [name for name in cohort if name not in self._roster]:
            raise Malformed(f"invites `{strangers[0]}`, who was never enrolled")
        self._round = Round(self._terms, number, tuple(cohort))
        self._index = cohort.index(self.name)
        self.begun = number
        self._private = {use: bytearray(keys.secret()) for use in ("mask", "seal", "seed")}
        public = keys.public(bytes(self._private["mask"])) + keys.public(bytes(self._private["seal"]))
        others = [i for i in range(self._round.size) if i != self._index]
        self._drawn = sorted(system.SystemRandom().sample(others, self._round.near.degree))
        said = advertisement(self._index, public)
        arrays: dict[str, Payload] = {
            "keys": _octets(public),
            "signature": _octets(self._identity.sign("keys", self._round.context, said)),
            "commitment": _octets(keys.commitment(bytes(self._private["seed"]), self._round.context)),
        }
        if not self._round.complete:
            arrays["drawn"] = numbered(self._drawn)
        return Sent("advertise", {"round": number, "weight": self._weight}, arrays)

    def _share(self, message: Message) -> Sent:
        peers = clients(message, "clients", self._round.size)
        public = octets(message, "keys", len(peers), 2 * SECRET_BYTES)
        signatures = octets(message, "signatures", len(peers), SIGNATURE_BYTES)
        if self._index in peers:
            raise Malformed("has this client among its own neighbours")
        for peer, pair, signature in zip(peers, public, signatures, strict=True):
            name = self._round.cohort[peer]
            said = advertisement(peer, pair.tobytes())
            if not signed(self._roster[name], signature.tobytes(), "keys", self._round.context, said):
                raise Malformed(f"has keys for `{name}` that it has not signed for this round")
            self._peers[peer] = pair.tobytes()
        alive = [peer for peer in self._drawn if peer in self._peers]
        self._enough(len(alive) + 1, "have keys")
        holders = sorted([*self._drawn, self._index])
        owned = [int.from_bytes(self._private[use], "little") for use in ("seed", "mask")]
        divided = share(owned, self._round.near.shares, len(holders))
        agreement = Agreement(bytes(self._private["seal"]), self._round.context)
        sealed, checks = [], []
        for holder in sorted([*alive, self._index]):
            of_seed, of_key = (part.tobytes() for part in divided[holders.index(holder)])
            checks += self._checks((of_seed, of_key), self._index, holder)
            if holder == self._index:
                self._held[holder] = of_seed, of_key
                continue
            sealed.append(keys.seal(self._sealing(agreement, self._index, holder), of_seed + of_key))
        return Sent(
            "shares",
            arrays={
                "clients": numbered(alive),
                "sealed": _octets(b"".join(sealed)).reshape(-1, SEALED_BYTES),
                "checks": _octets(b"".join(checks)).reshape(-1, 2, CHECK_BYTES),
            },
        )

    def _mask(self, message: Message) -> Sent:
        round_ = self._round
        masked_with = clients(message, "masks", round_.size)
        owners = clients(message, "clients", round_.size)
        sealed = octets(message, "sealed", len(owners), SEALED_BYTES)
        checks = octets(message, "checks", len(owners), 2, CHECK_BYTES)
        if not self._peers.keys() >= set(masked_with) >= set(owners):
            raise Malformed("names clients whose keys it has not shown")
        self._enough(len(set(masked_with) & set(self._drawn)) + 1, "have sent shares")
        self._masked_with = frozenset(masked_with)
        agreement = Agreement(bytes(self._private["seal"]), round_.context)
        bad = []
        for owner, box, (of_seed, of_key) in zip(owners, sealed, checks, strict=True):
            opened = keys.unseal(self._sealing(agreement, owner, self._index), box.tobytes()) or bytes(2 * SHARE_BYTES)
            pair = opened[:SHARE_BYTES], opened[SHARE_BYTES:]
            if self._checks(pair, owner, self._index) == [of_seed.tobytes(), of_key.tobytes()]:
                self._held[owner] = pair
            else:
                bad.append(owner)
        self.suspected = [round_.cohort[owner] for owner in bad]
        pairwise = Agreement(bytes(self._private["mask"]), round_.context)
        streams = [(keys.own_mask(bytes(self._private["seed"]), round_.context), 1)]
        for peer in masked_with:
            streams.append((self._pairwise(pairwise, peer), 1 if self._index < peer else -1))
        assert self._contribution is not None
        vector = self._contribution(Masks(streams, round_.word, round_.bits))
        if vector.shape != (self._terms.length,) or vector.dtype != round_.word:
            raise ValueError(f"the vector is {vector.dtype} {vector.shape}, not {round_.word} ({self._terms.length},)")
        self._contribution = None
        for private in self._private.values():  # what others need of them they have as shares
            private[:] = bytes(len(private))
        self._private = {}
        return Sent("masked", {"bad": bad}, packed(vector, round_.bits))

    def _consent(self, message: Message) -> Sent:
        found = octets(message, "survived", self._round.size)
        if found.max(initial=0) > 1:
            raise Malformed("has a list of survivors with other marks than 0 and 1")
        self._survivors = frozenset(np.flatnonzero(found).tolist())
        if self._index not in self._survivors:
            raise Malformed("does not count this client among the survivors, though it has its vector")
        if len(self._survivors) < self._round.least:
            raise Malformed(
                f"names {len(self._survivors)} survivors; of fewer than {self._round.least} nothing is told"
            )
        if unknown := self._survivors & (self._peers.keys() | set(self._drawn)) - self._masked_with:
            raise Malformed(f"names `{self._round.cohort[min(unknown)]}` a survivor, who has shared no secrets")
        self._signed = bitmap(self._survivors, self._round.size).tobytes()
        signature = self._identity.sign("survivors", self._round.context, self._signed)
        return Sent("consent", arrays={"signature": _octets(signature)})

    def _reveal(self, message: Message) -> Sent:
        consenting = clients(message, "clients", self._round.size)
        signatures = octets(message, "signatures", len(consenting), SIGNATURE_BYTES)
        if not set(consenting) <= self._survivors & set(self._drawn):
            raise Malformed("has consents of clients that this one has not drawn, or that have not survived")
        for peer, signature in zip(consenting, signatures, strict=True):
            name = self._round.cohort[peer]
            if not signed(self._roster[name], signature.tobytes(), "survivors", self._round.context, self._signed):
                raise Malformed(f"has no signature of `{name}` for this list of survivors: it was shown another one")
        self._enough(len(consenting) + 1, "have consented to the list of survivors")
        seeds = [owner for owner in sorted(self._held) if owner in self._survivors]
        lost = [owner for owner in sorted(self._held) if owner not in self._survivors]
        revealed = Sent(
            "reveal",
            arrays={
                "seeds_of": numbered(seeds),
                "seeds": _octets(b"".join(self._held[owner][0] for owner in seeds)).reshape(-1, SHARE_BYTES),
                "keys_of": numbered(lost),
                "keys": _octets(b"".join(self._held[owner][1] for owner in lost)).reshape(-1, SHARE_BYTES),
            },
        )
        self.erase()
        self.done = True
        return revealed

    def _enough(self, count: int, what: str) -> None:
        """Of those with whom it shares its secrets so many must be there that a secret can be put together."""
        if count < self._round.near.shares:
            raise Malformed(
                f"says that of this client and those that it has drawn only {count} {what}; "
                f"{self._round.near.shares} must"
            )

    def _checks(self, pair: tuple[bytes, bytes], owner: int, holder: int) -> list[bytes]:
        of_seed, of_key = pair
        return [
            keys.check(of_seed, self._round.context, "seed", owner, holder),
            keys.check(of_key, self._round.context, "key", owner, holder),
        ]

    def _sealing(self, agreement: Agreement, sender: int, receiver: int) -> ChaCha20Poly1305:
        peer = sender if receiver == self._index else receiver
        try:
            return agreement.sealing(self._peers[peer][SECRET_BYTES:], sender, receiver)
        except ValueError:
            raise Malformed(f"has a public key of `{self._round.cohort[peer]}` that is none") from None

    def _pairwise(self, agreement: Agreement, peer: int) -> bytes:
        try:
            return agreement.mask(self._peers[peer][:SECRET_BYTES], self._index, peer)
        except ValueError:
            raise Malformed(f"has a public key of `{self._round.cohort[peer]}` that is none") from None


def _octets(raw: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(raw, np.uint8)
