"""How machines that are started from outside find the command: its address, and the secret that both know.

A job says where the command listens (`cluster.listen`). The address, with the port that it got, is published in a file
(`cluster.join_file`), by default beside the converted data; the secret lies beside it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verbund.cluster import host as hosts_
from verbund.comm.wire import Secret
from verbund.errors import InputError
from verbund.job import Job

PORT = 29170
"""Where the command listens, and is dialled, unless a port is given."""
SECRET_FILE = "VERBUND_SECRET_FILE"
_FOLDER = "join"


@dataclass(frozen=True)
class Invitation:
    """Where a command listens, and who may join.

    Args:
        host: name or address of this machine, as it listens there.
        port: 0 takes a free one.
        secret: what both ends prove to know.
        secret_file: where it lies.
        published: the file that tells the address.
    """

    host: str
    port: int
    secret: Secret
    secret_file: Path
    published: Path

    @staticmethod
    def of(job: Job, scratch: Path, environment: Mapping[str, str] = os.environ) -> Invitation:
        """What a job says, with what it leaves open: loopback or the address in `trusted_network`, a new secret.

        Raises:
            InputError: if there is no such address, or the secret cannot be read.
        """
        if job.cluster.join_file is not None:
            published = job.path(job.cluster.join_file).expanduser()
        else:
            folder = hashlib.sha256(job.folder.encode()).hexdigest()[:8]  # others' jobs may bear the same name
            published = scratch / _FOLDER / f"{job.name or 'job'}-{folder}"
        try:
            published.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            where = str(published.parent)
            raise InputError(f"cannot be made: {error.strerror}", where=where, fix="Give `cluster.join_file`") from None
        told = job.cluster.secret_file or environment.get(SECRET_FILE)
        file = job.path(told).expanduser() if told else published.with_name(f"{published.name}.secret")
        if told or file.exists():
            secret = Secret.read(file)
        else:
            secret = Secret.create()
            secret.write(file)
        host, port = address_of(job.cluster.listen) if job.cluster.listen else (_own(job.cluster.trusted_network), 0)
        return Invitation(host, port, secret, file, published)

    def publish(self, port: int) -> str:
        """Tells the address, with the port that it got, in a file; returns it."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        address = written(host, port)
        temporary = self.published.with_name(f".{self.published.name}-{os.getpid()}")
        try:
            temporary.write_text(f"{address}\n", encoding="utf-8")
            temporary.replace(self.published)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", where=str(self.published)) from None
        return address

    def withdraw(self) -> None:
        """Nobody listens any more; the secret stays for the next start."""
        self.published.unlink(missing_ok=True)


def written(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `HOST` or `[IPV6]:PORT`.

    Raises:
        ValueError: if it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"`{text}` is no address such as 10.0.0.1:{PORT} or node1:{PORT}")
    return host, int(port)


def published_in(file: Path) -> str | None:
    """The address that a file tells; None as long as nobody listens."""
    try:
        return file.read_text(encoding="utf-8")[:300].strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _own(network: str | None) -> str:
    """This machine's address in a network; loopback if none is named."""
    if network is None:
        return "127.0.0.1"
    trusted = ipaddress.ip_network(network)
    first = trusted.network_address if trusted.num_addresses == 1 else trusted[1]
    address = str(first) if first.is_loopback else hosts_.source_of("there", str(first))
    if ipaddress.ip_address(address) not in trusted:
        raise InputError(
            f"this machine has no address in `trusted_network` {network}",
            where="cluster.listen",
            fix='Say at which address it listens, e.g. `cluster.listen = "10.0.0.1:29170"`',
        )
    return address
