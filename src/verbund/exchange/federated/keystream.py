"""Random words that can be read from any position: AES-256 in counter mode (NIST SP 800-38A), on the whole key."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

KEY_BYTES = 32
_BLOCK = 16
_AT_ONCE = 1 << 16  # elements whose words stay in the cache; a multiple of a block's
_ZEROS = bytes(8 * _AT_ONCE + _BLOCK)


class Keystream:
    """The words of one key. Word i of a width of 4 or 8 bytes is a function of the key and i alone.

    Args:
        key: 32 bytes, for this stream alone: the counter begins at 0, there is no nonce.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; it has {KEY_BYTES}")
        self._cipher = algorithms.AES(key)

    @staticmethod
    def fresh() -> Keystream:
        """One whose key comes from the operating system, and which nobody else knows."""
        return Keystream(secrets.token_bytes(KEY_BYTES))

    def words(self, offset: int, count: int, dtype: Any) -> NDArray[Any]:
        """Uniform words `offset` … `offset + count - 1`.

        Args:
            offset: of the first, in words.
            count: how many.
            dtype: uint32 or uint64.
        """
        out: NDArray[Any] = np.zeros(count, dtype)
        self.add(out, offset)
        return out

    def add(self, target: NDArray[Any], offset: int = 0, sign: int = 1) -> None:
        """Adds the words to `target` modulo 2 to the power of its width, or takes them away.

        Args:
            target: uint32 or uint64, flat and contiguous; its element i meets word `offset + i`.
            offset: of its first element in the whole vector.
            sign: 1 or -1.
        """
        width = target.itemsize
        if target.dtype.kind != "u" or width not in (4, 8) or target.ndim != 1 or not target.flags.c_contiguous:
            raise ValueError(f"a keystream is added to flat uint32 or uint64, not to {target.dtype} {target.shape}")
        block, skipped = divmod(offset * width, _BLOCK)
        stream = Cipher(self._cipher, modes.CTR(block.to_bytes(_BLOCK, "big"))).encryptor()
        stream.update(_ZEROS[:skipped])
        buffer = bytearray(min(len(target), _AT_ONCE) * width + _BLOCK)
        word = np.dtype(f"<u{width}")
        for start in range(0, len(target), _AT_ONCE):
            some = target[start : start + _AT_ONCE]
            stream.update_into(_ZEROS[: some.nbytes], buffer)
            words = np.frombuffer(buffer, word, len(some))
            if sign > 0:
                some += words
            else:
                some -= words
