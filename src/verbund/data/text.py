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
_PIECE = 1 << 16


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
        """A file is encoded in pieces that end with a line, or with a word where a line has no end, as if each were a
        text of its own."""
        rest = ""
        with open(path, encoding="utf-8", newline="") as text:
            while fresh := text.read(_BYTES):
                *pieces, rest = _pieces(rest + fresh)
                if pieces:
                    yield self._encode(pieces)
        if rest:
            yield self._encode([rest])

    def _encode(self, pieces: list[str]) -> NDArray[Any]:
        encoded = self._inner.encode_batch(pieces, add_special_tokens=False)
        return np.concatenate([np.array(part.ids, self.dtype) for part in encoded])


def _pieces(text: str) -> list[str]:
    """Cuts a text into pieces of at most about `_PIECE` characters; the last one may go on."""
    pieces = []
    start = 0
    while len(text) - start > _PIECE:
        end = start + _PIECE
        for mark in ("\n", " "):
            if (place := text.rfind(mark, start, end)) >= start:
                # Several line ends in a row are one token in many vocabularies: they stay together.
                end = place + 1 if mark == "\n" else place
                while mark == "\n" and end < len(text) and text[end] == "\n":
                    end += 1
                break
        end = max(end, start + 1)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
