"""Text files as one stream of tokens; samples are windows of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbund.errors import DataError

_BYTES = 1 << 20


class Tokenizer:
    """Bytes as they are, or a Hugging Face tokenizer.

    Args:
        name: `bytes`, or the path of a `tokenizer.json`.
        folder: what a relative path starts from.

    Raises:
        DataError: if the file is missing or no tokenizer, or the package `tokenizers` is not installed.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.values = 256
        self.identity = "bytes"
        self._inner: Any = None
        if name == "bytes":
            return
        path = folder / name
        if not path.is_file():
            raise DataError(
                f"no such tokenizer: {path}", where="data.tokenizer", fix="Give `bytes` or a tokenizer.json"
            )
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError:
            raise DataError(
                "the package tokenizers is not installed",
                where="data.tokenizer",
                fix="pip install 'verbund[text]'",
            ) from None
        try:
            self._inner = Inner.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"is no tokenizer: {error}", where=str(path)) from None
        self.values = self._inner.get_vocab_size()
        self.identity = hashlib.sha256(path.read_bytes()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every token."""
        return np.dtype(np.uint8 if self.values <= 256 else np.uint16 if self.values <= 65536 else np.int32)

    def tokens(self, files: Sequence[Path]) -> Iterator[NDArray[Any]]:
        """The tokens of the files one after the other, some at a time."""
        for path in files:
            try:
                if self._inner is None:
                    with open(path, "rb") as raw:
                        while chunk := raw.read(_BYTES):
                            yield np.frombuffer(chunk, np.uint8)
                else:
                    yield from self._encoded(path)
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"cannot be read as text: {error}", where=str(path)) from None

    def _encoded(self, path: Path) -> Iterator[NDArray[Any]]:
        lines: list[str] = []
        size = 0
        with open(path, encoding="utf-8", newline="") as text:
            for line in text:
                lines.append(line)
                size += len(line)
                if size >= _BYTES:
                    yield self._encode(lines)
                    lines, size = [], 0
        if lines:
            yield self._encode(lines)

    def _encode(self, lines: list[str]) -> NDArray[Any]:
        encoded = self._inner.encode_batch(lines, add_special_tokens=False)
        return np.concatenate([np.array(part.ids, self.dtype) for part in encoded])
