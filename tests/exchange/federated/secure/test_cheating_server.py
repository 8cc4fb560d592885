"""A server that tries to learn more than the sum is caught by the client that it tries it with, and gets nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exchange.federated.secure.rounds import Federation, Play
from verbund.comm.wire.bits import Bits
from verbund.errors import InputError
from verbund.exchange.federated.secure import Client, Sent, ServerCheated, keys, whole
from verbund.exchange.federated.secure.messages import numbered


def altered(sent: Sent, **arrays: Any) -> Sent:
    return Sent(sent.kind, sent.fields, {**sent.arrays, **arrays})


def played(until: str, settings: dict[str, Any] | None = None, clients: int = 5) -> Play:
    """A round up to the step in which clients send `until`."""
    federation = Federation(clients, settings=settings or {})
    play = Play(federation, federation.vectors())
    while play.server.step != until:
        play.step()
    return play


def refuses(client: Client, sent: Sent, why: str) -> None:
    with pytest.raises(ServerCheated, match=why):
        client.receive(sent.message())
    assert not vars(client)["_private"]
    assert not vars(client)["_held"], "its secrets are gone"
    with pytest.raises(ServerCheated, match="nothing is due"):
        client.receive(sent.message())


def test_it_puts_its_own_keys_in_place_of_a_clients() -> None:
    play = played("shares")
    sent = play.due["c0000"]
    public = np.array(sent.arrays["keys"])
    public[1, :32] = np.frombuffer(keys.public(keys.secret()), np.uint8)
    refuses(play.clients["c0000"], altered(sent, keys=public), "keys for `c0002` that it has not signed")


def test_it_gives_a_clients_keys_out_as_anothers() -> None:
    play = played("shares")
    sent = play.due["c0000"]
    swapped = {name: np.array(sent.arrays[name])[[1, 0, 2, 3]] for name in ("keys", "signatures")}
    refuses(play.clients["c0000"], altered(sent, **swapped), "keys for `c0001` that it has not signed")


@pytest.mark.parametrize("first", ["consents", "survivors"])
def test_it_asks_for_both_shares_of_a_client(first: str) -> None:
    """First for the seeds of all, then, the list of survivors being another one, for a key."""
    play = played("consent" if first == "survivors" else "reveal")
    client = play.clients["c0000"]
    client.receive(play.due["c0000"].message())
    others = Bits(np.array([1, 1, 1, 1, 0], np.uint8), 1)
    refuses_late = Sent("survivors", arrays={"survived": others})
    with pytest.raises(ServerCheated, match="nothing is answered twice"):
        client.receive(refuses_late.message())


def test_a_client_reveals_one_share_of_each() -> None:
    federation = Federation(5)
    play = Play(federation, federation.vectors(), lost={"masked": ["c0004"]})
    play.run()
    for name in federation.names[:4]:
        (reveal,) = (sent for sent in play.traffic[name] if sent.kind == "reveal")
        assert reveal.message().arrays["seeds_of"].tolist() == [0, 1, 2, 3]
        assert reveal.message().arrays["keys_of"].tolist() == [4]


def test_it_shows_clients_different_lists_of_survivors() -> None:
    """Some are told that c0004 has survived, the others that it has not: both its secrets would come together."""
    play = played("consent", {"threshold": 0.6})
    one, other = play.due["c0000"], Sent("survivors", arrays={"survived": Bits(np.array([1, 1, 1, 1, 0], np.uint8), 1)})
    signatures = {
        name: np.array(client.receive((one if name in ("c0000", "c0004") else other).message()).arrays["signature"])
        for name, client in play.clients.items()
    }
    peers = [1, 2, 3, 4]
    sent = Sent(
        "consents",
        arrays={"clients": numbered(peers), "signatures": np.stack([signatures[f"c{i:04}"] for i in peers])},
    )
    refuses(play.clients["c0000"], sent, "no signature of `c0001` for this list of survivors: it was shown another one")


def test_it_leaves_out_the_consents_that_do_not_agree() -> None:
    play = played("reveal", {"threshold": 0.6})
    sent = play.due["c0000"]
    few = {name: np.array(sent.arrays[name])[:1] for name in ("clients", "signatures")}
    refuses(play.clients["c0000"], altered(sent, **few), "only 2 have consented to the list of survivors; 3 must")


def test_it_counts_as_a_survivor_who_has_shared_no_secret() -> None:
    federation = Federation(5, settings={"threshold": 0.6})
    play = Play(federation, federation.vectors(), lost={"shares": ["c0003"]})
    for _ in range(3):
        play.step()
    everybody = Bits(np.ones(5, np.uint8), 1)
    refuses(
        play.clients["c0000"], altered(play.due["c0000"], survived=everybody), "`c0003` a survivor, who has shared no"
    )


def test_it_does_not_count_the_client_itself() -> None:
    play = played("consent", {"threshold": 0.6})
    others = Bits(np.array([0, 1, 1, 1, 1], np.uint8), 1)
    refuses(play.clients["c0000"], Sent("survivors", arrays={"survived": others}), "does not count this client")


def test_it_replays_a_former_round() -> None:
    federation = Federation(4)
    former = Play(federation, federation.vectors(), number=6)
    former.step()
    again = federation.client("c0000", whole(np.zeros(50, np.uint32)), after=6)
    refuses(again, former.server.invite(), "invites to round 6; the last one that this client has begun is 6")

    play = Play(federation, federation.vectors(), number=7)
    play.step()
    refuses(play.clients["c0000"], former.due["c0000"], "has not signed for this round")


def test_it_hides_whom_a_client_has_drawn() -> None:
    """So that all masks are shared with those who work with the server."""
    play = played("shares", {"neighbours": 24, "threshold": 0.9, "colluding": 0.0}, clients=30)
    client, sent = play.clients["c0000"], play.due["c0000"]
    drawn = set(vars(client)["_drawn"])
    assert len(drawn) == 24
    listed = np.array(sent.arrays["clients"])
    keep = [i for i, peer in enumerate(listed.tolist()) if peer not in drawn or peer == min(drawn)]
    fewer = {name: np.array(sent.arrays[name])[keep] for name in ("clients", "keys", "signatures")}
    refuses(client, altered(sent, **fewer), "of this client and those that it has drawn only 2 have keys")


def test_each_client_draws_its_neighbours_anew() -> None:
    """The draw is no function of anything that the server knows or says."""
    found = set()
    for _ in range(5):
        play = played("shares", {"neighbours": 24, "threshold": 0.9, "colluding": 0.0}, clients=30)
        found.add(tuple(vars(play.clients["c0000"])["_drawn"]))
    assert len(found) == 5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda fields: {**fields, "cohort": [*fields["cohort"], "zoe"]}, "invites `zoe`, who was never enrolled"),
        (lambda fields: {**fields, "terms": "0" * 64}, "other terms than this client's settings"),
        (lambda fields: {**fields, "cohort": fields["cohort"][1:]}, "this client is not in"),
        (lambda fields: {**fields, "cohort": [*fields["cohort"], "c0004"]}, "not sorted"),
        (lambda fields: {**fields, "round": True}, "no round"),
    ],
)
def test_it_invites_to_another_round(change: Callable[[dict[str, Any]], dict[str, Any]], why: str) -> None:
    federation = Federation(5)
    sent = Play(federation, federation.vectors()).server.invite()
    refuses(federation.client("c0000", whole(np.zeros(50, np.uint32))), Sent("invite", change(sent.fields)), why)


def test_it_invites_a_client_among_strangers() -> None:
    federation = Federation(8, settings={"minimum": 6})
    invite = Play(federation, federation.vectors()).server.invite()
    few = Sent("invite", {**invite.fields, "cohort": federation.names[:4]})
    with pytest.raises(InputError, match="a round of 4 clients; secure aggregation is set to need 6"):
        federation.client("c0000", whole(np.zeros(50, np.uint32))).receive(few.message())


@pytest.mark.parametrize("step", ["shares", "masked", "consent", "reveal"])
def test_garbage_is_refused(step: str) -> None:
    """Each array of each message, left out, cut short, or of another type."""
    play = played(step)
    for number, name in enumerate(play.due["c0000"].arrays):
        sent = play.due[f"c000{number}"]
        found = sent.message().arrays[name]
        arrays = [{}, {name: found[:-1]}, {name: found.astype(np.float32)}]
        left = {key: value for key, value in sent.arrays.items() if key != name}
        refuses(
            play.clients[f"c000{number}"],
            Sent(sent.kind, sent.fields, {**left, **arrays[number % 3]}),
            "has (no|an) (array|list)",
        )
