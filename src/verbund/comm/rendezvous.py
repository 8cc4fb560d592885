"""Rendezvous: how the processes of a run find their supervisor.

On one machine the supervisor listens on a Unix socket in a folder that only this user can enter, and whoever is last to
leave removes the folder. Over several it listens at its own address, and who dials it proves to know the run's secret.
Every process of the run dials it and says who it is.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verbund.comm.wire import Connection, Deadline, Secret, WireError
from verbund.comm.wire import dial as wire_dial
from verbund.comm.wire import listen as wire_listen
from verbund.errors import InputError, RunFailed

_HELLO_SECONDS = 10.0
_DIAL_SECONDS = 30.0
_BODY_LIMIT = 1 << 26
_PREFIX = "verbund-"
_PLACE_LIMIT = 80  # bytes: a socket's address has 108


@dataclass(frozen=True)
class Meeting:
    """Where a run's processes meet.

    Args:
        address: the supervisor's, as the wire writes it.
        folder: on one machine, where its socket lies.
        secret: over several, what both ends prove to know.
        lost_after: over several, seconds without any answer after which a connection breaks.
    """

    address: str
    folder: Path | None = None
    secret: Secret | None = None
    lost_after: float | None = None

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
        return Meeting(f"unix:{_socket(folder)}", folder)

    @staticmethod
    def at(host: str, lost_after: float, port: int = 0, secret: Secret | None = None) -> Meeting:
        """One over the network, at this machine's address `host`, with a secret of its own unless one is given."""
        written = f"[{host}]" if ":" in host else host
        return Meeting(f"tcp:{written}:{port}", secret=secret or Secret.create(), lost_after=lost_after)

    def record(self) -> dict[str, Any]:
        """The meeting as plain values, its secret among them: only for what nobody else can read."""
        return {
            "address": self.address,
            "folder": str(self.folder) if self.folder else None,
            "secret": self.secret.value.hex() if self.secret else None,
            "lost_after": self.lost_after,
        }

    @staticmethod
    def of(record: dict[str, Any]) -> Meeting:
        """The meeting that `record` described."""
        folder, secret = record["folder"], record["secret"]
        return Meeting(
            record["address"],
            Path(folder) if folder else None,
            Secret(bytes.fromhex(secret)) if secret else None,
            record["lost_after"],
        )

    def remove(self) -> None:
        """Removes the folder, if there is one."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class Listener:
    """The supervisor's side: accepts whoever says `hello`."""

    def __init__(self, meeting: Meeting) -> None:
        self._lost_after = meeting.lost_after
        self.meeting = meeting
        """With the address that is to be dialled."""
        if meeting.folder is None:
            self._listener = wire_listen(meeting.address, meeting.secret, body_limit=_BODY_LIMIT)
            self.meeting = replace(meeting, address=self._listener.address)
        else:
            new = meeting.folder / "new"
            self._listener = wire_listen(f"unix:{new}", body_limit=_BODY_LIMIT)
            os.rename(new, _socket(meeting.folder))  # where there is an address, somebody listens or was killed

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> tuple[Connection, str, int] | None:
        """The next process's connection, role and number; None if what came was no process of ours."""
        connection = self._listener.accept(_HELLO_SECONDS)
        try:
            hello = connection.receive(_HELLO_SECONDS)
            if hello.kind == "hello":
                if self._lost_after is not None:
                    connection.break_after(self._lost_after)
                return connection, str(hello.fields["role"]), int(hello.fields["number"])
        except (WireError, Deadline, KeyError, ValueError, TypeError):
            connection.close()
            return None
        connection.close()
        return None

    def close(self) -> None:
        self._listener.close()


def _socket(folder: Path) -> Path:
    return folder / "supervisor"


def _sweep(place: Path) -> None:
    """Removes the folders of killed supervisors: nobody listens at their address any more."""
    for folder in place.glob(f"{_PREFIX}*"):
        address = _socket(folder)
        try:
            if folder.lstat().st_uid != os.getuid() or not address.is_socket():
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(str(address))
        except ConnectionRefusedError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # somebody listens (and is busy), or it is no business of ours


def dial(meeting: Meeting, role: str, number: int) -> Connection:
    """A process's connection to its supervisor.

    Raises:
        WireError: if there is none any more, or it does not trust this process.
    """
    # No limit on how long the supervisor may stand still, e.g. suspended with Ctrl-Z: its death closes the socket.
    try:
        connection = wire_dial(meeting.address, meeting.secret, _DIAL_SECONDS, body_limit=_BODY_LIMIT, stall=0)
    except InputError as error:
        raise WireError(str(error)) from None
    if meeting.lost_after is not None:
        connection.break_after(meeting.lost_after)
    connection.send("hello", {"role": role, "number": number})
    return connection
