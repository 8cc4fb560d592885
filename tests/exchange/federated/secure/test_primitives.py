"""Test vectors of the standards, and the parts against plain integers."""

from __future__ import annotations

import random
import secrets
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.comm.wire.certificate import create
from verbund.errors import InputError
from verbund.exchange.federated.keystream import Keystream
from verbund.exchange.federated.secure import FixedPoint, Identity, Layout, keys, shamir
from verbund.exchange.federated.secure.fixed_point import as_integers, as_words
from verbund.exchange.federated.secure.identity import pinned, signed
from verbund.exchange.federated.secure.neighbourhood import neighbourhood
from verbund.exchange.federated.secure.shamir import PRIME


def test_aes_256_in_counter_mode() -> None:
    """NIST SP 800-38A, F.5.5: the output blocks from the counter f0f1…ff on."""
    stream = Keystream(bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"))
    counter = int.from_bytes(bytes(range(0xF0, 0x100)), "big")
    blocks = "0bdf7df1591716335e9a8b15c860c502" + "5a6e699d536119065433863c8f657b94"
    assert stream.words(2 * counter, 4, np.uint64).tobytes().hex() == blocks
    assert stream.words(4 * counter + 3, 3, np.uint32).tobytes().hex() == blocks[24:48]


def test_a_keystream_is_the_same_from_wherever_it_is_read() -> None:
    stream = Keystream(bytes(range(32)))
    for dtype in (np.uint32, np.uint64):
        whole = stream.words(0, 200_001, dtype)
        for start, end in ((0, 5), (3, 70_001), (65_537, 65_538), (131_071, 200_001)):
            np.testing.assert_array_equal(stream.words(start, end - start, dtype), whole[start:end])
    masked = whole.copy()
    stream.add(masked, 0, -1)
    assert not masked.any()
    assert (
        Keystream(bytes(31) + b"\1").words(0, 4, np.uint32).tolist()
        != Keystream(bytes(32)).words(0, 4, np.uint32).tolist()
    )


def test_hkdf() -> None:
    """RFC 5869, test case 1: its first 32 octets."""
    found = keys.derive(bytes([11] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_x25519() -> None:
    """RFC 7748, section 6.1."""
    private = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    assert keys.public(private).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"


def test_chacha20_poly1305() -> None:
    """RFC 8439, section 2.8.2, without its associated data's tag."""
    key, nonce = bytes(range(0x80, 0xA0)), bytes.fromhex("070000004041424344454647")
    text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    text += b"sunscreen would be it."
    sealed = ChaCha20Poly1305(key).encrypt(nonce, text, bytes.fromhex("50515253c0c1c2c3c4c5c6c7"))
    assert sealed[:16].hex() == "d31a8d34648e60db7b86afbc53ef7ec2"
    assert sealed[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"


def test_what_is_sealed_is_opened_by_its_receiver_alone() -> None:
    a, b, c = keys.secret(), keys.secret(), keys.secret()
    context = bytes(32)
    sealed = keys.seal(keys.Agreement(a, context).sealing(keys.public(b), 0, 1), b"shares")
    assert keys.unseal(keys.Agreement(b, context).sealing(keys.public(a), 0, 1), sealed) == b"shares"
    for agreement, public, sender, receiver in (
        (keys.Agreement(c, context), a, 0, 1),
        (keys.Agreement(b, context), a, 1, 0),
        (keys.Agreement(b, bytes([1]) * 32), a, 0, 1),
    ):
        assert keys.unseal(agreement.sealing(keys.public(public), sender, receiver), sealed) is None
    with pytest.raises(ValueError, match="shared key"):
        keys.Agreement(a, context).mask(bytes(32), 0, 1)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 12), st.integers(0, 20), st.randoms(use_true_random=False), st.sampled_from([0, 1, PRIME - 1, None])
)
def test_so_many_shares_give_the_secret(threshold: int, more: int, draw: random.Random, secret: int | None) -> None:
    secret = draw.randrange(PRIME) if secret is None else secret
    shares = shamir.share([secret, 7], threshold, threshold + more)
    some = draw.sample(range(threshold + more), threshold)
    assert shamir.reconstruct({i + 1: shares[i, 0].tobytes() for i in some}) == secret
    assert shamir.reconstruct({i + 1: shares[i, 1].tobytes() for i in some}) == 7
    if threshold > 1:
        assert shamir.reconstruct({i + 1: shares[i, 0].tobytes() for i in some[1:]}) != secret


def test_shares_are_values_of_the_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Python's integers, at the ends of what limbs can hold."""
    coefficients = [secrets.randbelow(PRIME) if i % 2 else (PRIME - 1, 0)[i // 2 % 2] for i in range(60)]
    given = iter(coefficients)
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(given))
    shares = shamir.share([PRIME - 1], 61, shamir.MOST_POINTS)
    for x in (1, 2, 1000, 4094, 4095):
        value = 0
        for coefficient in (*coefficients, PRIME - 1):
            value = (value * x + coefficient) % PRIME
        assert int.from_bytes(shares[x - 1, 0].tobytes(), "little") == value


def test_fewer_shares_tell_nothing() -> None:
    """Shares of the same secret at one point are uniform: each value of the low byte comes as often as the others."""
    from scipy.stats import chisquare

    seen = np.concatenate([shamir.share([5] * 64, 3, 3)[:, :, 0] for _ in range(60)], axis=1)
    for point in seen:
        assert chisquare(np.bincount(point, minlength=256)).pvalue > 1e-7


def test_an_identity_signs_what_is_said_and_nothing_else() -> None:
    """It is the key of the certificate by which a client connects."""
    pem, certificate = create()
    identity = Identity.of(pem)
    assert pinned(certificate) == identity.public
    signature = identity.sign("keys", bytes(32), b"said")
    assert signed(identity.public, signature, "keys", bytes(32), b"said")
    assert not signed(identity.public, signature, "survivors", bytes(32), b"said")
    assert not signed(identity.public, signature, "keys", bytes([1] * 32), b"said")
    assert not signed(identity.public, signature, "keys", bytes(32), b"something else")
    assert not signed(Identity.create().public, signature, "keys", bytes(32), b"said")
    with pytest.raises(InputError, match="no private key"):
        Identity.of("nothing")
    with pytest.raises(InputError, match="no certificate"):
        pinned(b"nothing")


def test_ed25519() -> None:
    """RFC 8032, section 7.1, test 1."""
    identity = Identity(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert identity.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


@pytest.mark.parametrize("bits", [2, 8, 16, 24])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rounding(bits: int, rounding: str) -> None:
    fixed = FixedPoint(bits, 0.5, rounding)  # type: ignore[arg-type]
    values = np.random.default_rng(1).uniform(-0.5, 0.5, 4000)
    integers = fixed.round(values)
    bound = 0.5 if rounding == "nearest" else 1.0
    assert np.abs(integers - values / fixed.step).max() <= bound + 1e-6
    assert fixed.round(np.array([0.0, -0.5, 0.5])).tolist() == [0, -fixed.most, fixed.most]
    many = fixed.round(np.full(40_000, 0.3 * fixed.step))
    assert abs(many.mean() - (0.0 if rounding == "nearest" else 0.3)) < 0.015


def test_what_is_out_of_range_is_an_error_with_its_place() -> None:
    layout = Layout.of({"b": np.zeros((2, 3)), "a": np.zeros(4), "empty": np.zeros(0)})
    vector = layout.join({"b": np.array([[0, 0, 0], [0, 9.0, 0]]), "a": np.zeros(4), "empty": np.zeros(0)})
    with pytest.raises(InputError, match=r"b\[1, 1\]: 1 of 10 values .* beyond 1 .* first of them 9") as caught:
        FixedPoint(16, 1.0).round(vector, layout)
    assert "secure.range" in str(caught.value)
    for bad in (float("nan"), float("inf"), 1.0000001):
        with pytest.raises(InputError, match="element 1"):
            FixedPoint(16, 1.0).round(np.array([1.0, bad]))


def test_a_layout_joins_and_splits() -> None:
    tensors = {"w": np.arange(6.0).reshape(2, 3), "b": np.array(7.0), "e": np.zeros((0, 3))}
    layout = Layout.of(tensors)
    assert layout.length == 7
    again = layout.split(layout.join(tensors))
    assert all(np.array_equal(again[name], tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match="other names or shapes"):
        layout.join({"w": np.zeros(6)})


@given(st.lists(st.integers(-(2**61), 2**61 - 1), min_size=1), st.sampled_from([20, 32, 33, 62]))
def test_words_are_integers(values: list[int], bits: int) -> None:
    limit = 1 << (bits - 1)
    integers = np.array([(v + limit) % (2 * limit) - limit for v in values], np.int64)
    word = np.dtype(np.uint32 if bits <= 32 else np.uint64)
    np.testing.assert_array_equal(as_integers(as_words(integers, word), bits), integers)


def test_the_tails_of_a_draw() -> None:
    """Against fractions: P(X < 2) and P(X ≥ 4), 5 drawn of 12 of which 7 are marked."""
    from math import comb

    from verbund.exchange.federated.secure.neighbourhood import _tails

    below, least = _tails(12, 7, 5)
    each = [Fraction(comb(7, i) * comb(5, 5 - i), comb(12, 5)) for i in range(6)]
    np.testing.assert_allclose(below, [float(sum(each[:i])) for i in range(6)], atol=1e-12)
    np.testing.assert_allclose(least, [float(sum(each[i:])) for i in range(6)], atol=1e-12)


def test_how_many_neighbours() -> None:
    assert neighbourhood(20, 14, 0.1, "all").degree == 19
    assert neighbourhood(20, 14, 0.1, 50).degree == 19
    many = neighbourhood(1000, 900, 0.1, "auto")
    assert many.against == "cheating"
    assert many.degree < 100
    assert 2 * many.shares > many.degree + 1, "else two halves of the holders could give both secrets"
    assert neighbourhood(1000, 700, 0.1, 100).against == "curious"
    with pytest.raises(
        InputError, match="8 neighbours among 1000 clients, of which 100 may collude and 300 may drop out"
    ):
        neighbourhood(1000, 700, 0.1, 8)
