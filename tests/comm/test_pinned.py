"""Identities that are pinned one by one, without an authority."""

from __future__ import annotations

from pathlib import Path

import pytest

from verbund.comm.wire import Connection, Enrolled, Identity, Pinned, Refused, dial, listen
from verbund.errors import InputError


def test_listener_knows_who_is_enrolled_and_nobody_else(tmp_path: Path) -> None:
    server = Identity.kept(tmp_path / "server.pem")
    known: dict[bytes, str] = {}
    clients = [Identity.kept(tmp_path / f"client-{n}.pem") for n in range(3)]
    listener = listen("tcp:127.0.0.1:0", Enrolled(server, lambda: dict(known)))

    def met(identity: Identity | None) -> tuple[str, ...]:
        connection: Connection = dial(listener.address, Pinned(server.fingerprint, identity), 5.0)
        accepted = listener.accept(5.0)
        connection.close()
        accepted.close()
        return accepted.peer.names

    try:
        assert met(None) == ()  # a stranger has no name
        with pytest.raises(Refused):
            met(clients[0])
        for n, client in enumerate(clients):  # also while it listens; several at once
            known[client.certificate] = f"owner-{n}"
        assert [met(client) for client in clients] == [("owner-0",), ("owner-1",), ("owner-2",)]
        del known[clients[1].certificate]
        with pytest.raises(Refused):
            met(clients[1])
        assert met(clients[2]) == ("owner-2",)
    finally:
        listener.close()


def test_dialler_refuses_another_server_than_the_pinned_one(tmp_path: Path) -> None:
    right, wrong = Identity.kept(tmp_path / "right.pem"), Identity.kept(tmp_path / "wrong.pem")
    listener = listen("tcp:127.0.0.1:0", Enrolled(wrong, dict))
    try:
        with pytest.raises(Refused, match="pinned"):
            dial(listener.address, Pinned(right.fingerprint), 5.0)
    finally:
        listener.close()


def test_identity_stays_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "identity.pem"
    first = Identity.kept(path)
    assert path.stat().st_mode & 0o077 == 0
    assert Identity.kept(path).fingerprint == first.fingerprint
    path.chmod(0o644)
    with pytest.raises(InputError, match="private key"):
        Identity.kept(path)
