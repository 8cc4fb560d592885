"""A warm server as its supervisor sees it, on this machine or another: what it was asked, what it has told."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verbund.cluster.process import Exit, Process, ProcessSpec
from verbund.comm.rendezvous import Meeting
from verbund.comm.wire import Connection, Deadline, Message, WireError
from verbund.errors import ClusterLost, shortened

_EXIT_SECONDS = 2.0
_END_SECONDS = 10.0
_REPLY_SECONDS = 30.0


@dataclass(frozen=True)
class Host:
    """A machine of the cluster.

    Args:
        name: as the job has it.
        address: its own address, at which its processes meet others.
        command: the words that make a command line run there; none: it is this machine.
    """

    name: str
    address: str
    command: tuple[str, ...] = ()


class WarmServer:
    """Starts at once; is of use when its connection is there.

    Args:
        number: of its host in the cluster.
        host: where it runs; None: on this machine, which is the whole cluster.
        meeting: where it dials the supervisor.
        settings: what else it gets, as plain values.
        environment: variables of its processes; what the user has set stays as it is.
    """

    def __init__(
        self,
        number: int,
        host: Host | None,
        meeting: Meeting,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self.number, self.host = number, host
        self.connection: Connection | None = None
        self.facts: dict[str, Any] | None = None
        """What it tells of its host, before it imports anything slow."""
        self.living: dict[int, Process] = {}
        self.forked: list[tuple[str, int, int]] = []
        self.ended: list[Exit] = []
        self.lost: ClusterLost | None = None
        """Why it is of no more use."""
        self._groups: set[int] = set()
        self._replies: list[Message] = []
        self._errors: list[str] = []
        words = [*(host.command if host else ()), sys.executable, "-P", "-m", "verbund.cluster.warm"]
        self._command = shlex.join(host.command) if host else ""
        self._meets = meeting.address.removeprefix("tcp:").rpartition(":")[0]
        asked = {"meeting": meeting.record(), "number": number, "environment": dict(environment), **settings}
        if host is not None:
            asked["address"] = host.address
        reading, writing = os.pipe()
        try:
            # All of it fits into the pipe. It is there before the server is, and whatever ends this process then, the
            # server knows what to clean up.
            os.write(writing, json.dumps(asked).encode() + b"\n")
            os.close(writing)
            remote = bool(self._command)
            self._process = subprocess.Popen(
                words,
                stdin=reading,
                stdout=subprocess.DEVNULL if remote else None,
                stderr=subprocess.PIPE if remote else None,
                start_new_session=True,
            )
        except OSError as error:
            self.lost = ClusterLost(
                f"host {host.name if host else 'here'} cannot be used: `{words[0]}` cannot be run: {error.strerror}",
                where="cluster.command",
                fix="Install it on this machine, or give another command, e.g. `ssh -o BatchMode=yes {host}`",
            )
            raise self.lost from None
        finally:
            os.close(reading)
        if self._process.stderr is not None:
            self._relay = threading.Thread(target=self._pass_on, args=(self._process.stderr,), daemon=True)
            self._relay.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        if self._command and self.host:
            return f"the warm server on host {self.host.name}"
        return f"the warm server (pid {self._process.pid})"

    # -- its start -----------------------------------------------------------------------------------------------

    def check_running(self) -> None:
        """Raises ClusterLost if it has ended before it was connected."""
        if (status := self._process.poll()) is None:
            return
        if self.host is None or not self._command:
            raise ClusterLost(
                f"{self.name} {Exit(self._process.pid, status)} before it had started",
                fix="`verbund doctor` checks the installation",
            )
        self._relay.join(_EXIT_SECONDS)
        raise self._unusable(f"`{self._command}` {Exit(0, status)}{self._said()}")

    def late(self, seconds: float) -> ClusterLost:
        """That it has not started within so many seconds."""
        if self.host is None or not self._command:
            return ClusterLost(f"{self.name} did not start within {seconds:.0f} s{self._state()}")
        return self._unusable(f"`{self._command}` started nothing there within {seconds:.0f} s{self._said()}")

    def _unusable(self, what: str) -> ClusterLost:
        """That the command does not bring up the server on its host."""
        assert self.host is not None
        alone = f"`{self._command} {shlex.quote(sys.executable)} -c 'import verbund'`"
        return ClusterLost(
            f"host {self.host.name} cannot be used: {what}",
            where="cluster.command",
            fix=f"Try {alone}, which must end without a question, and see that the host can reach this machine "
            f"({self._meets}); or leave the host out of `cluster.hosts`",
        )

    def _said(self) -> str:
        """The last line of what the command said, without an explanation of its options: the rest of a sentence."""
        lines = [line for line in self._errors if line.strip()]
        usage = next((at for at, line in enumerate(lines) if at and line.lower().startswith("usage:")), None)
        return f": {shortened(lines[:usage][-1].strip(), 500)}" if lines else ""

    # -- its work ------------------------------------------------------------------------------------------------

    def fork(self, spec: ProcessSpec) -> None:
        self.send("fork", spec.record())

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
            self.forked.append((message.fields["role"], message.fields["rank"], message.fields["pid"]))
        elif message.kind == "exit":
            self.ended.append(Exit(**message.fields, host=self.number))
        elif message.kind == "facts":
            self.facts = message.fields
        else:
            self._replies.append(message)

    def exits(self) -> list[Exit]:
        """The processes that have ended since the last call; with the server all of its own."""
        self.drain()
        ended, self.ended = self.ended, []
        for one in ended:
            self.living.pop(one.pid, None)
        if self.lost is not None:
            ended += [Exit(pid, -signal.SIGKILL, host=self.number, lost=self.lost) for pid in self.living]
            self.living.clear()
        return ended

    def kill(self, process: Process) -> None:
        """Ends a process that did not end by itself."""
        if process.pid in self.living:
            self.kill_forked(process.pid)

    def suspended(self, process: Process) -> bool:
        """Whether a process of this machine is stopped by a signal."""
        if self._command:
            return False
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill_forked(self, pid: int) -> None:
        """Ends a process that it has forked, whether or not that has come."""
        if self._command:
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

    def wait(self) -> None:
        """Waits for its end; if that does not come, ends it."""
        if self.connection is not None:
            self.connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0 and not self._command:
            for pid in self._groups:  # what workers left behind has lost its last parent
                _kill_group(pid)

    def _cut_off(self) -> None:
        if self.connection is not None:
            self.connection.end()  # it notices, wherever it is
        self._process.kill()

    def _gone(self, error: WireError) -> ClusterLost:
        """The connection broke: the reason is how the server ended."""
        if self.lost is None:
            try:
                patience = _EXIT_SECONDS / 10 if self._command else _EXIT_SECONDS  # a host that is lost tells nothing
                how: Exit | str = Exit(self._process.pid, self._process.wait(patience))
            except subprocess.TimeoutExpired:
                how = f"is lost: {error}"
                self._process.kill()
            if self.host is None:
                self.lost = ClusterLost(f"{self.name}, the parent of all workers, {how}")
            else:
                names = [process.spec.name for process in self.living.values()]
                lost = f" with {', '.join(names)}" if names else ""
                told = "" if self._groups or isinstance(how, str) else self._said()
                fix = "Look whether it is up and reaches this machine"
                if self._command:
                    fix += f"; `{self._command} true` must work"
                self.lost = ClusterLost(f"host {self.host.name} is lost{lost}: {self.name} {how}{told}", fix=fix)
        return self.lost

    def _state(self) -> str:
        """What keeps the warm server, as far as the kernel tells: the rest of a sentence."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
        return ": it is stopped (SIGSTOP)" if stat.rpartition(")")[2].split()[0] in ("T", "t") else ""

    def _pass_on(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            self._errors.append(text)
            del self._errors[:-100]
            if self.connection is not None:
                os.write(2, line)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
