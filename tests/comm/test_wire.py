"""The wire against bytes of every kind: what comes out is the message, or an error of ours."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from verbund.comm.wire import Closed, Connection, Deadline, Memory, Message, WireError, frames

DTYPES = sorted(frames.DTYPES)
OTHERS = ["bfloat16", "bits:1", "bits:7", "bits:16"]
PREFIX = struct.Struct("<IIQQ")


@contextmanager
def pair(**limits: Any) -> Iterator[tuple[socket.socket, Connection]]:
    """A raw socket and the connection at its other end."""
    raw, other = socket.socketpair()
    connection = Connection(other, **limits)
    try:
        yield raw, connection
    finally:
        raw.close()
        connection.close()


@contextmanager
def connections(**limits: Any) -> Iterator[tuple[Connection, Connection]]:
    a, b = socket.socketpair()
    ends = Connection(a, **limits), Connection(b, **limits)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def decode(content: bytes, **limits: Any) -> Message:
    """What a connection makes of these bytes, after which the peer is gone."""
    with pair(**limits) as (raw, connection):
        sender = threading.Thread(target=_feed, args=(raw, content))
        sender.start()
        try:
            return connection.receive(5.0)
        finally:
            connection.close()
            sender.join()


def _feed(raw: socket.socket, content: bytes) -> None:
    try:
        raw.sendall(content)
    except OSError:
        return  # the other end had seen enough
    finally:
        raw.close()


def frame(header: Any, body: bytes = b"", *, size: int | None = None, check: int | None = None) -> bytes:
    """A frame, by default a sound one."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    right = xxhash.xxh3_64_intdigest(encoded + body)
    length = len(body) if size is None else size
    return PREFIX.pack(frames.MAGIC, len(encoded), length, right if check is None else check) + encoded + body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in ("self", "kind", "fields")),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: st_np.arrays(
            np.dtype(dtype).newbyteorder("<"),
            st_np.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=4),
        )
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(st.text(), st.dictionaries(st.text(), JSON, max_size=3), ARRAYS)
def test_round_trip(kind: str, fields: dict[str, Any], arrays: dict[str, Any]) -> None:
    with connections() as (a, b):
        a.send(kind, fields, **arrays)
        a.send("next")
        message = b.receive(5.0)
        assert (message.kind, message.fields, list(message.arrays)) == (kind, fields, list(arrays))
        for name, array in arrays.items():
            found = message.arrays[name]
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()
        assert b.receive(5.0).kind == "next"  # nothing is left over, nothing was taken of the next


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_views_arrive_as_their_values(dtype: str, seed: int) -> None:
    """Strided, transposed, reversed and big-endian arrays; the reference is numpy's own equality."""
    values = np.random.default_rng(seed).integers(0, 2, (4, 6)).astype(dtype)
    views = {
        "strided": values[::2, 1::3],
        "transposed": values.T,
        "reversed": values[::-1, ::-1],
        "broadcast": np.broadcast_to(values[0], (3, 6)),
        "big_endian": values.astype(np.dtype(dtype).newbyteorder(">")),
    }
    with connections() as (a, b):
        a.send("x", **views)
        found = b.receive(5.0).arrays
    for name, view in views.items():
        assert np.array_equal(found[name], view), name
        assert found[name].flags.writeable


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(content: bytes) -> None:
    with pytest.raises(WireError):
        decode(content)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=120), st.binary(max_size=40))
def test_random_header_in_a_sound_frame(header: bytes, body: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame(header, body))


def sound() -> bytes:
    array = np.arange(6, dtype=np.int32)
    return frame({"kind": "k", "fields": {"a": 1}, "arrays": [["x", "int32", [2, 3]]]}, array.tobytes())


def test_every_truncation() -> None:
    whole = sound()
    assert decode(whole).arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    for end in range(len(whole)):
        with pytest.raises(Closed):
            decode(whole[:end])


def test_every_flipped_bit() -> None:
    whole = sound()
    for at in range(len(whole)):
        for bit in range(8):
            with pytest.raises(WireError):
                decode(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "kind": JSON | st.just("k"),
            "fields": JSON | st.just({}),
            "arrays": JSON
            | st.lists(
                st.tuples(
                    st.sampled_from(["a", "b"]) | JSON,
                    st.sampled_from(
                        [*DTYPES, "bfloat16", "bits:1", "bits:7", "bits:33", "bits:0", "object", "<f4", "S8"]
                    ),
                    st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**47, 2**48, 2**64, 1.5, True]), max_size=40),
                ),
                max_size=3,
            ),
        },
    ),
    st.binary(max_size=64),
)
def test_structured_headers(header: dict[str, Any], body: bytes) -> None:
    """Frames with a right sum whose header is nearly ours."""
    try:
        message = decode(frame(header, body))
    except WireError:
        return
    assert isinstance(message.kind, str)
    assert message.fields == header["fields"]
    assert sum(frames.Described(*array).size for array in header["arrays"]) == len(body)


@pytest.mark.parametrize(
    ("arrays", "size"),
    [
        ([["x", "float32", [1 << 47, 1 << 47]]], 64),
        ([["x", "float32", [0, 1 << 47, 1 << 47]]], 0),
        ([["x", "float32", [1] * 65]], 4),
        ([["x", "float32", [1 << 47] * 50_000]], 64),
        ([["x", "float32", [1 << 30]]], 64),
        ([["x", "float32", [True]]], 4),
        ([["x", "object", [1]]], 8),
        ([["x", "float32", [-1]]], 4),
        ([["x", "float32", [1]], ["x", "float32", [1]]], 8),
        ([["x", "float32"]], 4),
        ([["x", "bits:1", [1 << 47]]], 64),
        ([["x", "bits:33", [8]]], 33),
        ([], 4),
    ],
)
def test_shapes_are_checked_before_anything_is_allocated(arrays: list[Any], size: int) -> None:
    content = frame({"kind": "k", "fields": {}, "arrays": arrays}, bytes(size))
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    ("header", "body"), [(2000, 10), (10, 2000), (2**32 - 1, 0), (0, 2**64 - 1), (2**32 - 1, 2**64 - 1)]
)
def test_lengths_over_the_limit_are_refused_at_once(header: int, body: int) -> None:
    """Before anything is allocated, and without waiting for what would follow."""
    with pair(body_limit=1000, header_limit=1000) as (raw, connection):
        raw.sendall(PREFIX.pack(frames.MAGIC, header, body, 0))
        tracemalloc.start()
        try:
            with pytest.raises(WireError, match="over the limit"):
                connection.receive(5.0)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("header", [b"[" * 500_000, b'{"a":' * 100_000, b"9" * 100_000, b'"' + b"a" * 1000, b"\xff"])
def test_hostile_json(header: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame(header))


def test_bools_are_zero_or_one() -> None:
    header = {"kind": "k", "fields": {}, "arrays": [["x", "bool", [3]]]}
    assert decode(frame(header, b"\1\0\1")).arrays["x"].tolist() == [True, False, True]
    with pytest.raises(WireError, match="bool"):
        decode(frame(header, b"\1\2\1"))


def test_what_cannot_travel_is_the_senders_error_and_harms_nothing() -> None:
    with connections(body_limit=100, header_limit=200) as (a, b):
        for arrays in (
            {"x": np.array([object()])},
            {"x": np.zeros(2, np.complex64)},
            {"x": np.zeros(2, "datetime64[s]")},
            {"x": np.zeros(101, np.uint8)},
            {"x" * 300: np.zeros(1)},
        ):
            with pytest.raises(ValueError, match=r"does not travel|over the limit"):
                a.send("k", **arrays)
        a.send("k", {"sound": True})
        assert b.receive(5.0).fields == {"sound": True}


class TestTime:
    def test_nothing_comes(self) -> None:
        with connections() as (a, b):
            assert not b.ready(0.01)
            with pytest.raises(Deadline):
                b.receive(0.05)
            a.send("late")
            assert b.ready()
            assert b.receive(1.0).kind == "late"  # no part of it had come: no harm

    @pytest.mark.parametrize("cut", [3, 29, -2])
    def test_half_a_message_comes(self, cut: int) -> None:
        """Drip-fed bytes do not stretch the deadline, and what follows is not taken for a message."""
        with pair() as (raw, connection):
            raw.sendall(sound()[:cut])
            with pytest.raises(Deadline):
                connection.receive(0.05)
            raw.sendall(sound()[cut:] + sound())
            with pytest.raises(WireError, match="half-read"):
                connection.receive(1.0)

    def test_drops_do_not_stretch_the_deadline(self) -> None:
        with pair() as (raw, connection):
            done = threading.Event()

            def drip() -> None:
                for byte in sound():
                    if done.wait(0.02):
                        return
                    raw.sendall(bytes([byte]))

            thread = threading.Thread(target=drip)
            thread.start()
            start = time.monotonic()
            with pytest.raises(Deadline):
                connection.receive(0.2)
            assert time.monotonic() - start < 0.5
            done.set()
            thread.join()

    def test_a_peer_that_takes_nothing(self) -> None:
        with pair(stall=0.2) as (_, connection):
            start = time.monotonic()
            with pytest.raises(Closed, match=r"took nothing for 0\.2 s"):
                connection.send("k", x=np.zeros(1 << 22, np.uint8))
            assert time.monotonic() - start < 2.0
            with pytest.raises(Closed, match="half-sent"):
                connection.send("k")

    def test_a_peer_that_is_gone(self) -> None:
        with pair() as (raw, connection):
            raw.close()
            assert connection.ready()
            with pytest.raises(Closed):
                connection.receive(1.0)
            with pytest.raises(Closed):
                connection.send("k", x=np.zeros(1 << 20))

    def test_our_own_end_is_closed(self) -> None:
        with pair() as (_, connection):
            connection.close()
            for use in (connection.ready, lambda: connection.receive(0.1), lambda: connection.send("k")):
                with pytest.raises(Closed):
                    use()


def test_many_threads_send_whole_messages() -> None:
    with connections() as (a, b):

        def send(sender: int) -> None:
            for number in range(20):
                a.send("k", {"sender": sender, "number": number}, x=np.full(3000, sender, np.int64))

        threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
        for thread in threads:
            thread.start()
        seen: dict[int, list[int]] = {}
        for _ in range(80):
            message = b.receive(5.0)
            seen.setdefault(message.fields["sender"], []).append(message.fields["number"])
            assert (message.arrays["x"] == message.fields["sender"]).all()
        for thread in threads:
            thread.join()
        assert seen == {sender: list(range(20)) for sender in range(4)}


def test_memory_is_used_again() -> None:
    """Arrays of one message lie in the memory of the former, whatever their sizes, and are what was sent."""
    memory = Memory()
    with connections() as (a, b):
        seen = set()
        for number, size in enumerate([10, 1000, 1000, 500, 1000]):
            a.send("x", {}, None, u=np.full(size, number, np.float32), v=np.full(3, number, np.uint8), e=np.array(7.0))
            arrays = b.receive(5.0, None, memory).arrays
            assert arrays["u"].tolist() == [number] * size
            assert arrays["v"].tolist() == [number] * 3
            assert (arrays["e"].shape, float(arrays["e"])) == ((), 7.0)
            seen.add(arrays["u"].__array_interface__["data"][0])
        assert len(seen) == 3  # the third, fourth and fifth lie at the same place
        for _ in range(200):
            a.send("x", {}, None, u=np.zeros(1, np.float32))
            b.receive(5.0, None, memory)
        assert memory._block.size < 200


def test_descriptors_above_1023() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip(f"only {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    taken = [null]
    try:
        while taken[-1] < 1030:
            taken.append(os.dup(null))
        with connections() as (a, b):
            assert b.fileno() > 1023
            a.send("k")
            assert b.ready(1.0)
            assert b.receive(1.0).kind == "k"
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
