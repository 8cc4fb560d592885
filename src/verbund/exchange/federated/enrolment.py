"""Who may be a client: names with pinned identities, and one-time tokens by which an identity gets its name.

A federation's folder at the server:

    identity.pem    the server's own key and certificate
    enrolled.json   by name: certificate (DER, base64), labels
    tokens.json     by SHA-256 of a token: name, labels, until when it is good
    lock            held while one of the files is changed
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import secrets
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund import plain_json
from verbund.checkpoint import durable
from verbund.comm.wire.credentials import Identity
from verbund.errors import InputError, RunFailed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX = "verbund-token-1"
_CERTIFICATE_LIMIT = 4096


@dataclass(frozen=True)
class Token:
    """What a client needs to become known once: who the server is, and a secret.

    Args:
        name: of the client.
        fingerprint: SHA-256 of the server's certificate, in hexadecimal digits.
        secret: 32 hexadecimal digits.
    """

    name: str
    fingerprint: str
    secret: str

    def __str__(self) -> str:
        return f"{_PREFIX}:{self.name}:{self.fingerprint}:{self.secret}"

    @staticmethod
    def parse(text: str, where: str) -> Token:
        """The token that a text stands for.

        Raises:
            InputError: if it stands for none.
        """
        prefix, *parts = text.strip().split(":")
        if prefix != _PREFIX or len(parts) != 3 or not re.fullmatch(r"[0-9a-f]{64}:[0-9a-f]{32}", ":".join(parts[1:])):
            fix = "`verbund federate enroll` at the server writes one"
            raise InputError("this is no enrolment token", where=where, fix=fix)
        return Token(*parts)


class Enrolment:
    """A federation's folder at the server.

    Args:
        folder: is made if it is not there, for this user alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(f"cannot be made: {error.strerror}", where=str(folder)) from None
        self.identity = Identity.kept(folder / "identity.pem")
        self._seen: tuple[int, int] = (0, 0)
        self._enrolled: dict[str, Any] = {}

    def invite(self, name: str, labels: Mapping[str, str], seconds: float) -> Token:
        """Makes a token by which one client becomes known under this name; an earlier one of the name is void.

        Raises:
            InputError: if the name is none, or taken.
        """
        if not _NAME.fullmatch(name):
            fix = "Take up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first"
            raise InputError(f"`{name[:80]}` cannot be a client's name", where="--name", fix=fix)
        with self._locked():
            if name in self.enrolled():
                fix = "Choose another name, or remove that client first (`--remove`)"
                raise InputError(f"`{name}` is enrolled already", where=str(self.folder), fix=fix)
            token = Token(name, self.identity.fingerprint, secrets.token_hex(16))
            now = time.time()
            tokens = {
                key: value
                for key, value in self._read("tokens.json").items()
                if value["until"] > now and value["name"] != name
            }
            tokens[_hash(token.secret)] = {"name": name, "labels": dict(labels), "until": now + seconds}
            self._write("tokens.json", tokens)
        return token

    def invited(self, name: str) -> bool:
        """Whether a token of this name is good."""
        return any(t["name"] == name and t["until"] > time.time() for t in self._read("tokens.json").values())

    def enrol(self, name: str, secret: str, certificate: bytes) -> None:
        """Takes a token and pins the certificate to its name. Once more with the same certificate changes nothing.

        Raises:
            InputError: if the token is unknown, used or too old, or this is no certificate.
        """
        try:
            if len(certificate) > _CERTIFICATE_LIMIT:
                raise ValueError
            ssl.create_default_context().load_verify_locations(cadata=certificate)
        except (ValueError, ssl.SSLError):
            raise InputError("this is no certificate") from None
        encoded = base64.b64encode(certificate).decode()
        with self._locked():
            enrolled = self.enrolled()
            if enrolled.get(name, {}).get("certificate") == encoded:
                return  # the answer was lost
            tokens = self._read("tokens.json")
            token = tokens.pop(_hash(secret), None)
            if token is None or token["name"] != name or token["until"] < time.time():
                fix = "Ask whoever runs the server for a new one"
                raise InputError("the token is unknown, was used, or is too old", where=name, fix=fix)
            if any(other["certificate"] == encoded for other in enrolled.values()):
                raise InputError("this identity is enrolled under another name", where=name)
            # First the token goes: killed in between, nobody is known, and a new token must be asked for.
            self._write("tokens.json", tokens)
            self._write("enrolled.json", {**enrolled, name: {"certificate": encoded, "labels": token["labels"]}})

    def remove(self, name: str) -> None:
        """Forgets a client: its next handshake is refused.

        Raises:
            InputError: if there is none of that name.
        """
        with self._locked():
            enrolled = dict(self.enrolled())
            if enrolled.pop(name, None) is None:
                known = ", ".join(sorted(enrolled)) or "none"
                raise InputError(f"`{name}` is not enrolled", where=str(self.folder), fix=f"Those that are: {known}")
            self._write("enrolled.json", enrolled)

    def enrolled(self) -> dict[str, Any]:
        """By name: certificate and labels. Read anew when another process has changed it."""
        try:
            status = os.stat(self.folder / "enrolled.json")
        except FileNotFoundError:
            return {}
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            self._enrolled = self._read("enrolled.json")
            self._seen = seen
        return self._enrolled

    def known(self) -> dict[bytes, str]:
        """The certificates of those who are enrolled, with their names."""
        return {base64.b64decode(value["certificate"]): name for name, value in self.enrolled().items()}

    def labels(self, name: str) -> dict[str, str]:
        """What the server says of a client."""
        return dict(self.enrolled().get(name, {}).get("labels", {}))

    def _read(self, file: str) -> dict[str, Any]:
        path = self.folder / file
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error}", where=str(path)) from None
        if not isinstance(found, dict) or not all(isinstance(value, dict) for value in found.values()):
            raise InputError("is not a list of clients", where=str(path))
        return found

    def _write(self, file: str, content: dict[str, Any]) -> None:
        path = self.folder / file
        try:
            durable.replace(path, plain_json.text(content).encode())
        except OSError as error:
            raise RunFailed(durable.reason(error), where=str(path), fix=durable.remedy(error)) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
