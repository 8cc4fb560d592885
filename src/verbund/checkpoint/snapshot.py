"""The snapshot: pieces copied at a step boundary, written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.write import SHARD_BYTES, write_part

_ALIGN = 64
_Layout = list[tuple[tuple[int, ...], torch.dtype]]


class Snapshot:
    """Copies a process's pieces and writes the copy. Keeps its memory, as much as the owned pieces have.

    There is one copy: while `busy`, the caller skips the save or waits for the future of the last one.
    """

    def __init__(self) -> None:
        self._layout: _Layout = []
        self._buffers: list[Tensor] = []
        self._running: Future[dict[str, Any]] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last copy is still being written."""
        return self._running is not None and not self._running.done()

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copies the owned pieces; the rest pass as they are. What it returns is valid until the next call.

        Raises:
            RuntimeError: while `busy`.
        """
        if self.busy:
            raise RuntimeError("the last snapshot is still being written")
        pieces = list(pieces)
        owned = [piece for piece in pieces if piece.owner]
        self._fit([(tuple(piece.values.shape), piece.dtype) for piece in owned])
        with torch.no_grad():
            if owned:
                torch._foreach_copy_(self._buffers, [piece.values.detach() for piece in owned])
        copies = iter(self._buffers)
        return [replace(piece, values=next(copies)) if piece.owner else piece for piece in pieces]

    def save(
        self, pieces: Iterable[Piece], folder: Path, part: int, shard_bytes: int = SHARD_BYTES
    ) -> Future[dict[str, Any]]:
        """Copies `pieces` now and writes them in a thread.

        Returns:
            The future of what `write_part` returns. An error of writing is the future's.

        Raises:
            RuntimeError: while `busy`.
        """
        copies = self.take(pieces)
        future: Future[dict[str, Any]] = Future()
        future.set_running_or_notify_cancel()

        def write() -> None:
            try:
                record = write_part(folder, part, copies, shard_bytes)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(record)

        self._running = future
        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        return future

    def _fit(self, layout: _Layout) -> None:
        """Cuts one block of memory into buffers of this layout, unless it is cut so already."""
        if layout == self._layout:
            return
        starts, end = [], 0
        for length, dtype in layout:
            starts.append(end)
            size = torch.Size(length).numel() * dtype.itemsize
            end += -(-size // _ALIGN) * _ALIGN
        block = torch.zeros(end, dtype=torch.uint8)  # zeros: the pages exist before the first copy
        self._buffers = [
            block[start : start + torch.Size(length).numel() * dtype.itemsize].view(dtype).view(length)
            for start, (length, dtype) in zip(starts, layout, strict=True)
        ]
        self._layout = layout
