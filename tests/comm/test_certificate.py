"""Ed25519 against RFC 8032's own vectors; the certificate against OpenSSL."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from verbund.comm.wire import certificate

# RFC 8032, section 7.1: private key, public key, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        (
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
            "d25bf5f0595bbe24655141438e7a100b"
        ),
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        (
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
            "387b2eaeb4302aeeb00d291612bb0c00"
        ),
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        (
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
            "4a7c15e9716ed28dc027beceea1ec40a"
        ),
    ),
]


@pytest.mark.parametrize(("key", "public", "message", "signature"), VECTORS)
def test_vectors(key: str, public: str, message: str, signature: str) -> None:
    seed = bytes.fromhex(key)
    assert certificate.public_key(seed).hex() == public
    assert certificate.sign(seed, bytes.fromhex(message)).hex() == signature


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_openssl_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "own.pem"
    path.write_text(certificate.create()[0])
    verified = subprocess.run(
        ["openssl", "verify", "-check_ss_sig", "-CAfile", path, path], capture_output=True, text=True, check=False
    )
    assert verified.stdout.strip().endswith("OK"), verified.stderr


def test_no_two_are_alike() -> None:
    assert certificate.create()[1] != certificate.create()[1]
