"""An authority that signs certificates: Ed25519, made with the parts of `certificate`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from verbund.comm.wire import Certificates
from verbund.comm.wire import certificate as parts

ALGORITHM = parts._der(0x30, parts._ED25519)
ALWAYS = b"20000101000000Z", b"99991231235959Z"
PAST = b"20000101000000Z", b"20010101000000Z"
BASIC_CONSTRAINTS, ALTERNATIVE_NAME, IS_AUTHORITY = "0603551d13", "0603551d11", "30030101ff"


def common_name(name: str) -> bytes:
    return parts._der(0x30, parts._der(0x31, parts._der(0x30, parts._COMMON_NAME + parts._der(0x0C, name.encode()))))


def extension(kind: str, content: bytes) -> bytes:
    return parts._der(0x30, bytes.fromhex(kind) + parts._der(0x04, content))


def certificate(
    name: str, key: bytes, issuer: str, signer: bytes, extensions: bytes, lifetime: tuple[bytes, bytes]
) -> str:
    body = parts._der(
        0x30,
        parts._der(0xA0, parts._der(0x02, b"\2"))
        + parts._der(0x02, b"\1" + secrets.token_bytes(8))
        + ALGORITHM
        + common_name(issuer)
        + parts._der(0x30, b"".join(parts._der(0x18, moment) for moment in lifetime))
        + common_name(name)
        + parts._der(0x30, ALGORITHM + parts._bits(parts.public_key(key)))
        + parts._der(0xA3, parts._der(0x30, extensions)),
    )
    signature = parts._bits(parts.sign(signer, body))
    return parts._pem("CERTIFICATE", parts._der(0x30, body + ALGORITHM + signature))


@dataclass
class Authority:
    folder: Path
    name: str = "Authority"

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._key = secrets.token_bytes(32)
        self.path = self.folder / "authority.pem"
        rights = extension(BASIC_CONSTRAINTS, bytes.fromhex(IS_AUTHORITY))
        self.path.write_text(certificate(self.name, self._key, self.name, self._key, rights, ALWAYS))

    def issue(self, name: str, hosts: tuple[str, ...] = ("127.0.0.1", "::1"), expired: bool = False) -> Certificates:
        key = secrets.token_bytes(32)
        named = b"".join(
            parts._der(0x82, host.encode()) if host.isalpha() else parts._der(0x87, ip_address(host).packed)
            for host in hosts
        )
        names = extension(ALTERNATIVE_NAME, parts._der(0x30, named))
        signed = certificate(name, key, self.name, self._key, names, PAST if expired else ALWAYS)
        own, secret = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        own.write_text(signed)
        wrapped = parts._der(0x30, parts._der(0x02, b"\0") + ALGORITHM + parts._der(0x04, parts._der(0x04, key)))
        secret.write_text(parts._pem("PRIVATE KEY", wrapped))
        return Certificates(self.path, own, secret)
