"""Blocks in universal checkpoints: what a server has as pieces of global tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.checkpoint.sparse import Filler
from verbund.errors import CheckpointError
from verbund.exchange.parameter_server.dense import Dense, Sum
from verbund.exchange.parameter_server.image import Store
from verbund.exchange.parameter_server.plan import Block
from verbund.exchange.parameter_server.server_optimizer import FirstState, ServerOptimizer
from verbund.exchange.parameter_server.tables import Table

_RUN = 1 << 22  # elements of a table at a time


def pieces(store: Store) -> Iterator[Piece]:
    """A store's values and optimiser state, under the names that a single process would save them by.

    Of a tensor in several blocks there is one `step`: that of the first. Where one block of it has been stepped and
    another has not, the other's state is that before the first step, so that all elements have one.
    """
    block = store.block
    if isinstance(store, Table):
        yield from _table_pieces(store)
        return
    kind = "buffers" if isinstance(store, Sum) else "parameters"
    yield _piece(block, kind, block.name, store.values)
    if isinstance(store, Dense):
        state = store.state()
        if not state and not _whole(block):
            state = _before_the_first_step(block, store.first)
        yield from _state_pieces(block, store.first, state)


def load(block: Block, checkpoint: Checkpoint, optimizer: ServerOptimizer) -> Store:
    """What a checkpoint has of a block.

    Raises:
        CheckpointError: if it has no such tensor, or another shape or dtype.
    """
    kind = "buffers" if block.kind == "sum" else "parameters"
    shape = checkpoint.shape(kind, block.name)
    if shape != block.shape:
        raise CheckpointError(
            f"{kind} `{block.name}` has shape {list(shape)}, {list(block.shape)} is wanted",
            where=str(checkpoint.manifest.folder),
            fix="The model is not the one that was saved",
        )
    if block.kind == "rows":
        return _load_table(block, checkpoint, optimizer)
    values = torch.empty(block.length, dtype=getattr(torch, block.dtype))
    checkpoint.fill(kind, block.name, values, block.offset)
    if block.kind == "sum":
        return Sum(block, values.view(-1))
    state = {}
    for key in _keys(block, checkpoint):
        full = f"{block.name}/{key}"
        whole = key == "step" or checkpoint.shape("optimizer", full) != block.shape
        state[key] = (
            checkpoint.read("optimizer", full)
            if whole
            else checkpoint.read("optimizer", full, block.offset, block.length)
        )
    return Dense(block, values.view(-1), optimizer, state)


def _load_table(block: Block, checkpoint: Checkpoint, optimizer: ServerOptimizer) -> Table:
    """Of rows that are not stored, as they can be made, nothing is read."""
    dtype = getattr(torch, block.dtype)
    table = Table(block, optimizer, None if block.born else torch.empty(block.length, dtype=dtype))
    start, end = block.offset[0], block.offset[0] + block.length[0]
    keys = _keys(block, checkpoint)
    moments = [key for key in keys if key in table.first.moments]
    numbers = {key: checkpoint.read("optimizer", f"{block.name}/{key}") for key in keys if key not in moments}
    rows = None
    if table.lazy:
        rows = checkpoint.stored_rows("parameters", block.name, start, end, Filler(born=block.born))
    else:
        for low, high in _runs(block):
            at, length = (start + low, *block.offset[1:]), (high - low, *block.length[1:])
            table.all_rows[low:high] = checkpoint.read("parameters", block.name, at, length)
        if moments:
            filler = Filler(float(table.first.moments[moments[0]]))
            rows = checkpoint.stored_rows("optimizer", f"{block.name}/{moments[0]}", start, end, filler)
    if table.lazy or moments:
        whole = rows is None
        rows = torch.arange(start, end) if rows is None else rows
        for some in torch.split(rows, _rows_at_once(block)):
            state = {key: checkpoint.gather("optimizer", f"{block.name}/{key}", some) for key in moments}
            values = checkpoint.gather("parameters", block.name, some)
            if whole and table.lazy:  # of another strategy, which has all rows
                used = _used(table, some - start, values, state)
                some, values, state = some[used], values[used], {key: value[used] for key, value in state.items()}
            table.put(some - start, values, state)
    if keys:
        none = torch.empty(0, dtype=torch.int64)
        table.put(none, torch.empty((0, *block.length[1:]), dtype=dtype), numbers)
    return table


def _used(table: Table, rows: Tensor, values: Tensor, state: dict[str, Tensor]) -> Tensor:
    """A mask of those rows of a block that are not as they are made."""
    used = (values != table.gather(rows)).flatten(1).any(1)
    for key, value in state.items():
        used |= (value != table.first.moments[key]).flatten(1).any(1)
    return used


def _table_pieces(table: Table) -> Iterator[Piece]:
    """The rows that have been stepped, and what all others hold; all rows where they cannot be made."""
    block, stepped, start = table.block, table.stepped, table.block.offset[0]
    stateless = not table.has_state and _whole(block)
    if not table.lazy:
        for low, high in _runs(block):
            yield _piece(_run(block, low, high), "parameters", block.name, table.all_rows[low:high])
    ends = [int(rows[-1]) + 1 for rows in torch.split(stepped, _rows_at_once(block))[:-1]]
    for low, high in pairwise([0, *ends, block.length[0]]):
        rows, run = stepped[(stepped >= low) & (stepped < high)], _run(block, low, high)
        if table.lazy:
            yield _sparse(run, "parameters", block.name, rows + start, table.gather(rows), Filler(born=block.born))
        if stateless:
            continue
        rows = rows if table.has_state else rows[:0]
        state = table.state(rows)
        for key, first in table.first.moments.items():
            values = state.get(key, first.new_empty((0, *block.length[1:])))
            yield _sparse(run, "optimizer", f"{block.name}/{key}", rows + start, values, Filler(float(first)))
    if not stateless:
        numbers = table.state(stepped[:0]) or table.first.numbers
        for key in table.first.numbers:
            yield Piece.whole("optimizer", f"{block.name}/{key}", numbers[key], not any(block.offset))


def _run(block: Block, low: int, high: int) -> Block:
    """Some rows of a block."""
    offset, length = (block.offset[0] + low, *block.offset[1:]), (high - low, *block.length[1:])
    return Block(block.name, block.shape, block.dtype, offset, length)


def _runs(block: Block) -> Iterator[tuple[int, int]]:
    step = _rows_at_once(block)
    for low in range(0, block.length[0], step):
        yield low, min(low + step, block.length[0])


def _rows_at_once(block: Block) -> int:
    return max(_RUN // max(block.width, 1), 1)


def _state_pieces(block: Block, first: FirstState, state: dict[str, Tensor]) -> Iterator[Piece]:
    for key, value in state.items():
        name = f"{block.name}/{key}"
        if key in first.moments:
            yield _piece(block, "optimizer", name, value)
        else:
            yield Piece.whole("optimizer", name, value, not any(block.offset))


def _before_the_first_step(block: Block, first: FirstState) -> dict[str, Tensor]:
    return {key: value.expand(block.length) for key, value in first.moments.items()} | first.numbers


def _piece(block: Block, kind: str, name: str, values: Tensor) -> Piece:
    values = values.view(block.length) if values.is_contiguous() else values
    return Piece(kind, name, block.shape, values.dtype, block.offset, block.length, values)


def _sparse(run: Block, kind: str, name: str, rows: Tensor, values: Tensor, filler: Filler) -> Piece:
    """Some rows of a run, by their numbers in the whole table."""
    return Piece(kind, name, run.shape, values.dtype, run.offset, run.length, values, rows=rows, filler=filler)


def _keys(block: Block, checkpoint: Checkpoint) -> list[str]:
    """What the checkpoint has of an optimiser's state of a tensor."""
    start = block.name + "/"
    names = [name.removeprefix(start) for name in checkpoint.names("optimizer") if name.startswith(start)]
    return [key for key in names if "/" not in key]


def _whole(block: Block) -> bool:
    return block.length == block.shape
