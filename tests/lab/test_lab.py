"""The lab itself: hosts that reach each other and nobody else, links as they were said to be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from lab import Lab, missing

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")

RECEIVE = """
import socket, time
listener = socket.create_server(("{address}", 5000))
connection, _ = listener.accept()
received = 0
while chunk := connection.recv(1 << 20):
    start = time.monotonic() if not received else start
    received += len(chunk)
print(received, time.monotonic() - start)
"""
SEND = """
import socket, time
for _ in range(100):
    try:
        sock = socket.create_connection(("{address}", 5000), timeout=1)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
sock.sendall(bytes({size}))
"""


def moved(lab: Lab, size: int) -> tuple[int, float]:
    """Bytes that came from host 1 to host 0, and how long they took."""
    address = lab.hosts[0]
    receiver = lab.start(0, [sys.executable, "-c", RECEIVE.format(address=address)], stdout=subprocess.PIPE)
    sent = lab.run(1, [sys.executable, "-c", SEND.format(address=address, size=size)])
    assert sent.returncode == 0, sent.stderr
    out, _ = receiver.communicate(timeout=20)
    return int(out.split()[0]), float(out.split()[1])


def test_a_link_is_capped_counted_cut_and_restored() -> None:
    size = 5_000_000
    with Lab(hosts=2, rate="100mbit") as lab:
        before = lab.bytes(1)[0]
        count, seconds = moved(lab, size)
        assert count == size
        assert 85e6 < 8 * size / seconds < 105e6
        # 66 bytes of headers to 1448 of payload: what a real interface would send.
        assert lab.bytes(1)[0] - before == pytest.approx(size * 1514 / 1448, rel=0.01)
        assert lab.bytes(0)[1] == pytest.approx(lab.bytes(1)[0], rel=0.01)
        lab.set_rate(1, "20mbit")
        count, seconds = moved(lab, size // 5)
        assert 8 * count / seconds < 25e6
        lab.cut(1)
        assert lab.run(1, [sys.executable, "-c", SEND.format(address=lab.hosts[0], size=1)]).returncode != 0
        lab.restore(1)
        assert moved(lab, 1000)[0] == 1000


HEAR = """
import socket
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind(("{address}", 5001))
heard.settimeout({seconds})
print("ready", flush=True)
try:
    print(heard.recv(10).decode())
except TimeoutError:
    print("nothing")
"""
SAY = """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"word", ("{address}", 5001))
"""


def heard(lab: Lab, speaker: int, listener: int, seconds: float) -> str:
    """What comes of one datagram."""
    address = lab.hosts[listener]
    program = HEAR.format(address=address, seconds=seconds)
    hearing = lab.start(listener, [sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert hearing.stdout is not None
    assert hearing.stdout.readline() == "ready\n"
    lab.run(speaker, [sys.executable, "-c", SAY.format(address=address)])
    return hearing.communicate(timeout=20)[0].strip()


@pytest.mark.parametrize("way", ["to", "from"])
def test_a_link_is_cut_one_way(way: Literal["to", "from"]) -> None:
    with Lab(hosts=2) as lab:
        assert heard(lab, 0, 1, 10.0) == heard(lab, 1, 0, 10.0) == "word"
        lab.cut(1, way)
        lost, kept = ((0, 1), (1, 0)) if way == "to" else ((1, 0), (0, 1))
        assert heard(lab, *lost, 0.3) == "nothing"
        assert heard(lab, *kept, 10.0) == "word"
        lab.restore(1)
        assert heard(lab, *lost, 10.0) == "word"


def test_what_a_killed_lab_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    program = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from lab import Lab
with Lab(hosts=1) as lab:
    lab.start(0, ["sleep", "1000"], stdout=subprocess.DEVNULL)
    while not lab.pids(0):
        time.sleep(0.01)
    print(lab.hosts[0], *lab.pids(0), flush=True)
    time.sleep(1000)
"""
    tests = Path(__file__).parent.parent
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(tests)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert killed.stdout is not None
    address, *_ = killed.stdout.readline().split()
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    labs = []
    try:
        for _ in range(250):
            labs.append(Lab(hosts=1).__enter__())
            if labs[-1].hosts[0] == address:
                break
        assert labs[-1].hosts[0] == address
        assert labs[-1].pids(0) == []
    finally:
        for lab in labs:
            lab.close()
    assert address not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
