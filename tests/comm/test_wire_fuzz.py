"""Whatever a peer sends, before or after it is trusted: an error of ours, within limits and in time."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.comm.ring import group
from verbund.comm.wire import (
    Bits,
    Connection,
    Message,
    Replies,
    Reply,
    Secret,
    WireError,
    dial,
    frames,
    handshake,
)

PREFIX = struct.Struct("<IIQQ")
LIMIT = 1 << 16
SECRET = Secret.create()
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def sound() -> bytes:
    """A message with arrays of every kind, as it travels."""
    raw, sock = socket.socketpair()
    sender = Connection(sock)
    sender.send(
        "push",
        {"block": 3, "of": ["a", None]},
        f=np.arange(6, dtype=np.float32).reshape(2, 3),
        b=np.array([True, False]),
        p=Bits(np.arange(5, dtype=np.uint8), 3),
        h=torch.ones(3, dtype=torch.bfloat16),
        e=np.empty((0, 4)),
    )
    content = raw.recv(1 << 16)
    raw.close()
    sender.close()
    return content


SOUND = sound()
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "repeat"]), st.integers(0, len(SOUND)), st.binary(max_size=12)
    ),
    min_size=1,
    max_size=4,
)
PLACES = st.dictionaries(
    st.sampled_from(["f", "b", "p", "h", "e", "z"]),
    st.builds(
        np.zeros,
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from([np.dtype(name) for name in ("f4", "f8", "u1", "i2", "?", "u4")]),
    ),
    max_size=3,
)


def edited(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for what, at, piece in edits:
        after = at if what == "insert" else at + len(piece)
        piece = {"delete": b"", "repeat": content[at:after] * 2}.get(what, piece)
        content = content[:at] + piece + content[after:]
    return content


def repaired(content: bytes) -> bytes:
    """With lengths and sum that are right, so that what lies behind them is looked at."""
    if len(content) < PREFIX.size:
        return content
    size = min(PREFIX.unpack_from(content)[1], len(content) - PREFIX.size)
    rest = content[PREFIX.size :]
    return PREFIX.pack(frames.MAGIC, size, len(rest) - size, xxhash.xxh3_64_intdigest(rest)) + rest


def decode(content: bytes, places: dict[str, Any] | None = None) -> Message | None:
    """What a connection makes of bytes; None for an error of ours. The peer is gone after them."""
    raw, sock = socket.socketpair()
    connection = Connection(sock, body_limit=LIMIT, header_limit=LIMIT)
    raw.sendall(content)
    raw.close()
    start = time.monotonic()
    tracemalloc.start()
    try:
        return connection.receive(2.0, places)
    except WireError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        connection.close()
        assert peak < 20 * LIMIT
        assert time.monotonic() - start < 2.0


@settings(max_examples=200, deadline=None)
@given(EDITS, st.booleans(), PLACES)
def test_edited_frames(edits: list[tuple[str, int, bytes]], repair: bool, places: dict[str, Any]) -> None:
    content = edited(SOUND, edits)
    before = {name: place.copy() for name, place in places.items()}
    message = decode(repaired(content) if repair else content, places)
    if message is not None:
        assert set(message.arrays).isdisjoint(message.placed)
        for name in set(places) - message.placed:
            assert np.array_equal(places[name], before[name])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 32), st.integers(0, 40), st.binary(max_size=120))
def test_packed_numbers_of_any_bytes(width: int, count: int, body: bytes) -> None:
    header = f'{{"kind": "k", "fields": {{}}, "arrays": [["x", "bits:{width}", [{count}]]]}}'.encode()
    prefix = PREFIX.pack(frames.MAGIC, len(header), len(body), xxhash.xxh3_64_intdigest(header + body))
    message = decode(prefix + header + body)
    if message is not None:
        found = message.arrays["x"]
        assert found.shape == (count,)
        assert not count or int(found.max()) < 1 << width
        raw, sock = socket.socketpair()
        sender = Connection(sock)
        sender.send("k", x=Bits(found, width))
        assert raw.recv(1 << 16).endswith(body)  # there is one way to pack them
        raw.close()
        sender.close()


def drive(steps: Generator[int, None, Any], sock: socket.socket, seconds: float = 2.0) -> Any:
    """Goes through a handshake; the error that it ends with, if it does."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    descriptor = sock.fileno()
    try:
        while True:
            event = next(steps)
            poll.register(descriptor, event)
            assert poll.poll(max(0.0, deadline - time.monotonic()) * 1000), "it waits for what does not come"
    except StopIteration as end:
        end.value[0].sock.close()
        return None
    except (WireError, OSError) as error:
        return error


GREETINGS = st.binary(max_size=120) | st.binary(min_size=64, max_size=120).map(lambda more: handshake._GREETING + more)


@pytest.mark.parametrize("encrypted", [False, True])
def test_listeners_meet_anything(encrypted: bool) -> None:
    trust = handshake.Trust.of_listener(SECRET, encrypted)

    @settings(max_examples=60, deadline=None)
    @given(GREETINGS)
    def meet(content: bytes) -> None:
        raw, sock = socket.socketpair()
        raw.sendall(content)
        raw.shutdown(socket.SHUT_WR)
        assert drive(handshake.answer(sock, trust), sock) is not None
        raw.close()

    meet()


@pytest.mark.parametrize("encrypted", [False, True])
def test_diallers_meet_anything(encrypted: bool) -> None:
    trust = handshake.Trust.of_dialler(SECRET, encrypted)

    @settings(max_examples=60, deadline=None)
    @given(st.binary(max_size=200))
    def meet(content: bytes) -> None:
        raw, sock = socket.socketpair()
        raw.sendall(content)
        raw.shutdown(socket.SHUT_WR)
        assert drive(handshake.ask(sock, trust, "localhost"), sock) is not None
        raw.close()

    meet()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 175), st.integers(1, 255))
def test_every_byte_of_a_handshake_counts(at: int, change: int) -> None:
    """Somebody in between changes one byte of what the two say: 40, 32 of the dialler's, 64, 8 of the listener's."""
    ours, left = socket.socketpair()
    theirs, right = socket.socketpair()
    ended: dict[str, Any] = {}

    def between() -> None:
        place = 0
        for source, target, size in ((left, right, 40), (right, left, 64), (left, right, 32), (right, left, 8)):
            content = bytearray()
            while len(content) < size and (more := source.recv(size - len(content))):
                content += more
            if place <= at < place + len(content):
                content[at - place] ^= change
            place += size
            with contextlib.suppress(OSError):
                target.sendall(content)
            if len(content) < size:
                break
        left.close()
        right.close()

    def answer() -> None:
        ended["listener"] = drive(handshake.answer(theirs, handshake.Trust(SECRET)), theirs)

    threads = [threading.Thread(target=between), threading.Thread(target=answer)]
    for thread in threads:
        thread.start()
    error = drive(handshake.ask(ours, handshake.Trust(SECRET), ""), ours)
    for thread in threads:
        thread.join(5.0)
    changed = at < 40 + 64 + 32 + 8
    assert isinstance(error, WireError) == changed
    assert (ended["listener"] is not None) == (at < 40 + 64 + 32)  # the last word is the listener's own


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=100))
def test_dialling_anything_is_an_error_of_ours(content: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as sock, contextlib.suppress(OSError):
                sock.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(WireError):
            dial(f"tcp:127.0.0.1:{server.getsockname()[1]}", SECRET, 2.0)
        thread.join()


@settings(max_examples=100, deadline=None)
@given(ANYTHING)
def test_any_request(given_: Any) -> None:
    class Nobody:
        def send(self, *_: Any, **__: Any) -> None:
            return

    nobody: Any = Nobody()
    with contextlib.suppress(WireError):
        Replies(lambda message: Reply("x")).answer(nobody, Message("k", {"request": given_}))


@settings(max_examples=100, deadline=None)
@given(ANYTHING)
def test_any_key_of_a_collective(given_: Any) -> None:
    with contextlib.suppress(WireError):
        assert group._key("k", {"key": given_})[1:] == tuple(given_)


def test_descriptors_do_not_pile_up() -> None:
    """Handshakes that fail leave nothing open."""
    trust = handshake.Trust.of_listener(SECRET, True)
    before = len(os.listdir("/proc/self/fd"))
    for content in (b"", b"x", b"\x16\x03\x01" + bytes(200), os.urandom(64)):
        raw, sock = socket.socketpair()
        raw.sendall(content)
        raw.shutdown(socket.SHUT_WR)
        drive(handshake.answer(sock, trust), sock)
        raw.close()
    raw, sock = socket.socketpair()
    steps = handshake.answer(sock, trust)
    next(steps)
    steps.close()
    raw.close()
    assert len(os.listdir("/proc/self/fd")) == before
