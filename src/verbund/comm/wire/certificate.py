"""A certificate that a process makes for itself: Ed25519 (RFC 8032) in X.509 (RFC 5280, RFC 8410).

The standard library speaks TLS but makes no keys and no certificates. What is computed here, once a key, is the
public key and one signature, which nobody relies on; TLS itself is OpenSSL's.
"""

from __future__ import annotations

import base64
import hashlib
import secrets

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ED25519 = bytes.fromhex("06032b6570")  # the object identifier 1.3.101.112
_COMMON_NAME = bytes.fromhex("0603550403")  # 2.5.4.3
_FOR_EVER = b"20000101000000Z", b"99991231235959Z"  # it lives as long as its listener, and clocks differ

Point = tuple[int, int, int, int]
"""x, y as X/Z, Y/Z, and T = XY/Z."""


def create(common_name: str = "verbund") -> tuple[str, bytes]:
    """A new private key with a certificate for it, as PEM; and the certificate alone, as DER.

    Args:
        common_name: of subject and issuer. OpenSSL finds issuers by it: certificates that one context trusts have each
            their own.
    """
    seed = secrets.token_bytes(32)
    algorithm = _der(0x30, _ED25519)
    name = _der(0x30, _der(0x31, _der(0x30, _COMMON_NAME + _der(0x0C, common_name.encode()))))
    body = _der(
        0x30,
        _der(0xA0, _der(0x02, b"\2"))  # version 3
        + _der(0x02, b"\1" + secrets.token_bytes(8))  # serial number
        + algorithm
        + name
        + _der(0x30, b"".join(_der(0x18, moment) for moment in _FOR_EVER))
        + name
        + _der(0x30, algorithm + _bits(public_key(seed))),
    )
    signed = _der(0x30, body + algorithm + _bits(sign(seed, body)))
    key = _der(0x30, _der(0x02, b"\0") + algorithm + _der(0x04, _der(0x04, seed)))
    return _pem("PRIVATE KEY", key) + _pem("CERTIFICATE", signed), signed


def public_key(seed: bytes) -> bytes:
    """The public key of a private one."""
    return _encoded(_times(_expanded(seed)[0], _base()))


def sign(seed: bytes, message: bytes) -> bytes:
    """The signature of a message under a private key."""
    scalar, prefix = _expanded(seed)
    nonce = _hash(prefix + message)
    commitment = _encoded(_times(nonce, _base()))
    challenge = _hash(commitment + public_key(seed) + message)
    return commitment + ((nonce + challenge * scalar) % _ORDER).to_bytes(32, "little")


def _expanded(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return scalar & (1 << 254) - 8 | 1 << 254, digest[32:]


def _hash(message: bytes) -> int:
    return int.from_bytes(hashlib.sha512(message).digest(), "little") % _ORDER


def _base() -> Point:
    y = 4 * pow(5, -1, _P) % _P
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P)
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    x = _P - x if x % 2 else x
    return x, y, 1, x * y % _P


def _plus(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % _P, (p[1] + p[0]) * (q[1] + q[0]) % _P
    c, d = 2 * p[3] * q[3] * _D % _P, 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(scalar: int, point: Point) -> Point:
    total: Point = (0, 1, 1, 0)
    for bit in range(scalar.bit_length()):
        if scalar >> bit & 1:
            total = _plus(total, point)
        point = _plus(point, point)
    return total


def _encoded(point: Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _bits(content: bytes) -> bytes:
    return _der(0x03, b"\0" + content)


def _pem(label: str, content: bytes) -> str:
    lines = base64.encodebytes(content).decode()
    return f"-----BEGIN {label}-----\n{lines}-----END {label}-----\n"
