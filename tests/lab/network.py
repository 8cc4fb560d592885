"""Hosts as network namespaces of this machine, joined by a bridge. Needs root and `ip`; benchmarks use it too.

A host has an address of its own and sees no other network; its link to the bridge may be capped in both directions, cut
and restored. All share files, processes and the clock, as hosts with a shared file system and a good time server would.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from typing import Any, Literal

_SUBNETS = range(1, 250)
_END_SECONDS = 5.0


def missing() -> str | None:
    """Why there can be no lab here; None if there can."""
    if os.geteuid() != 0:
        return "a lab of hosts needs root"
    if lacking := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"a lab of hosts needs `{lacking[0]}` (iproute2)"
    try:
        with Lab(hosts=1):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this machine makes no network namespaces: {getattr(error, 'stderr', '') or error}"


class Lab:
    """Hosts that only have each other.

    A host's namespace bears its address for a name, so that `ip netns exec {host}` reaches it as `ssh {host}` would.

    Args:
        hosts: how many.
        rate: what each link lets through in each direction, as `tc` writes it (`100mbit`); None: no limit.
    """

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        self._count, self._rate = hosts, rate
        self._lock: tuple[str, int] | None = None
        self._net = ""
        self._one_way: dict[int, tuple[str, str]] = {}
        self.hosts: list[str] = []
        """The hosts' addresses."""

    @property
    def network(self) -> str:
        """All hosts' addresses, e.g. `10.77.3.0/24`."""
        return f"{self._net}.0/24"

    def __enter__(self) -> Lab:
        self._net = self._claim()
        self.hosts = [f"{self._net}.{number + 1}" for number in range(self._count)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that runs on the hosts, and removes them."""
        _remove(self._net)
        if self._lock is not None:
            path, lock = self._lock
            self._lock = None
            os.unlink(path)
            os.close(lock)

    def on(self, host: int) -> list[str]:
        """What makes a command run on a host."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def run(self, host: int, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host and waits for its end."""
        return subprocess.run([*self.on(host), *command], capture_output=True, text=True, check=False, **more)

    def start(self, host: int, command: list[str], **more: Any) -> subprocess.Popen[str]:
        """Starts a command on a host."""
        return subprocess.Popen([*self.on(host), *command], text=True, **more)

    def bytes(self, host: int) -> tuple[int, int]:
        """What the host's interface has sent and received, all headers included."""
        shown = json.loads(_ip("-n", self.hosts[host], "-s", "-j", "link", "show", "eth0"))
        counted = shown[0]["stats64"]
        return int(counted["tx"]["bytes"]), int(counted["rx"]["bytes"])

    def pids(self, host: int) -> list[int]:
        """The processes on a host."""
        return _pids(self.hosts[host])

    def kill(self, host: int) -> None:
        """Ends all that runs on a host at once, and cuts its link first, as a loss of power would."""
        self.cut(host)
        for pid in self.pids(host):
            _kill(pid)

    def cut(self, host: int, way: Literal["both", "to", "from"] = "both") -> None:
        """From now on the host's link loses everything, or all that goes to it or comes from it; nobody is told."""
        if way == "both":
            _ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")
            return
        name, device = (self._switch, f"port{host}") if way == "to" else (self.hosts[host], "eth0")
        _tc("-n", name, "qdisc", "replace", "dev", device, "root", "blackhole")
        self._one_way[host] = name, device

    def cut_between(self, source: int, target: int) -> None:
        """From now on nothing that one host sends reaches the other; both reach all others, and nobody is told."""
        nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.hosts[source], "neigh", "replace", self.hosts[target], *nowhere)

    def restore(self, host: int) -> None:
        """Ends a cut."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")
        if (place := self._one_way.pop(host, None)) is not None:
            _tc("-n", place[0], "qdisc", "delete", "dev", place[1], "root")
            if self._rate is not None:
                self.set_rate(host, self._rate)

    def set_rate(self, host: int, rate: str) -> None:
        """Caps a host's link in both directions."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
        _tc("-n", self.hosts[host], "qdisc", "replace", "dev", "eth0", *limit)
        _tc("-n", self._switch, "qdisc", "replace", "dev", f"port{host}", *limit)

    @property
    def _switch(self) -> str:
        return f"{self._net}.0"

    def _claim(self) -> str:
        """A network that no living lab has; what a killed one has left there is removed."""
        for number in _SUBNETS:
            path = f"/tmp/verbund-lab-{number}.lock"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(path).st_ino != os.fstat(lock).st_ino:
                    raise FileNotFoundError
            except (BlockingIOError, FileNotFoundError):  # it is taken, or its owner has just given it up
                os.close(lock)
                continue
            self._lock = (path, lock)
            net = f"10.77.{number}"
            _remove(net)
            return net
        raise OSError("all networks for labs are taken")

    def _build(self) -> None:
        switch = self._switch
        _ip("netns", "add", switch)
        lines = ["link add bridge type bridge", "link set bridge up"]
        for number, host in enumerate(self.hosts):
            _ip("netns", "add", host)
            lines += [
                f"link add port{number} type veth peer name eth0 netns {host}",
                f"link set port{number} master bridge addrgenmode none",
                f"link set port{number} up",
            ]
            # One segment a packet, so that the interface counts what a real one would send.
            inside = [
                "link set lo up",
                "link set eth0 gso_max_segs 1 addrgenmode none",
                f"address add {host}/24 dev eth0",
                "link set eth0 up",
            ]
            _batch(switch, lines)
            _batch(host, inside)
            lines = []
            if self._rate is not None:
                self.set_rate(number, self._rate)


def _remove(net: str) -> None:
    names = [name for name in _names() if name.rpartition(".")[0] == net]
    deadline = time.monotonic() + _END_SECONDS
    while living := [pid for name in names for pid in _pids(name)]:
        for pid in living:
            _kill(pid)
        if time.monotonic() > deadline:
            raise OSError(f"processes of a lab do not end: {living}")
        time.sleep(0.01)
    for name in names:
        _ip("netns", "delete", name)


def _names() -> list[str]:
    return [item["name"] for item in json.loads(_ip("-j", "netns", "list") or "[]")]


def _pids(name: str) -> list[int]:
    return [int(word) for word in _ip("netns", "pids", name).split()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _batch(name: str, lines: list[str]) -> None:
    if lines:
        _called(["ip", "-n", name, "-batch", "-"], "\n".join(lines))


def _ip(*arguments: str) -> str:
    return _called(["ip", *arguments])


def _tc(*arguments: str) -> str:
    return _called(["tc", *arguments])


def _called(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout
