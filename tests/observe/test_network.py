"""Bytes of real TCP connections, against what was sent."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from verbund.observe.network import Links

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's counters are Linux's")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    yield client, accepted
    client.close()
    accepted.close()


def peer(connection: socket.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"{host}:{port}"


def exchange(sender: socket.socket, receiver: socket.socket, size: int) -> None:
    sender.sendall(b"x" * size)
    left = size
    while left:
        left -= len(receiver.recv(left))


def settled(links: Links, name: str, sent: int, received: int) -> tuple[int, int]:
    """The counts, as soon as they are at least these: acknowledgements of the last segment may come a moment later."""
    deadline = time.monotonic() + 5
    while True:
        counts = (links.sample() or {}).get(name, (-1, -1))
        if (counts[0] >= sent and counts[1] >= received) or time.monotonic() > deadline:
            return counts
        time.sleep(0.002)


def test_counts_what_was_sent_and_received(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    links = Links()
    exchange(client, accepted, 100_000)
    exchange(accepted, client, 777)
    # The acknowledgement of the first segment of a connection counts as one byte on the side that opened it.
    sent, received = settled(links, peer(client), 100_000, 777)
    assert received == 777
    assert sent in (100_000, 100_001)
    sent, received = settled(links, peer(accepted), 777, 100_000)
    assert received == 100_000
    assert sent in (777, 778)


def test_a_closed_connection_keeps_its_last_count(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    links, name = Links(), peer(client)
    exchange(accepted, client, 5000)
    assert settled(links, name, 0, 5000)[1] == 5000
    client.close()
    for _ in range(3):
        sample = links.sample()
        assert sample is not None
        assert sample[name][1] == 5000
    server = socket.create_server(("127.0.0.1", int(name.split(":")[1])))
    with server, socket.create_connection(server.getsockname()) as again:
        back, _ = server.accept()
        with back:
            exchange(back, again, 30)
            assert settled(links, name, 0, 5030)[1] == 5030


def test_a_socket_that_connects_later_is_counted() -> None:
    links = Links()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        links.sample()
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            exchange(accepted, client, 64)
            name = peer(client)
            assert settled(links, name, 0, 64)[1] == 64


def test_looks_at_nothing_else_and_leaks_no_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    left, right = socket.socketpair()
    with left, right, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        datagram.connect(("127.0.0.1", 9))
        links = Links()
        before = len(os.listdir("/proc/self/fd"))
        names = set(links.sample() or {})
        links.sample()
        assert len(os.listdir("/proc/self/fd")) == before
    assert {peer(client), peer(accepted)} <= names
    assert "127.0.0.1:9" not in names


def test_other_systems_say_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Links().sample() is None


def test_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refuse)
    assert Links().sample() is None
