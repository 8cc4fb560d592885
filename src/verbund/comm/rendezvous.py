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
from verbund.errors import RunFailed

_HELLO_SECONDS = 10.0
_BODY_LIMIT = 1 << 26
_PREFIX = "verbund-"
_PLACE_LIMIT = 80  # bytes: a socket's address has 108


@dataclass(frozen=True)
class Meeting:
    """The folder where a run's processes meet."""

    folder: Path

    @staticmethod
    def create() -> Meeting:
        """A new folder where temporary files lie. Those of this user whose supervisor was killed are removed.

        Raises:
            RunFailed: if there is no place for it.
        """
        place = tempfile.gettempdir()
        if len(os.fsencode(place)) > _PLACE_LIMIT:
            place = "/tmp"
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        except OSError as error:
            fix = "Name a folder with room in the environment variable TMPDIR"
            raise RunFailed(f"no temporary folder can be made: {error.strerror}", where=place, fix=fix) from None
        _sweep(folder.parent)
        return Meeting(folder)

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
        new = meeting.address.with_name("new")
        self._sock.bind(str(new))
        os.chmod(new, 0o600)
        self._sock.listen(1024)
        os.rename(new, meeting.address)  # where there is an address, somebody listens or was killed

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


def _sweep(place: Path) -> None:
    """Removes the folders of killed supervisors: nobody listens at their address any more."""
    for folder in place.glob(f"{_PREFIX}*"):
        meeting = Meeting(folder)
        try:
            if folder.lstat().st_uid != os.getuid() or not meeting.address.is_socket():
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(str(meeting.address))
        except ConnectionRefusedError:
            meeting.remove()
        except OSError:
            continue  # somebody listens (and is busy), or it is no business of ours


def dial(meeting: Meeting, role: str, number: int) -> Connection:
    """A process's connection to its supervisor.

    Raises:
        OSError: if there is none any more.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(meeting.address))
    # No limit on how long the supervisor may stand still, e.g. suspended with Ctrl-Z: its death closes the socket.
    connection = Connection(sock, body_limit=_BODY_LIMIT, stall=0)
    connection.send("hello", {"role": role, "number": number})
    return connection
