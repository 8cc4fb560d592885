"""A warm server as its supervisor sees it, whatever has started it: what it was asked, what it has told."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.cluster.supplies import HostSupply, located
from verbund.comm.wire import Connection, Deadline, Message, WireError
from verbund.errors import ClusterLost

_REPLY_SECONDS = 30.0


@dataclass(frozen=True)
class Host:
    """A machine of the cluster.

    Args:
        name: as the job has it.
        address: its own address, at which its processes meet others.
        command: the words that make a command line run there; none: it is this machine, or the server comes by itself.
    """

    name: str
    address: str
    command: tuple[str, ...] = ()


class WarmServer(ABC):
    """Of use when its connection is there.

    Args:
        number: of its host in the cluster.
        host: where it runs; None: on this machine, which is the whole cluster.
        remote: whether its processes are another machine's, which only it can end.
    """

    def __init__(self, number: int, host: Host | None, remote: bool) -> None:
        self.number, self.host, self.remote = number, host, remote
        self.connection: Connection | None = None
        self.facts: dict[str, Any] | None = None
        """What it tells of its host, before it imports anything slow."""
        self.living: dict[int, Process] = {}
        self.forked: list[tuple[str, int, int]] = []
        self.ended: list[Exit] = []
        self.lost: ClusterLost | None = None
        """Why it is of no more use."""
        self.unseen: list[str] = []
        """The shared folders that its host does not see."""
        self.supply = HostSupply()
        """What processes need there besides."""
        self._groups: set[int] = set()
        self._stopped: set[int] = set()
        self._replies: list[Message] = []

    # -- what depends on how it was started ----------------------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call it."""

    @abstractmethod
    def check_running(self) -> None:
        """Raises ClusterLost if it has ended before it was connected."""

    @abstractmethod
    def late(self, seconds: float) -> ClusterLost:
        """That it has not started within so many seconds."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for its end; if that does not come, ends it."""

    @abstractmethod
    def _cut_off(self) -> None:
        """Ends it and all that it has started."""

    @abstractmethod
    def _why(self, error: WireError) -> ClusterLost:
        """Why its connection broke."""

    def _state(self) -> str:
        """What keeps it, as far as that is known: the rest of a sentence."""
        return ""

    # -- its work ------------------------------------------------------------------------------------------------

    def fork(self, spec: ProcessSpec) -> None:
        """Starts a process, with its settings as they hold on this host."""
        settings = located(spec.settings, self.supply.places or {}, self.unseen)
        self.send("fork", replace(spec, settings=settings).record())

    def send(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Tells it something.

        Raises:
            ClusterLost: if it is gone.
        """
        if self.lost is not None:
            raise self.lost
        assert self.connection is not None
        try:
            self.connection.send(kind, fields)
        except WireError as error:
            raise self._gone(error) from None

    def ask(self, kind: str, fields: Mapping[str, Any]) -> Message:
        """Its answer to a question.

        Raises:
            ClusterLost: if there is none.
        """
        self.send(kind, fields)
        deadline = time.monotonic() + _REPLY_SECONDS
        while not self._replies:
            self.receive(deadline - time.monotonic(), f"{self.name} does not answer")
        return self._replies.pop(0)

    def stuck(self, how: str) -> ClusterLost:
        """It does not do what it was asked, and is of no more use."""
        self.lost = self.lost or ClusterLost(f"{self.name} {how}{self._state()}")
        return self.lost

    def drain(self) -> None:
        """Reads all that it has told; what it has lost with it is in `lost`."""
        try:
            while self.lost is None and self.connection is not None and self.connection.ready():
                self.receive(5.0, f"{self.name} sent half a message")
        except ClusterLost:
            return

    def receive(self, timeout: float, otherwise: str) -> None:
        """Waits for the next thing that it tells; `otherwise` is what went wrong if it does not.

        Raises:
            ClusterLost: if it is gone, or nothing came.
        """
        assert self.connection is not None
        try:
            message = self.connection.receive(max(timeout, 1e-3))
        except Deadline:
            self.lost = ClusterLost(f"{otherwise}{self._state()}")
            raise self.lost from None
        except WireError as error:
            raise self._gone(error) from None
        if message.kind == "forked":
            self._groups.add(message.fields["pid"])
            self._stopped.discard(message.fields["pid"])
            self.forked.append((message.fields["role"], message.fields["rank"], message.fields["pid"]))
        elif message.kind == "exit":
            self.ended.append(Exit(**message.fields, host=self.number))
        elif message.kind == "stopped":
            self._stopped.add(message.fields["pid"])
        elif message.kind == "continued":
            self._stopped.discard(message.fields["pid"])
        elif message.kind == "facts":
            self.facts = message.fields
        elif message.kind == "supply":
            self.supply.hear(message.fields)
        else:
            self._replies.append(message)

    def exits(self) -> list[Exit]:
        """The processes that it has told to have ended since the last call; with the server all of its own."""
        ended, self.ended = self.ended, []
        for one in ended:
            self.living.pop(one.pid, None)
        if self.lost is not None:
            ended += [Exit(pid, -signal.SIGKILL, host=self.number, lost=self.lost) for pid in self.living]
            self.living.clear()
        return ended

    def kill(self, process: Process) -> None:
        """Ends a process that did not end by itself."""
        if self.living.get(process.pid) is process:  # and not one of another machine that had this one's number before
            self.kill_forked(process.pid)

    def suspended(self, process: Process) -> bool:
        """Whether a process is stopped by a signal: of another machine's the server tells, of this one's the kernel."""
        if self.remote:
            return process.pid in self._stopped
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill_forked(self, pid: int) -> None:
        """Ends a process that it has forked, whether or not that has come."""
        if self.remote:
            try:
                self.send("kill", {"pid": pid})
            except ClusterLost:
                return
        else:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                self.living.pop(pid, None)

    # -- its end -------------------------------------------------------------------------------------------------

    def abandon(self, names: Sequence[str]) -> ClusterLost:
        """Gives up the wait for these processes' exits, and ends it; its children end with it."""
        verb = "has" if len(names) == 1 else "have"
        self.lost = ClusterLost(f"{self.name} does not tell that {', '.join(names)} {verb} ended{self._state()}")
        self._cut_off()
        return self.lost

    def leave(self) -> None:
        """Asks it to end all that it has started, and itself; `wait` sees to it. One that has started nothing, and may
        still be importing, is ended at once."""
        for process in self.living.values():
            process.connection.close()
        if self.connection is not None and self.lost is None and self._groups:
            try:
                self.connection.send("leave")
            except WireError:
                pass
        else:
            self._cut_off()

    def _gone(self, error: WireError) -> ClusterLost:
        """The connection broke: the reason is how the server ended."""
        if self.lost is None:
            self.lost = self._why(error)
        return self.lost
