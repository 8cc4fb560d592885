"""What is received into given memory, and types that numpy has not."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from verbund.comm.wire import Bits, Closed, Connection, Deadline, WireError

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    a, b = (Connection(sock, body_limit=1 << 24, stall=5.0) for sock in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def test_into_arrays_and_tensors_without_a_copy(ends: Ends) -> None:
    sent = {"a": torch.randn(1000, 512), "b": np.arange(7, dtype=np.int64), "c": torch.tensor(3.5)}
    places: dict[str, Any] = {"a": torch.zeros(1000, 512), "b": np.zeros(7, np.int64), "c": torch.zeros(())}
    thread = threading.Thread(target=ends[0].send, args=("k",), kwargs=sent)
    thread.start()
    tracemalloc.start()
    message = ends[1].receive(5.0, places)
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
    thread.join()
    assert (message.arrays, message.placed) == ({}, frozenset(sent))
    assert torch.equal(places["a"], sent["a"])
    assert np.array_equal(places["b"], sent["b"])
    assert float(places["c"]) == 3.5


def test_some_have_places(ends: Ends) -> None:
    """Places for what does not come are left as they are; what has no place gets memory."""
    place = np.full(2, 7.0)
    ends[0].send("k", {"block": 3}, a=np.arange(3))
    message = ends[1].receive(5.0, {"z": place})
    assert message.arrays["a"].tolist() == [0, 1, 2]
    assert message.placed == frozenset()
    assert place.tolist() == [7.0, 7.0]


def test_the_place_depends_on_the_message(ends: Ends) -> None:
    blocks = torch.zeros(4, 3)
    ends[0].send("push", {"block": 2}, values=torch.ones(3))
    ends[1].receive(5.0, lambda kind, fields: {"values": blocks[fields["block"]]} if kind == "push" else {})
    assert blocks.sum(1).tolist() == [0, 0, 3, 0]


@pytest.mark.parametrize(
    "place",
    [
        np.zeros((3, 2), np.float32),
        np.zeros(6, np.float32),
        np.zeros((2, 3), np.float64),
        np.zeros((2, 3), np.int32),
        np.zeros((2, 3), ">f4"),
        torch.zeros(2, 3, dtype=torch.bfloat16),
    ],
)
def test_a_place_that_does_not_fit(ends: Ends, place: Any) -> None:
    ends[0].send("k", x=np.ones((2, 3), np.float32))
    with pytest.raises(WireError, match="array x is float32"):
        ends[1].receive(5.0, {"x": place})
    assert not place.any()


def test_a_place_that_is_none(ends: Ends) -> None:
    ends[0].send("k", x=np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="not contiguous"):
        ends[1].receive(5.0, {"x": np.ones((3, 2), np.float32).T})


def test_bfloat16(ends: Ends) -> None:
    values = torch.tensor([[1.5, -0.0, float("inf")], [3e38, 1e-40, float("nan")]], dtype=torch.bfloat16)
    for _ in range(2):
        ends[0].send("k", x=values)
    place = torch.zeros(2, 3, dtype=torch.bfloat16)
    ends[1].receive(5.0, {"x": place})
    assert torch.equal(place.view(torch.int16), values.view(torch.int16))
    assert np.array_equal(ends[1].receive(5.0).arrays["x"], values.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("width", [1, 3, 8, 11, 16, 32])
def test_packed_numbers(ends: Ends, width: int) -> None:
    values = np.random.default_rng(width).integers(0, 2**width, (5, 9)).astype(np.uint32)
    for _ in range(2):
        ends[0].send("k", x=Bits(values, width))
    assert np.array_equal(ends[1].receive(5.0).arrays["x"], values)
    place = np.zeros((5, 9), np.uint32)
    assert ends[1].receive(5.0, {"x": place}).placed == {"x"}
    assert np.array_equal(place, values)


def test_packed_numbers_are_few_bytes() -> None:
    raw, sock = socket.socketpair()
    connection = Connection(sock)
    connection.send("k", x=Bits(np.ones(8000, np.uint8), 1))
    assert len(raw.recv(1 << 16)) < 1200
    raw.close()
    connection.close()


def test_what_is_unpacked_counts() -> None:
    """A few bytes cannot make the receiver allocate eight times its limit."""
    a, b = (Connection(sock, body_limit=limit) for sock, limit in zip(socket.socketpair(), (8000, 1000), strict=True))
    a.send("k", x=Bits(np.ones(7000, np.uint8), 1))
    with pytest.raises(WireError, match="over the limit"):
        b.receive(5.0)
    a.close()
    b.close()


def test_sending_has_a_deadline(ends: Ends) -> None:
    """A peer that takes some bytes now and then does not stretch it."""
    raw, sock = socket.socketpair()
    connection = Connection(sock)
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.02):
            raw.recv(5000)

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with pytest.raises(Deadline):
        connection.send("k", None, 0.3, x=np.zeros(1 << 22, np.uint8))
    assert time.monotonic() - start < 2.0
    with pytest.raises(Closed, match="half-sent"):
        connection.send("k")
    over.set()
    thread.join()
    raw.close()
    connection.close()


def test_a_thread_that_waits_is_woken() -> None:
    a, b = (Connection(sock) for sock in socket.socketpair())
    ended: list[WireError] = []

    def receive() -> None:
        try:
            a.receive(None)
        except WireError as error:
            ended.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    a.end()
    thread.join(5.0)
    assert len(ended) == 1
    a.close()
    b.close()
