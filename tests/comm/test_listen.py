"""Listening and dialling: who gets in, who does not, and that nobody keeps others out."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from authority import Authority

from conftest import wait_for
from verbund.comm.wire import (
    Closed,
    Connection,
    Credentials,
    Deadline,
    Listener,
    Refused,
    Secret,
    WireError,
    dial,
    handshake,
    listen,
    stream,
    tls,
)
from verbund.comm.wire import listener as listening
from verbund.errors import InputError

SECRET = Secret.create()


@pytest.fixture
def private(temporary: Path) -> Path:
    return temporary  # made by tempfile: only this user can enter it


@contextmanager
def joined(address: str, ours: Credentials, theirs: Credentials) -> Iterator[tuple[Connection, Connection]]:
    with (
        closing(listen(address, ours)) as listener,
        closing(dial(listener.address, theirs, 5.0)) as dialled,
        closing(listener.accept(5.0)) as accepted,
    ):
        yield accepted, dialled


def exchange(a: Connection, b: Connection) -> None:
    """Both directions at once, more than the kernel's buffers hold."""
    values = np.random.default_rng(3).normal(size=1 << 19)
    threads = [threading.Thread(target=one.send, args=("x",), kwargs={"values": values}) for one in (a, b)]
    for thread in threads:
        thread.start()
    for one in (a, b):
        assert np.array_equal(one.receive(10.0).arrays["values"], values)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("address", ["unix", "tcp:127.0.0.1:0", "tcp:[::1]:0", "tcp:localhost:0"])
@pytest.mark.parametrize("credentials", [None, SECRET], ids=["nothing", "secret"])
def test_messages_both_ways(address: str, credentials: Credentials, private: Path) -> None:
    address = f"unix:{private}/x" if address == "unix" else address
    with joined(address, credentials, credentials) as ends:
        exchange(*ends)
        ends[0].close()
        with pytest.raises(Closed):
            ends[1].receive(5.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_mutual_tls(host: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with joined(f"tcp:{host}:0", authority.issue("server"), authority.issue("hospital")) as (accepted, dialled):
        exchange(accepted, dialled)
        assert "hospital" in accepted.peer.names
        assert "server" in dialled.peer.names


def test_the_port_is_published() -> None:
    with closing(listen("tcp:127.0.0.1:0")) as listener:
        assert listener.address.startswith("tcp:127.0.0.1:")
        assert not listener.address.endswith(":0")


def test_a_descriptor_tells_of_connections() -> None:
    with closing(listen("tcp:127.0.0.1:0", SECRET)) as listener:
        with pytest.raises(Deadline):
            listener.accept(0.05)
        with closing(dial(listener.address, SECRET)):
            assert select.select([listener], [], [], 5.0)[0]
            listener.accept(0.0).close()
            assert not select.select([listener], [], [], 0.0)[0]


@pytest.mark.parametrize("credentials", [None, SECRET], ids=["plain", "tls"])
def test_large_messages_that_come_in_small_pieces(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for them is not woken for every piece, and gets the last ones too."""
    polls = 0

    def counted(sock: socket.socket, event: int, timeout: float) -> bool:
        nonlocal polls
        polls += event == select.POLLIN
        return polled(sock, event, timeout)

    def dribble(connection: Connection, sizes: list[int]) -> None:
        for size in sizes:
            connection.send("x", x=np.ones(size, np.uint8))

    polled = stream.polled
    for kind in (tls.Tls, stream.Plain):
        send = kind.send
        monkeypatch.setattr(kind, "send", lambda self, view, send=send: (time.sleep(2e-4), send(self, view[:1400]))[1])
    sizes = [30_000, 36_863, 36_864, 70_000, 98_304, 150_000, 500_003]
    with joined("tcp:127.0.0.1:0", credentials, credentials) as (one, other):
        monkeypatch.setattr(stream, "polled", counted)
        sender = threading.Thread(target=dribble, args=(one, sizes))
        sender.start()
        for size in sizes:
            assert len(other.receive(10.0).arrays["x"]) == size
        sender.join()
    assert polls < sum(sizes) / 1400 / 2


class TestTrust:
    """Law: nothing listens beyond loopback without credentials."""

    @pytest.mark.parametrize("address", ["tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:192.0.2.1:80", "tcp:10.1.2.3:0"])
    def test_beyond_loopback(self, address: str) -> None:
        with pytest.raises(InputError, match="without credentials"):
            listen(address)
        with pytest.raises(InputError, match="without credentials"):
            dial(address)

    def test_a_folder_that_others_can_enter(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        with pytest.raises(InputError, match="others can enter"):
            listen(f"unix:{tmp_path}/x")

    @pytest.mark.parametrize(
        "address",
        [
            "",
            "x",
            "unix:",
            "tcp:host",
            "tcp::1",
            "tcp:::1:2",
            "tcp:h:99999",
            "tcp:h:-1",
            "tcp:h:x",
            "unix:" + "a" * 200,
        ],
    )
    def test_no_address(self, address: str) -> None:
        with pytest.raises(InputError):
            listen(address, SECRET)

    def test_an_address_in_use(self) -> None:
        with closing(listen("tcp:127.0.0.1:0")) as listener, pytest.raises(InputError, match="cannot listen"):
            listen(listener.address)

    def test_nobody_listens(self, private: Path) -> None:
        with closing(listen("tcp:127.0.0.1:0")) as listener:
            address = listener.address
        for free in (address, f"unix:{private}/none"):
            with pytest.raises(Closed, match="nobody listens"):
                dial(free, SECRET)


class TestSecret:
    def test_is_not_shown(self) -> None:
        assert SECRET.value.hex() not in repr(SECRET)
        assert str(SECRET.value) not in repr(SECRET)

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "secret"
        SECRET.write(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert Secret.read(path) == SECRET
        with pytest.raises(InputError):
            SECRET.write(path)
        path.chmod(0o640)
        with pytest.raises(InputError, match="others"):
            Secret.read(path)
        path.chmod(0o600)
        path.write_bytes(b"short")
        with pytest.raises(InputError, match="no secret"):
            Secret.read(path)
        with pytest.raises(InputError, match="cannot be read"):
            Secret.read(tmp_path / "none")

    def test_a_descriptor(self) -> None:
        read, write = os.pipe()
        try:
            os.write(write, SECRET.value + b"more")
            assert Secret.receive(read) == SECRET
            assert os.read(read, 10) == b"more"
            with pytest.raises(InputError, match="within"):
                Secret.receive(read, 0.05)
            os.write(write, b"abc")
            os.close(write)
            with pytest.raises(InputError, match="ended after 3"):
                Secret.receive(read)
        finally:
            os.close(read)


def refusing(listener: Listener, credentials: Credentials, *others: type[WireError]) -> str:
    """What a dialler hears who is not let in; the listener has counted it, and takes the next one."""
    with pytest.raises((Refused, *others)) as refused:
        dial(listener.address, credentials, 5.0)
    with pytest.raises(Deadline):
        listener.accept(0.1)
    wait_for(lambda: listener.refused.total() == 1, "the refusal")
    return str(refused.value)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("abrupt", [False, True])
def test_a_listener_that_dies_while_two_agree(abrupt: bool, signed: bool, tmp_path: Path) -> None:
    """Nobody has refused anything: who dials may try again."""
    credentials = Authority(tmp_path).issue("client") if signed else SECRET
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def die() -> None:
            sock, _ = server.accept()
            if abrupt:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                sock.recv(10_000)
            sock.close()

        thread = threading.Thread(target=die)
        thread.start()
        with pytest.raises(Closed):
            dial(f"tcp:127.0.0.1:{server.getsockname()[1]}", credentials, 5.0)
        thread.join()


class TestWhoIsNotLetIn:
    @pytest.mark.parametrize("address", ["unix", "tcp:127.0.0.1:0"])
    def test_another_secret(self, address: str, private: Path, caplog: pytest.LogCaptureFixture) -> None:
        address = f"unix:{private}/x" if address == "unix" else address
        with closing(listen(address, SECRET)) as listener, caplog.at_level(logging.WARNING):
            assert "does not know the secret" in refusing(listener, Secret.create())
            with closing(dial(listener.address, SECRET)):
                listener.accept(5.0).close()
        assert "refused" in caplog.text
        assert SECRET.value.hex() not in caplog.text

    def test_no_credentials(self) -> None:
        with closing(listen("tcp:127.0.0.1:0", SECRET)) as listener:
            with closing(dial(listener.address)) as stranger:
                stranger.send("hello")
                with pytest.raises(WireError):
                    stranger.receive(5.0)
            with pytest.raises(Deadline):
                listener.accept(0.1)

    def test_another_authority(self, tmp_path: Path) -> None:
        ours, others = Authority(tmp_path / "a"), Authority(tmp_path / "b", "Another")
        false = others.issue("client")
        with closing(listen("tcp:127.0.0.1:0", ours.issue("server"))) as listener:
            assert "does not count" in refusing(listener, false)  # the dialler does not trust the listener
        half = type(false)(ours.path, false.certificate, false.key)
        with closing(listen("tcp:127.0.0.1:0", ours.issue("server"))) as listener:
            assert "unknown ca" in refusing(listener, half)  # the listener does not trust the dialler

    def test_an_expired_certificate(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        with closing(listen("tcp:127.0.0.1:0", authority.issue("server"))) as listener:
            assert "expired" in refusing(listener, authority.issue("client", expired=True))
        with closing(listen("tcp:127.0.0.1:0", authority.issue("server", expired=True))) as listener:
            assert "expired" in refusing(listener, authority.issue("client"))

    def test_a_certificate_of_another_host(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        client = authority.issue("client")
        with closing(listen("tcp:127.0.0.1:0", authority.issue("server", hosts=("elsewhere",)))) as listener:
            assert "mismatch" in refusing(listener, client)
            named = type(client)(client.authority, client.certificate, client.key, name="elsewhere")
            with closing(dial(listener.address, named)):
                listener.accept(5.0).close()

    def test_a_client_without_a_certificate(self, tmp_path: Path) -> None:
        with closing(listen("tcp:127.0.0.1:0", Authority(tmp_path).issue("server"))) as listener:
            refusing(listener, SECRET, Closed)  # the end of the connection may come before the reason

    def test_files_that_cannot_be_used(self, tmp_path: Path) -> None:
        sound = Authority(tmp_path).issue("server")
        bad = tmp_path / "bad.pem"
        bad.write_text("x")
        for wrong in (
            type(sound)(bad, sound.certificate, sound.key),
            type(sound)(sound.authority, bad, sound.key),
            type(sound)(sound.authority, sound.certificate, bad),
            type(sound)(sound.authority, sound.certificate, tmp_path / "none"),
            type(sound)(sound.authority, sound.certificate, Authority(tmp_path / "b").issue("x").key),
        ):
            with pytest.raises(InputError, match="cannot be"):
                listen("tcp:127.0.0.1:0", wrong)
            with pytest.raises(InputError, match="cannot be"):
                dial("tcp:127.0.0.1:1", wrong)
        with pytest.raises(InputError, match="for TCP"):
            listen(f"unix:{tmp_path}/x", sound)

    def test_a_man_in_the_middle(self) -> None:
        """He ends TLS on both sides with certificates of his own and passes on what both say."""
        with closing(listen("tcp:127.0.0.1:0", SECRET)) as listener, socket.create_server(("127.0.0.1", 0)) as middle:
            port = int(listener.address.rpartition(":")[2])
            passed: list[int] = []

            def between() -> None:
                client = tls.own_server()[0].wrap_socket(middle.accept()[0], server_side=True)
                server = tls.any_client().wrap_socket(socket.create_connection(("127.0.0.1", port)))
                with client, server:
                    server.sendall(client.recv(40))
                    reply = server.recv(64)
                    passed.append(len(reply))
                    client.sendall(reply)
                    try:
                        passed.append(len(client.recv(32)))
                    except OSError:
                        passed.append(0)

            thread = threading.Thread(target=between)
            thread.start()
            with pytest.raises(Refused, match="in between"):
                dial(f"tcp:127.0.0.1:{middle.getsockname()[1]}", SECRET)
            thread.join()
            assert passed == [64, 0]  # the dialler has not said its proof
            with pytest.raises(Deadline):
                listener.accept(0.1)

    def test_proofs_are_not_for_the_other_side(self, private: Path) -> None:
        """Whoever sends a listener's own proof back is not let in."""
        with closing(listen(f"unix:{private}/x", SECRET)) as listener:
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(f"{private}/x")
                raw.sendall(handshake._GREETING + secrets.token_bytes(32))
                raw.sendall(raw.recv(64)[32:])
                assert raw.recv(10) == b""
            wait_for(lambda: listener.refused == {"the peer does not know the secret": 1}, "the refusal")

    def test_an_old_version_of_tls(self) -> None:
        with closing(listen("tcp:127.0.0.1:0", SECRET)) as listener:
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            port = int(listener.address.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as raw, pytest.raises(ssl.SSLError):
                old.wrap_socket(raw)


class TestNobodyKeepsOthersOut:
    def silent(self, listener: Listener, count: int) -> list[socket.socket]:
        port = int(listener.address.rpartition(":")[2])
        return [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]

    def welcome(self, listener: Listener) -> None:
        start = time.monotonic()
        with closing(dial(listener.address, SECRET)):
            listener.accept(5.0).close()
        assert time.monotonic() - start < 2.0

    def test_silent_clients(self) -> None:
        with closing(listen("tcp:127.0.0.1:0", SECRET)) as listener:
            raws = self.silent(listener, listening._HANDSHAKES + 20)
            self.welcome(listener)
            assert listener.refused["too many dialled at once"] >= 20
            for raw in raws:
                raw.close()

    def test_drops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bytes that come one by one do not stretch the deadline."""
        monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.3)
        with closing(listen("tcp:127.0.0.1:0", SECRET)) as listener:
            (raw,) = self.silent(listener, 1)
            start = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - start < 5.0:
                    raw.sendall(b"\x16")
                    time.sleep(0.02)
            assert time.monotonic() - start < 3.0
            self.welcome(listener)

    @pytest.mark.parametrize(
        "content", [b"GET / HTTP/1.0\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\xff\xff" + bytes(70000)]
    )
    def test_garbage(self, content: bytes) -> None:
        with closing(listen("tcp:127.0.0.1:0", SECRET)) as listener:
            for raw in self.silent(listener, 5):
                raw.sendall(content)
                raw.close()
            self.welcome(listener)

    def test_a_listener_that_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            start = time.monotonic()
            with pytest.raises(Deadline):
                dial(f"tcp:127.0.0.1:{silent.getsockname()[1]}", SECRET, 0.3)
            assert time.monotonic() - start < 2.0

    def test_nobody_accepts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listening, "_WAITING", 2)
        with closing(listen("tcp:127.0.0.1:0")) as listener:
            ends = [dial(listener.address) for _ in range(4)]
            for end in ends[2:]:
                with pytest.raises(Closed):
                    end.receive(5.0)
            assert len([listener.accept(1.0) for _ in range(2)]) == 2

    def test_closing(self, private: Path) -> None:
        listener = listen(f"unix:{private}/x")
        ended: list[Callable[[], None] | BaseException] = []

        def accept() -> None:
            try:
                listener.accept(None)
            except Closed as error:
                ended.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        waiting = dial(listener.address)
        thread.join(5.0)
        thread = threading.Thread(target=accept)
        thread.start()
        listener.close()
        thread.join(5.0)
        assert len(ended) == 1
        assert not (private / "x").exists()
        waiting.close()
