"""Addresses: `unix:PATH`, `tcp:HOST:PORT`; an IPv6 host stands in brackets."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund.comm.wire.credentials import Certificates, Credentials, Enrolled, Pinned
from verbund.errors import InputError

_LONGEST_PATH = 107


@dataclass(frozen=True)
class Unix:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"

    def check_trusted(self, credentials: Credentials) -> None:
        """Raises InputError if others than this user can reach the socket and no credentials keep them out."""
        if isinstance(credentials, Certificates | Pinned | Enrolled):
            fix = "Take a secret, or none in a private folder"
            raise InputError("certificates are for TCP", where=str(self), fix=fix)
        if credentials is not None:
            return
        folder = self.path.parent
        try:
            status = folder.stat()
        except OSError as error:
            raise InputError(f"there is no folder for a socket: {error.strerror}", where=str(folder)) from None
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            fix = "Take a folder that only this user can enter (`chmod 700`), or give credentials"
            raise InputError(
                "others can enter the folder of a socket that asks for no credentials", where=str(folder), fix=fix
            )


@dataclass(frozen=True)
class Tcp:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"

    def resolve(self) -> list[tuple[int, Any]]:
        """The families and socket addresses that the host's name stands for.

        Raises:
            InputError: if it stands for none.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise InputError(f"the host is not known: {error}", where=str(self)) from None
        return [(int(family), address) for family, _, _, _, address in found]

    def check_trusted(self, credentials: Credentials) -> None:
        """Raises InputError if the address lies beyond this machine and there are no credentials."""
        for _, address in self.resolve() if credentials is None else ():
            if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
                fix = "Give a run secret or certificates, or take 127.0.0.1"
                raise InputError("beyond this machine nothing is said without credentials", where=str(self), fix=fix)


def parse(text: str) -> Unix | Tcp:
    """The address that a text stands for.

    Raises:
        InputError: if it stands for none.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest and "\0" not in rest:
        if len(os.fsencode(rest)) > _LONGEST_PATH:
            raise InputError(f"a socket's path has at most {_LONGEST_PATH} bytes", where=text)
        return Unix(Path(rest))
    host, colon, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if kind == "tcp" and colon and host and (bracketed or ":" not in host):
        if port.isascii() and port.isdecimal() and int(port) < 1 << 16:
            return Tcp(host, int(port))
        raise InputError(f"`{port}` is no port", where=text, fix="A port is a number from 0 to 65535")
    fix = "An address is unix:PATH or tcp:HOST:PORT, such as tcp:10.0.0.1:4711 or tcp:[fd00::1]:4711"
    raise InputError("this is no address", where=text, fix=fix)
