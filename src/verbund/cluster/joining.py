"""Joining: what a machine does that is started from outside, by hand, by torchrun, srun or Kubernetes.

It dials the command, offers its slots, and starts a warm server as it is asked. It stays as that one's parent: whatever
becomes of either, nothing is left, and the command hears why.
"""

from __future__ import annotations

import ipaddress
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund.cluster import host
from verbund.cluster.invitation import PORT, address_of, published_in, written
from verbund.cluster.joined import Offer
from verbund.cluster.process import Exit
from verbund.comm.parent import adopt_orphans, end_children
from verbund.comm.rendezvous import Meeting, dial
from verbund.comm.wire import Closed, Connection, Message, Refused, Secret, WireError
from verbund.comm.wire.address import Tcp
from verbund.errors import ClusterLost, InputError, Interrupted, from_record
from verbund.interrupts import Interrupts

_TURN = 0.2
_PAUSE = 0.5
_END_SECONDS = 8.0
_SILENCE = 30.0

# Who starts processes tells each its place by such variables: torchrun, Slurm, Open MPI, Kubernetes (indexed jobs).
_RANKS = ("GROUP_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK", "JOB_COMPLETION_INDEX")
_PROCESS_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_GPUS_ON_NODE")
_ADDRESSES = ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR")


@dataclass(frozen=True)
class Place:
    """What the environment of a process says about it.

    Args:
        address: of the command, `HOST:PORT`; None: it is not said.
        rank: of this machine among those that join.
        local_rank: of this process on its machine: only the first one joins.
        slots: how many workers this machine takes.
    """

    address: str | None
    rank: int | None
    local_rank: int
    slots: int

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place:
        """The place that torchrun, srun, mpirun or Kubernetes give a process, each by its own variables.

        `MASTER_PORT` counts only without torchrun, whose own store listens there.
        """
        address = environment.get("VERBUND_JOIN") or None
        if address is None and (name := next(filter(None, map(environment.get, _ADDRESSES)), None)):
            port = environment.get("MASTER_PORT") if "TORCHELASTIC_RUN_ID" not in environment else None
            address = written(name, int(port) if port and port.isdecimal() else PORT)
        local = _number(environment, _LOCAL_RANKS)
        rank = _number(environment, _RANKS)
        if rank is None:
            rank = _number(environment, _PROCESS_RANKS)
        return Place(address, rank, local or 0, _number(environment, _LOCAL_SIZES) or 1)


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(text) for name in names if (text := environment.get(name, "")).isdecimal()), None)


def join(
    address: str,
    secret: Secret,
    slots: int,
    *,
    rank: int | None = None,
    own: str | None = None,
    within: float = 600.0,
    grace: float = 0.0,
    keep: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Takes part in a run until that is over.

    Args:
        address: the command's, `HOST:PORT`; or the path of a file, with a `/`, in which it is published.
        secret: what both prove to know.
        slots: how many workers this machine takes.
        rank: its place among the machines.
        own: the address of this machine at which its processes meet others; default: the one on the way to the command.
        within: seconds until the command must be there and take the offer.
        grace: seconds for which the first Ctrl-C or SIGTERM does not end it while the run needs it: whoever ends this
            machine often ends all, and the command needs them to save.
        keep: the folder in which this machine has task and data, even if it sees those of the command; None: its
            cache, and only what it does not see.
        tell: tells the user what goes on.

    Raises:
        InputError: if the command refuses, or the addresses are none.
        ClusterLost: if the command is not there in time, or is lost, or the warm server is.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    if os.sep not in address:
        try:
            address = written(*address_of(address))
        except ValueError as error:
            raise InputError(str(error), where="arguments") from None
    with Interrupts() as interrupts:
        joiner = _Joiner(address, secret, within, grace, keep, tell, interrupts)
        connection, asked = joiner.accepted(slots, rank, own)
        try:
            joiner.serve(connection, asked)
        finally:
            end_children()  # not before it has any: who has asked in vain may have others


class _Joiner:
    def __init__(
        self,
        address: str,
        secret: Secret,
        within: float,
        grace: float,
        keep: Path | None,
        tell: Callable[[str], None],
        interrupts: Interrupts,
    ) -> None:
        self._address, self._target = address, address
        self._secret, self._grace, self._tell, self._interrupts = secret, grace, tell, interrupts
        self._keep = keep
        self._within, self._deadline = within, time.monotonic() + within
        self._leaves: float | None = None
        """When it leaves although the run needs it."""

    def accepted(self, slots: int, rank: int | None, own: str | None) -> tuple[Connection, dict[str, Any]]:
        """The connection to the command, and what it asks for."""
        why = "nobody listens there"
        while time.monotonic() < self._deadline:
            self._check_interrupts()
            try:
                self._find()
                connection = dial(Meeting(f"tcp:{self._target}", None, self._secret, _SILENCE), "join", -1)
            except Refused as error:
                fix = "Both need the same file as secret, and what listens there must be a command with this cluster"
                raise InputError(f"was refused: {error}", where=self._target, fix=fix) from None
            except (OSError, WireError, ValueError) as error:
                why = str(error)
                time.sleep(_PAUSE)
                continue
            self._tell(f"reached {self._target}; waiting until it answers")
            offer = Offer(own or _source(self._target), slots, rank, host.versions())
            try:
                connection.send("offer", offer.record())
                if (message := self._next(connection)) is None:
                    break
            except WireError as error:  # it has ended: another one may come
                why = str(error)
                connection.close()
                continue
            if message.kind == "refused":
                raise from_record(message.fields["error"])
            if message.kind == "asked":
                return connection, message.fields
            why = "it ended before it needed this machine"
            connection.close()
        raise ClusterLost(
            f"no run has started within {self._within:g} s: {why}",
            where=self._target,
            fix="Start the command first (`verbund train JOB --cluster external`), or give a larger `--within`",
        )

    def _find(self) -> None:
        """Where the command listens: a file tells, until another one begins."""
        if os.sep in self._address:
            if (told := published_in(Path(self._address))) is None:
                raise Closed(f"{self._address} tells no address yet")
            self._target = written(*address_of(told))

    def _next(self, connection: Connection) -> Message | None:
        while time.monotonic() < self._deadline:
            self._check_interrupts()
            if connection.ready(_TURN):
                return connection.receive(_SILENCE)
        return None

    def _check_interrupts(self) -> None:
        if self._interrupts.count:
            raise Interrupted("interrupted before the run needed this machine")

    def serve(self, connection: Connection, asked: dict[str, Any]) -> None:
        """Starts the warm server, and stays until it is of no more use."""
        adopt_orphans()
        warm = self._started(asked)
        self._tell("joined: this machine is ready as soon as it has loaded what the job needs")
        try:
            while True:
                readable = select.select([connection], [], [], _TURN)[0]
                if self._must_leave():
                    self._leave(connection, warm, "it was told to end (SIGTERM or Ctrl-C)")
                    raise Interrupted("interrupted while the run needed this machine")
                # Before the news that the run is over, whose end ends the warm server too.
                if readable or connection.ready():
                    message = connection.receive(_SILENCE)
                    if message.kind == "end":
                        self._end(connection, warm)
                        return
                    if message.kind == "kill":
                        raise ClusterLost("the run has given this machine up", where=self._target)
                elif (status := warm.poll()) is not None:
                    why = f"its warm server {Exit(warm.pid, status)}"
                    self._leave(connection, warm, why)
                    fix = "The kernel kills what uses too much memory: `dmesg` tells" if status == -9 else None
                    raise ClusterLost(why, where="this machine", fix=fix)
        except WireError as error:
            grace = float(asked["orphan_grace"]) + _END_SECONDS
            self._tell(f"the command is lost; the workers end within {grace:.0f} s")
            _ended(warm, grace)
            raise ClusterLost(f"the command is lost: {error}", where=self._target) from None

    def _must_leave(self) -> bool:
        if self._interrupts.count == 1 and self._leaves is None:
            self._leaves = time.monotonic() + self._grace
            if self._grace:
                self._tell(f"told to end: stays for up to {self._grace:g} s while the run needs this machine")
        return self._interrupts.count > 1 or (self._leaves is not None and time.monotonic() >= self._leaves)

    def _started(self, asked: dict[str, Any]) -> subprocess.Popen[bytes]:
        meeting = Meeting(f"tcp:{self._target}", None, self._secret, float(asked["lost_after"]))
        told = {**asked, "meeting": meeting.record(), "parent": os.getpid()}
        told["keep"] = str(self._keep.absolute()) if self._keep is not None else None
        words = [sys.executable, "-P", "-m", "verbund.cluster.warm"]
        warm = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        assert warm.stdin is not None
        try:
            warm.stdin.write(json.dumps(told).encode() + b"\n")
            warm.stdin.close()
        except OSError:
            pass  # how it ended says more
        return warm

    @staticmethod
    def _end(connection: Connection, warm: subprocess.Popen[bytes]) -> None:
        _ended(warm, _END_SECONDS)
        end_children()
        connection.close()  # which says that nothing is left

    @staticmethod
    def _leave(connection: Connection, warm: subprocess.Popen[bytes], why: str) -> None:
        try:
            connection.send("left", {"why": why}, _TURN)
        except WireError:
            pass
        warm.send_signal(signal.SIGKILL)


def _ended(warm: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        warm.wait(seconds)
    except subprocess.TimeoutExpired:
        warm.kill()
        warm.wait()


def _source(target: str) -> str:
    """This machine's address on the way to the command."""
    name, port = address_of(target)
    resolved = str(Tcp(name, port).resolve()[0][1][0])
    return "127.0.0.1" if ipaddress.ip_address(resolved).is_loopback else host.source_of(name, resolved)
