"""Rendezvous: how the processes of a run find their supervisor.

The supervisor listens on a Unix socket in a folder that only this user can enter; every process of the run dials it
and says who it is. The folder also holds the store through which workers of a generation find each other. Whoever is
last to leave removes it.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verbund.comm.wire import Connection, Deadline, WireError

_HELLO_SECONDS = 10.0
_BODY_LIMIT = 1 << 26


@dataclass(frozen=True)
class Meeting:
    """The folder where a run's processes meet."""

    folder: Path

    @staticmethod
    def create() -> Meeting:
        return Meeting(Path(tempfile.mkdtemp(prefix="verbund-")))

    @property
    def address(self) -> Path:
        return self.folder / "supervisor"

    def store(self, name: str) -> Path:
        """The file through which the workers of a generation find each other."""
        return self.folder / name

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Listener:
    """The supervisor's side: accepts whoever says `hello`."""

    def __init__(self, meeting: Meeting) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(str(meeting.address))
        os.chmod(meeting.address, 0o600)
        self._sock.listen(1024)

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[Connection, str, int] | None:
        """The next process's connection, role and number; None if what came was no process of ours."""
        sock, _ = self._sock.accept()
        connection = Connection(sock, body_limit=_BODY_LIMIT)
        try:
            hello = connection.receive(_HELLO_SECONDS)
            if hello.kind == "hello":
                return connection, str(hello.fields["role"]), int(hello.fields["number"])
        except (WireError, Deadline, KeyError, ValueError, TypeError):
            connection.close()
            return None
        connection.close()
        return None

    def close(self) -> None:
        self._sock.close()


def dial(meeting: Meeting, role: str, number: int) -> Connection:
    """A process's connection to its supervisor."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(meeting.address))
    connection = Connection(sock, body_limit=_BODY_LIMIT)
    connection.send("hello", {"role": role, "number": number})
    return connection
