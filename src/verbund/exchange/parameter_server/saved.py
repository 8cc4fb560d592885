"""Blocks in universal checkpoints: what a server has as pieces of global tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.errors import CheckpointError
from verbund.exchange.parameter_server.dense import Dense, Sum
from verbund.exchange.parameter_server.image import Store
from verbund.exchange.parameter_server.plan import Block
from verbund.exchange.parameter_server.server_optimizer import FirstState, ServerOptimizer
from verbund.exchange.parameter_server.tables import Table

_RUN = 1 << 22  # elements of a table at a time
_BORN = "parameter_server/born/"


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
    """Rows that nobody had changed are not read where they can be made."""
    table = Table(
        block, optimizer, None if block.born else torch.empty(block.length, dtype=getattr(torch, block.dtype))
    )
    name = _BORN + block.name
    born = None
    if block.born and name in checkpoint.names("exchange") and checkpoint.shape("exchange", name) == block.shape[:1]:
        born = checkpoint.read("exchange", name, block.offset[:1], block.length[:1])
    keys = _keys(block, checkpoint)
    moments = [key for key in keys if key in table.first.moments]
    numbers = {key: checkpoint.read("optimizer", f"{block.name}/{key}") for key in keys if key not in moments}
    for low, high in _runs(block):
        rows = torch.arange(low, high) if born is None else born[low:high].nonzero().view(-1) + low
        if not len(rows):
            continue
        offset, length = (block.offset[0] + low, *block.offset[1:]), (high - low, *block.length[1:])
        values = checkpoint.read("parameters", block.name, offset, length)[rows - low]
        state = {
            key: checkpoint.read("optimizer", f"{block.name}/{key}", offset, length)[rows - low] for key in moments
        }
        if table.lazy or state:
            table.put(rows, values, state)
        else:
            table.all_rows[low:high] = values
    if keys:
        table.put(torch.empty(0, dtype=torch.int64), None, numbers)
    return table


def _table_pieces(table: Table) -> Iterator[Piece]:
    block = table.block
    if block.born:
        name, shape, at, length = _BORN + block.name, block.shape[:1], block.offset[:1], block.length[:1]
        marks = table.stepped if table.lazy else torch.ones(length, dtype=torch.bool)
        yield Piece("exchange", name, shape, torch.bool, at, length, marks)
    stateless = not table.has_state and _whole(block)
    for low, high in _runs(block):
        rows = torch.arange(low, high)
        values = table.gather(rows) if table.lazy else table.all_rows[low:high]
        run = Block(
            block.name, block.shape, block.dtype, (block.offset[0] + low, *block.offset[1:]), tuple(values.shape)
        )
        yield _piece(run, "parameters", block.name, values)
        if not stateless:
            state = table.state(rows) if table.has_state else _before_the_first_step(run, table.first)
            yield from _state_pieces(run, table.first, state)


def _runs(block: Block) -> Iterator[tuple[int, int]]:
    step = max(_RUN // max(block.width, 1), 1)
    for low in range(0, block.length[0], step):
        yield low, min(low + step, block.length[0])


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


def _keys(block: Block, checkpoint: Checkpoint) -> list[str]:
    """What the checkpoint has of an optimiser's state of a tensor."""
    start = block.name + "/"
    names = [name.removeprefix(start) for name in checkpoint.names("optimizer") if name.startswith(start)]
    return [key for key in names if "/" not in key]


def _whole(block: Block) -> bool:
    return block.length == block.shape
