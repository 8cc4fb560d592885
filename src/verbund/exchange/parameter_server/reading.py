"""Reads of a server's blocks: for whoever pulls, and for a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.snapshot import Snapshot
from verbund.comm.wire import Memory, Payload
from verbund.errors import RunFailed
from verbund.exchange.parameter_server.clipping import Square
from verbund.exchange.parameter_server.custody import Custody


class Reading:
    """Answers readers once they may see what they ask for.

    Args:
        custody: of the blocks.
    """

    def __init__(self, custody: Custody) -> None:
        self._custody = custody
        self._pulls = self._bytes = 0

    def totals(self) -> dict[str, int]:
        """What was read."""
        return {"pulls": self._pulls, "pulled_bytes": self._bytes}

    def read(
        self, parts: Sequence[tuple[int, Tensor | None]], least: int, looks: bool, room: Memory, until: float
    ) -> tuple[dict[str, Payload], dict[str, Any]]:
        """Once all blocks have the least version and nothing of what is read can be lost any more: values by place in
        `parts`, as `v<i>`, and `versions`; and the `places` of values in this server's memory.

        Args:
            parts: blocks, and of tables the rows that are wanted.
            least: version.
            looks: whether the client reads in this server's memory.
            room: for values that are sent; the former answer has been.
            until: when.

        Raises:
            RunFailed: if it is not there in time; it says who is missing.
            Moved: if another server answers for one of the blocks.
        """
        custody, blocks = self._custody, [block for block, _ in parts]
        with custody.changed:
            while True:
                custody.check_primary(blocks, begun=False)
                behind = [b for b in blocks if b not in custody.holdings or custody.holdings.version(b) < least]
                if not behind:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    raise self._behind(behind, least)
                custody.changed.wait(left)
            room.begin()
            arrays: dict[str, Payload] = {}
            places: list[int | None] = [None] * len(parts)
            for number, (block, rows) in enumerate(parts):
                if rows is not None:
                    arrays[f"v{number}"] = custody.holdings.read_rows(block, rows)
                elif not looks or (place := self._place(block)) is None:
                    arrays[f"v{number}"] = custody.holdings.read([block], self._taken(block, room))
                else:
                    places[number] = place
            versions = [custody.holdings.version(block) for block in blocks]
            needed = custody.needed(blocks)
            self._pulls += 1
            self._bytes += sum(int(getattr(array, "nbytes", 0)) for array in arrays.values())
        custody.settle(needed, until)
        return arrays, {"versions": versions, "places": places}

    def squares(self, blocks: Sequence[int], ticket: int, until: float) -> list[Square]:
        """Once all blocks have the shares of a ticket that they wait for, and none of these can be lost any more: what
        is known of its norm, by block.

        Args:
            blocks: their numbers.
            ticket: which.
            until: when.

        Raises:
            RunFailed: if they do not come in time; it says which.
            Moved: if another server answers for one of the blocks.
        """
        custody = self._custody
        with custody.changed:
            while True:
                custody.check_primary(blocks)
                behind = [block for block in blocks if not custody.holdings.complete(block, ticket)]
                if not behind:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    raise self._behind(behind, ticket + 1)
                custody.changed.wait(left)
            found = [custody.holdings.square(block, ticket) for block in blocks]
            needed = custody.needed(blocks)
        custody.settle(needed, until)
        return found

    def _place(self, block: int) -> int | None:
        """Where in this server's memory a block's values lie."""
        exposed, values = self._custody.exposed, self._custody.holdings.values(block)
        return exposed.place(block, values) if exposed is not None and values is not None else None

    def _taken(self, block: int, room: Memory) -> Tensor:
        """Memory for the values of a block, until the next answer."""
        found = self._custody.plan.blocks[block]
        dtype = getattr(torch, found.dtype)
        return torch.from_numpy(room.take(found.count * dtype.itemsize)).view(dtype)

    def _behind(self, behind: list[int], least: int) -> RunFailed:
        """Who is missing, for a reader that has waited too long."""
        holdings, plan = self._custody.holdings, self._custody.plan
        block, where = behind[0], f"server {self._custody.rank}"
        name = plan.blocks[block].name
        if block not in holdings:
            return RunFailed(f"nobody has given block {block} (`{name}`) its first values", where=where)
        version = holdings.version(block)
        what = f"block {block} (`{name}`) is at version {version}, and version {least} was waited for"
        if plan.rule.shared:
            shares = ", ".join(map(str, holdings.missing(block)))
            what += f": of ticket {version} these shares have not come: {shares}"
        return RunFailed(what, where=where)


class Saves:
    """Writes a server's part of a checkpoint, in the background.

    Args:
        custody: of the blocks.
        deadline: seconds that writing may take.
    """

    def __init__(self, custody: Custody, deadline: float) -> None:
        self._custody, self._deadline = custody, deadline
        self._snapshot = Snapshot()
        self._under_way: dict[tuple[int, str], Future[dict[str, Any]]] = {}
        """By step and by who asks, which after a loss may be another."""
        self._one = threading.Lock()

    def start(self, step: int, by: str, folder: Path, part: int, until: float) -> None:
        """Copies all blocks that this server answers for, and has them written; harmless when repeated."""
        with self._one:
            if (step, by) not in self._under_way:
                for former in self._under_way.values():
                    former.exception(self._deadline)
                with self._custody.changed:
                    blocks = self._custody.mine
                    future = self._snapshot.save(self._custody.holdings.pieces(blocks), folder, part)
                    needed = self._custody.needed(blocks)
                self._under_way = {(step, by): future}
                self._custody.settle(needed, until)

    def result(self, step: int, by: str, until: float) -> dict[str, Any]:
        """The record of what was written; see `checkpoint.write.write_part`.

        Raises:
            RunFailed: if nothing of that step is being written, or not in time.
            CheckpointError: if it could not be written.
        """
        where = f"server {self._custody.rank}"
        future = self._under_way.get((step, by))
        if future is None:
            raise RunFailed(f"step {step} is not being saved here", where=where)
        try:
            return future.result(until - time.monotonic())
        except TimeoutError:
            raise RunFailed(f"step {step} is not written in time", where=where) from None
