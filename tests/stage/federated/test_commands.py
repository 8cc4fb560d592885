"""What those who run a federation are told, and that they can end what waits."""

from __future__ import annotations

import json
import os
import signal
import threading
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from conftest import Command
from verbund.comm.wire import Pinned
from verbund.errors import Interrupted
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.policy import Policy
from verbund.stage.federated.client import take_part
from verbund.stage.federated.home import Home
from verbund.stage.federated.line import Line


def test_a_token_that_nobody_gets_leaves_the_earlier_one_good(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "north.token"
    enroll = ["federate", "enroll", "--name", "north", "--federation", str(tmp_path / "fed"), "--out"]
    assert command(*enroll, str(out)).status == 0
    assert out.stat().st_mode & 0o777 == 0o600
    first = (tmp_path / "fed" / "tokens.json").read_text()
    ended = command(*enroll, str(out))
    assert ended.status == 2
    assert "File exists" in ended.err
    assert (tmp_path / "fed" / "tokens.json").read_text() == first
    ended = command(*enroll, str(tmp_path / "second.token"))
    assert ended.status == 0
    assert "the token that north had before is void" in ended.out
    assert len(json.loads((tmp_path / "fed" / "tokens.json").read_text())) == 1
    assert out.read_text() != (tmp_path / "second.token").read_text()
    assert (tmp_path / "second.token").read_text().startswith("verbund-token-1:north:")


def test_a_file_without_a_token_is_not_left_behind(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "a.token"
    federation = ["--federation", str(tmp_path / "fed")]
    assert command("federate", "enroll", "--name", "not a name", *federation, "--out", str(out)).status == 2
    assert not out.exists()


def test_a_client_that_finds_no_server_can_be_interrupted(tmp_path: Path) -> None:
    identity = Enrolment(tmp_path / "federation").identity
    home = Home(tmp_path / "home")
    line = Line("127.0.0.1:9", Pinned(identity.fingerprint, home.identity), 10.0)
    stop = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    try:
        with pytest.raises(Interrupted):
            take_part(line, home, "none.parquet", Policy())
    finally:
        stop.join()
        line.close()


def test_a_token_for_another_client_is_refused_where_one_lives(command: Command, tmp_path: Path) -> None:
    federation = Enrolment(tmp_path / "federation")
    Home(tmp_path / "home").pin(federation.identity.fingerprint, "north")
    token = tmp_path / "south.token"
    token.write_text(str(federation.invite("south", {}, 60.0)))
    client = ["federate", "client", "--server", "127.0.0.1:9", "--data", "none.parquet", "--home", "home"]
    ended = command(*client, "--token", str(token), "--patience", "1")
    assert ended.status == 2
    assert "enrolled as `north`, and the token is for `south`" in ended.err
    token.write_text(str(federation.invite("north", {}, 60.0)))
    assert command(*client, "--token", str(token), "--patience", "1").status == 3


def test_a_clients_public_key_is_printed_as_policies_have_it(command: Command, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    ended = command("federate", "identity", "--home", home)
    assert ended.status == 2
    assert "no name yet" in ended.err
    ended = command("federate", "identity", "--home", home, "--name", "north")
    assert ended.status == 0
    peers = tomllib.loads(ended.out)
    public = Ed25519PrivateKey.from_private_bytes(_seed(Home(tmp_path / "home"))).public_key().public_bytes_raw()
    assert peers == {"north": public.hex()}
    assert Policy(peers=peers)


def _seed(home: Home) -> bytes:
    key = load_pem_private_key(home.identity.path.read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    return key.private_bytes_raw()
