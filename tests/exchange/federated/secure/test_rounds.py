"""The sum is exact whoever drops out when, or there is none and nothing is revealed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exchange.federated.secure.rounds import Federation, Play
from verbund.comm.wire import bits
from verbund.comm.wire.bits import Bits
from verbund.errors import InputError
from verbund.exchange.federated.secure import Masks, Sent, ServerCheated, Sum, TooFewClients
from verbund.exchange.federated.secure.fixed_point import as_words
from verbund.exchange.federated.secure.terms import STEPS


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_sum_is_exact_or_there_is_none(data: st.DataObject) -> None:
    clients = data.draw(st.integers(3, 9))
    limits = {
        "bits": data.draw(st.sampled_from([2, 8, 16, 24])),
        "max_weight": data.draw(st.sampled_from([1, 7, 1000])),
    }
    federation = Federation(clients, 20, {"threshold": 0.6, **limits})
    weights = {name: data.draw(st.integers(1, limits["max_weight"])) for name in federation.names}
    at = {name: data.draw(st.sampled_from([None, None, None, *STEPS])) for name in federation.names}
    lost = {step: [name for name, when in at.items() if when == step] for step in STEPS}
    play = Play(federation, federation.vectors(clients), weights, lost)
    left = [name for name, when in at.items() if when is None]
    if len(left) < play.server.round.least:
        with pytest.raises(TooFewClients, match="are needed"):
            play.run()
        assert play.server.result is None
        return
    result = play.run()
    survivors = [name for name, when in at.items() if when in (None, "consent", "reveal")]
    assert list(result.survivors) == survivors
    assert result.weight == sum(weights[name] for name in survivors)
    np.testing.assert_array_equal(result.integers, play.expected(survivors))


def test_drawn_neighbours_survive_what_all_survive() -> None:
    federation = Federation(40, 30, {"neighbours": 26, "threshold": 0.9, "colluding": 0.0})
    assert not federation.round().complete
    lost = {"shares": ["c0001"], "masked": ["c0007", "c0019"], "reveal": ["c0030"]}
    play = Play(federation, federation.vectors(), lost=lost)
    result = play.run()
    assert result.dropped == ("c0001", "c0007", "c0019")
    np.testing.assert_array_equal(result.integers, play.expected(result.survivors))


def test_below_the_threshold_no_client_reveals_anything() -> None:
    """A server that goes on all the same, with the list it has, gets nothing from anybody."""
    federation = Federation(6, settings={"threshold": 0.7})
    play = Play(federation, federation.vectors())
    play.step()
    play.step()
    play.step()
    few = Bits(np.array([1, 1, 1, 1, 0, 0], np.uint8), 1)
    for name in federation.names[:4]:
        with pytest.raises(ServerCheated, match="4 survivors"):
            play.clients[name].receive(Sent("survivors", arrays={"survived": few}).message())


def test_nothing_is_left_of_a_rounds_secrets() -> None:
    federation = Federation(4)
    play = Play(federation, federation.vectors())
    for _ in range(3):
        play.step()
    kept = [vars(client)["_private"] for client in play.clients.values()]
    assert not any(kept), "the seed and the keys are of no use once the vector is masked"
    play.run()
    for client in play.clients.values():
        assert client.done
        assert not vars(client)["_held"]


def test_each_rank_of_a_mesh_masks_its_own_pieces() -> None:
    federation = Federation(3, 101)
    vectors = federation.vectors()
    play = Play(federation, vectors)
    word = play.server.round.word

    def by_pieces(masks: Masks) -> Any:
        words = as_words(vectors["c0001"], word)
        cuts = [0, 1, 38, 77, 101]
        return np.concatenate([masks.apply(words[a:b], a) for a, b in pairwise(cuts)])

    play.clients["c0001"] = federation.client("c0001", by_pieces)
    np.testing.assert_array_equal(play.run().integers, play.expected(federation.names))


def test_the_servers_view_of_a_vector_is_uniform() -> None:
    """Chi-square of each client's masked vector, over 256 bins of its highest bits and as many of its lowest."""
    from scipy.stats import chisquare

    federation = Federation(4, 60_000, {"bits": 14})  # 16 bits of which all count
    zeros = dict.fromkeys(federation.names, np.zeros(federation.length, np.int64))
    play = Play(federation, zeros, lost={"masked": ["c0003"]})
    play.run()
    assert play.server.round.bits == 16
    seen = [sent for sents in play.traffic.values() for sent in sents if sent.kind == "masked"]
    assert len(seen) == 3
    for sent in seen:
        words = sent.message().arrays["vector"]
        for part in (words >> 8, words & 255):
            assert chisquare(np.bincount(part, minlength=256)).pvalue > 1e-7
    assert chisquare(np.bincount(zeros["c0000"], minlength=256)).pvalue < 1e-7, "the test can fail"


def published_bits(clients: int, length: int) -> int:
    """Bonawitz et al., section 7.1: bits that a client sends and receives, of 16-bit values."""
    most = clients * (2**16 - 1) + 1
    return 2 * clients * 256 + (5 * clients - 4) * 256 + length * math.ceil(math.log2(most))


def payload(traffic: list[Sent]) -> int:
    """Bits of keys, shares (without their tags) and vector of one client's messages, both ways."""
    total = 0
    for sent in traffic:
        for name, array in sent.arrays.items():
            if isinstance(array, Bits):
                total += bits.packed_size(array.values.size, array.width) * 8 if sent.kind == "masked" else 0
            elif name in ("keys", "seeds"):
                total += array.nbytes * 8
            elif name == "sealed":
                total += (array.nbytes - 16 * len(array)) * 8
    return total


@pytest.mark.parametrize(("clients", "length"), [(5, 800), (16, 2000), (23, 80)])
def test_bytes_are_those_of_the_paper(clients: int, length: int) -> None:
    federation = Federation(clients, length, {"neighbours": "all"})
    play = Play(federation, federation.vectors())
    play.run()
    for traffic in play.traffic.values():
        assert payload(traffic) == published_bits(clients, length)
    assert round(published_bits(2**10, 2**20) / (16 * 2**20), 2) == 1.73
    assert round(published_bits(2**14, 2**24) / (16 * 2**24), 2) == 1.98


def test_the_modulus_follows_from_what_is_added_up() -> None:
    assert Federation(1024, settings={"neighbours": "all"}).round().bits == 26
    wide = Federation(10, settings={"max_weight": 1 << 20}).round()
    assert (wide.bits, wide.word) == (40, np.dtype(np.uint64))
    assert Federation(10, headroom=1 << 20).round().bits == 22
    with pytest.raises(InputError, match=r"needs 68 bits, over 62.*Lower `secure.bits`"):
        Federation(10, settings={"bits": 24, "max_weight": 1 << 40}).round()
    with pytest.raises(InputError, match="need 3"):
        Federation(2).round()


def test_a_mean_of_numbers() -> None:
    from verbund.exchange.federated.secure import FixedPoint

    fixed = FixedPoint(8, 2.0)
    integers = fixed.round(np.array([[-2.0, 0.0], [0.5, 2.0]])).reshape(-1)
    total = Sum(integers * 3 + integers * 1, 4, ("a", "b"), (), {})
    np.testing.assert_allclose(total.mean(fixed), [-2.0, 0.0, 0.5, 2.0], atol=fixed.step / 2)
    np.testing.assert_allclose(total.total(fixed), 4 * total.mean(fixed))
