"""What a host tells of itself before anything starts on it, and what must be the same on all hosts."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbund.errors import InputError
from verbund.observe.memory import available_bytes

_PACKAGES = ("torch", "numpy")
_MARK = ".verbund-shared-"


def versions() -> dict[str, str]:
    """Of what computes. The package itself is known by its source, since one version number may stand for several."""
    found = {"verbund": _source(), "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def facts(address: str, folder: str | None) -> dict[str, Any]:
    """What this host is like; `problem` is why it cannot take part.

    Args:
        address: the host's own, as the job has it.
        folder: where the command runs; this process goes there if it can, so that relative paths mean the same. None:
            it stays.
    """
    problem = None if is_own(address) else f"{address} is no address of this host"
    if folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
    return {"versions": versions(), "free": available_bytes(), "problem": problem}


def check(name: str, told: Mapping[str, Any]) -> None:
    """Compares what a host told with this one.

    Raises:
        InputError: if it cannot take part.
    """
    if told["problem"]:
        raise InputError(str(told["problem"]), where=f"host {name}", fix="Give the address that it has itself")
    here, there = versions(), told["versions"]
    unlike = [package for package in here if there.get(package) != here[package]]
    others = [f"{package} {there.get(package)} (here {here[package]})" for package in unlike]
    if others:
        raise InputError(f"has {', '.join(others)}", where=f"host {name}", fix="Install the same versions on all hosts")


def is_own(address: str) -> bool:
    """Whether it is an address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def source_of(name: str, target: str) -> str:
    """This machine's address on the way to the host `name`, whose address is `target`.

    Raises:
        InputError: if there is no way.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target, 9))  # nothing is sent
        except OSError as error:
            fix = f"`ip route get {target}` shows whether there is a way; or leave it out of `cluster.hosts`"
            what = f"cannot be reached at {target}: {error.strerror}"
            raise InputError(what, where=f"host {name}", fix=fix) from None
        return str(sock.getsockname()[0])


def mark(folder: Path) -> Path:
    """A new file in a folder, by which others know it. Where nothing can be written there is none, and nobody sees
    it: what cannot be proved is not taken for granted."""
    path = folder / f"{_MARK}{os.urandom(8).hex()}"
    with contextlib.suppress(OSError):
        path.touch(exist_ok=False)
    return path


def unmark(path: Path) -> None:
    """Removes what `mark` made."""
    if path.name.startswith(_MARK):
        path.unlink(missing_ok=True)


def unseen(marks: list[str]) -> list[str]:
    """Those that this host does not see."""
    return [path for path in marks if not os.path.exists(path)]


def _source() -> str:
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
