"""A client's folder: who it is, what it took part in, and what is under way.

identity.pem        its key and certificate
server.json         whose certificate is pinned, and the name that it was enrolled under
peers.json          by name the public keys of other clients, as they were first seen in a secure round
audit.jsonl         what it did, a chain of hashes, with the heads of the server's that it was told
jobs/HASH/task.py   a job's task file, which can be read before it runs
jobs/HASH/content/  versions and updates, by SHA-256
jobs/HASH/state.json, memory.safetensors, memory.next   what is kept from round to round
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund import plain_json
from verbund.checkpoint import durable
from verbund.comm.wire import Identity
from verbund.errors import InputError, RunFailed
from verbund.exchange.federated.audit import AuditLog, Head
from verbund.exchange.federated.content import Content

_SHOWN = 16


class Home:
    """A client's folder.

    Args:
        folder: is made if it is not there, for this user alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(f"cannot be made: {error.strerror}", where=str(folder)) from None
        self._log: AuditLog | None = None

    @property
    def identity(self) -> Identity:
        """The client's own; made when it is first asked for."""
        return Identity.kept(self.folder / "identity.pem")

    def pinned(self) -> tuple[str, str] | None:
        """The server's fingerprint and the client's name, once it is enrolled."""
        found = read(self.folder / "server.json")
        return (str(found["fingerprint"]), str(found["name"])) if found else None

    def pin(self, fingerprint: str, name: str) -> None:
        """Keeps whose client this is."""
        write(self.folder / "server.json", {"fingerprint": fingerprint, "name": name})

    def peers(self) -> dict[str, str]:
        """By name, the public keys of other clients that it has seen."""
        return {str(name): str(key) for name, key in (read(self.folder / "peers.json") or {}).items()}

    def pin_peers(self, keys: Mapping[str, str]) -> None:
        """Keeps the public keys of clients that were not seen before."""
        write(self.folder / "peers.json", {**keys, **self.peers()})

    def job(self, digest: str) -> Path:
        """The folder of a job."""
        folder = self.folder / "jobs" / digest[:_SHOWN]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def note(self, event: str, server: Head | None = None, **fields: Any) -> None:
        """Writes a line of the client's own audit log, with the head of the server's."""
        if self._log is None:
            self._log = AuditLog(self.folder / "audit.jsonl")
        told = {"server": server.record()} if server is not None and server.count else {}
        self._log.append(event, {**fields, **told})

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second client out of the folder.

        Raises:
            InputError: if there is one.
        """
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "Give another `--home`, or end that client first"
                raise InputError("another client uses this folder", where=str(self.folder), fix=fix) from None
            yield
        finally:
            os.close(descriptor)


@dataclass
class JobState:
    """What a client keeps of a job.

    Args:
        folder: of the job.
        counted: rounds in which its update counted.
        released: updates with noise of their own that were begun, whether or not they came to anything.
        pending: the update that was trained and of which it is not known yet whether it counts.
        begun: under secure aggregation, the server's log and the number of the last invitation that was taken up: keys
            that were made for it are gone with the process, and no others are made for it.
        revealed: the server's log, and the last round in which shares were revealed: in it no second vector is sent.
    """

    folder: Path
    counted: int = 0
    pending: dict[str, Any] | None = None
    released: int = 0
    begun: tuple[str, int] = ("", 0)
    revealed: tuple[str, int] = ("", 0)

    @staticmethod
    def kept(folder: Path) -> JobState:
        """What is on disk."""
        found = read(folder / "state.json") or {}
        begun, revealed = (
            (str(run), int(n)) for run, n in (found.get(key) or ("", 0) for key in ("begun", "revealed"))
        )
        counted, released = int(found.get("counted", 0)), int(found.get("released", 0))
        return JobState(folder, counted, found.get("pending"), released, begun, revealed)

    @property
    def content(self) -> Content:
        """Versions and updates."""
        return Content(self.folder / "content")

    @property
    def memory(self) -> Path:
        """What the rule's client side remembers of the last round that counted."""
        return self.folder / "memory.safetensors"

    @property
    def next_memory(self) -> Path:
        """The same of the update that is pending."""
        return self.folder / "memory.next"

    def release(self, many: int = 1) -> int:
        """Counts one more that is begun, before it is, or takes back one that was not; how many there are now."""
        self.released += many
        self._write()
        return self.released

    def begin_secure(self, run: str, number: int) -> None:
        """An invitation is taken up; to be called before anything is said."""
        self.begun = run, number
        self._write()

    def reveal(self, run: str, round_: int) -> None:
        """Shares of a round are revealed; to be called before they are."""
        self.revealed = run, round_
        self._write()

    def trained(self, facts: dict[str, Any], kept: bool) -> None:
        """An update is there, and goes to the server now."""
        self.pending = {**facts, "kept": kept}
        self._write()

    def settled(self, counts: bool) -> None:
        """The server has said of the pending update whether it counts; once more after a kill changes nothing."""
        if self.pending is None:
            return
        if counts and self.pending["kept"] and self.next_memory.exists():
            os.replace(self.next_memory, self.memory)
        self.counted += counts
        self.pending = None
        self._write()
        self.content.keep(set())
        self.next_memory.unlink(missing_ok=True)

    def _write(self) -> None:
        kept = {key: value for key, value in vars(self).items() if key != "folder"}
        write(self.folder / "state.json", kept)


def read(path: Path) -> dict[str, Any] | None:
    """A JSON object in a file; None if there is no file.

    Raises:
        InputError: if it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path)) from None
    if not isinstance(found, dict):
        raise InputError("is not a JSON object", where=str(path))
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    """Replaces a file by a JSON object.

    Raises:
        RunFailed: if it cannot be written.
    """
    try:
        durable.replace(path, plain_json.text(content).encode())
    except OSError as error:
        raise RunFailed(durable.reason(error), where=str(path), fix=durable.remedy(error)) from None
