"""A warm server that this process starts: on this machine, or by a command that reaches another."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from verbund.cluster.process import Exit
from verbund.cluster.server import Host, WarmServer
from verbund.comm.rendezvous import Meeting
from verbund.comm.wire import WireError
from verbund.errors import ClusterLost, shortened

_EXIT_SECONDS = 2.0
_END_SECONDS = 10.0


class StartedServer(WarmServer):
    """Starts at once.

    Args:
        number: of its host in the cluster.
        host: where it runs; None: on this machine, which is the whole cluster.
        meeting: where it dials the supervisor.
        settings: what else it gets, as plain values.
        environment: variables of its processes; what the user has set stays as it is.

    Raises:
        ClusterLost: if its command cannot be run.
    """

    def __init__(
        self,
        number: int,
        host: Host | None,
        meeting: Meeting,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(number, host, remote=bool(host and host.command))
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
            self._process = subprocess.Popen(
                words,
                stdin=reading,
                stdout=subprocess.DEVNULL if self.remote else None,
                stderr=subprocess.PIPE if self.remote else None,
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

    def check_running(self) -> None:
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

    def wait(self) -> None:
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

    def _why(self, error: WireError) -> ClusterLost:
        try:
            patience = _EXIT_SECONDS / 10 if self.remote else _EXIT_SECONDS  # a host that is lost tells nothing
            how: Exit | str = Exit(self._process.pid, self._process.wait(patience))
        except subprocess.TimeoutExpired:
            how = f"is lost: {error}"
            self._process.kill()
        if self.host is None:
            return ClusterLost(f"{self.name}, the parent of all workers, {how}")
        names = [process.spec.name for process in self.living.values()]
        lost = f" with {', '.join(names)}" if names else ""
        told = "" if self._groups or isinstance(how, str) else self._said()
        fix = "Look whether it is up and reaches this machine"
        if self._command:
            fix += f"; `{self._command} true` must work"
        return ClusterLost(f"host {self.host.name} is lost{lost}: {self.name} {how}{told}", fix=fix)

    def _state(self) -> str:
        """As far as the kernel tells."""
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
