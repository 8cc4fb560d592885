"""Sockets that a library has opened, ended from outside."""

from __future__ import annotations

import os
import socket

from verbund.comm.sockets import Sockets


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def test_only_those_of_the_block_are_shut_down() -> None:
    ours, others = _pair()
    sockets = Sockets()
    with sockets.opened():
        theirs, peer = _pair()
        listener = socket.create_server(("127.0.0.1", 0))
        log = os.open(os.devnull, os.O_WRONLY)
    later, peer_of_later = _pair()
    sockets.shut()
    sockets.shut()
    for end in (theirs, peer):
        end.settimeout(1.0)
        assert end.recv(1) == b""
    for one, other in ((ours, others), (later, peer_of_later)):
        one.send(b"x")
        assert other.recv(1) == b"x"
    assert os.write(log, b"x") == 1
    for each in (ours, others, theirs, peer, listener, later, peer_of_later):
        each.close()
    os.close(log)


def test_what_is_being_opened_is_shut_down_as_soon_as_it_is_there() -> None:
    sockets = Sockets()
    with sockets.opened():
        first, second = _pair()
        sockets.shut()
    for end in (first, second):
        end.settimeout(1.0)
        assert end.recv(1) == b""
        end.close()


def test_a_descriptor_that_is_another_ones_by_now_is_left_alone() -> None:
    sockets = Sockets()
    with sockets.opened():
        first, second = _pair()
    number = first.fileno()
    first.close()
    second.close()
    third, fourth = _pair()
    assert number in (third.fileno(), fourth.fileno())
    sockets.shut()
    third.send(b"x")
    assert fourth.recv(1) == b"x"
    third.close()
    fourth.close()
