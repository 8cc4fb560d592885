"""What may be wrong with a push."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from verbund.checkpoint.piece import dtype_name
from verbund.errors import InputError
from verbund.exchange.parameter_server.plan import Block, Rule
from verbund.exchange.parameter_server.push import Part, Push

_AHEAD = 16  # tickets beyond the bound that a share may come early by: a client need not have read every block
_OUTSTANDING = 1 << 20


def check_beginning(number: int, block: Block, values: Tensor | None, optimizer: Mapping[str, Tensor]) -> None:
    """What a block begins with.

    Args:
        number: of the block.
        block: which.
        values: its first values; None: they are to be made.
        optimizer: what an optimiser had of it elsewhere, by torch's keys.

    Raises:
        InputError: saying what is wrong.
    """
    where = f"block {number} (`{block.name}`)"
    wanted = f"{block.dtype} {list(block.length)}"
    if values is None and not (block.kind == "rows" and block.born):
        raise InputError(f"{where} begins without values")
    if values is not None and (values.numel() != block.count or dtype_name(values.dtype) != block.dtype):
        raise InputError(f"{where} is {wanted}, and begins with {dtype_name(values.dtype)} {list(values.shape)}")
    if block.kind != "sum" and not getattr(torch, block.dtype).is_floating_point:
        raise InputError(f"{where} holds {block.dtype}, which no optimiser steps")
    for key, state in optimizer.items():
        if state.dim() and (state.numel() != block.count or dtype_name(state.dtype) != block.dtype):
            what = f"{dtype_name(state.dtype)} {list(state.shape)}"
            raise InputError(f"{where} is {wanted}, and its optimiser's `{key}` is {what}")


def check_head(push: Push, rule: Rule) -> None:
    """All but the parts.

    Raises:
        InputError: saying what is wrong.
    """
    for name in ("ticket", "share", "low", "client", "generation"):
        value = getattr(push, name)
        if type(value) is not int or value < 0:
            raise _wrong(push, f"`{name}` is {value!r}, and a whole number from 0 on is needed")
    for name in ("scale", "weight", "rate"):
        value = getattr(push, name)
        if type(value) not in (int, float) or not math.isfinite(value) or (value < 0 and name != "scale"):
            raise _wrong(push, f"`{name}` is {value!r}")
    if push.share >= rule.shares:
        raise _wrong(push, f"share {push.share} of a ticket that is divided into {rule.shares}")
    numbers = [part.block for part in push.parts]
    if len(set(numbers)) != len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise _wrong(push, f"it has block {twice} twice")


def check_part(push: Push, part: Part, block: Block, version: int, low: int, rule: Rule) -> None:
    """One part.

    Args:
        push: it is of.
        part: see above.
        block: that it is for.
        version: of the block.
        low: below it the block has all tickets.
        rule: of the plan.

    Raises:
        InputError: saying what is wrong.
    """
    where = f"block {part.block} (`{block.name}`)"
    furthest = version + rule.staleness + _AHEAD if rule.shared else max(low, push.low) + _OUTSTANDING
    if push.ticket > furthest:
        raise _wrong(push, f"{where} is at ticket {version if rule.shared else low}, which is too far behind")
    if type(part.base) is not int or not 0 <= part.base <= version:
        raise _wrong(push, f"{where} is at version {version}, and the gradient is said to be of {part.base!r}")
    if part.rows is not None and block.kind != "rows":
        raise _wrong(push, f"{where} is no table, and rows of it are named")
    if part.values is None:
        if part.rows is not None and len(part.rows):
            raise _wrong(push, f"{where}: there are rows, but no values")
        return
    count = block.count
    if block.kind == "rows":
        if part.rows is None:
            raise _wrong(push, f"{where} is a table, and no rows of it are named")
        count = len(part.rows) * block.width
        if wrong := wrong_rows(part.rows, block, ascending=True):
            raise _wrong(push, f"{where}: {wrong}")
    if dtype_name(part.values.dtype) != block.dtype:
        raise _wrong(push, f"{where} has dtype {block.dtype}, and the values have {dtype_name(part.values.dtype)}")
    if part.values.dim() != 1 or len(part.values) != count:
        raise _wrong(push, f"{where}: {count} values in a row are needed, and there are {list(part.values.shape)}")
    if not part.values.is_floating_point():
        if push.scale != int(push.scale):
            raise _wrong(push, f"{where} holds whole numbers, and they are scaled by {push.scale!r}")
    elif not _finite(part.values):
        raise _wrong(push, f"{where}: not all values are finite")


def wrong_rows(rows: Tensor, block: Block, ascending: bool = False) -> str | None:
    """What is wrong with numbers of rows of a table."""
    if rows.dtype != torch.int64 or rows.dim() != 1:
        return f"rows are named by int64 numbers in a row, not by {dtype_name(rows.dtype)} {list(rows.shape)}"
    if not len(rows):
        return None
    low, high = block.offset[0], block.offset[0] + block.length[0]
    if ascending and not bool((rows[1:] > rows[:-1]).all()):
        return "rows are not ascending, each once"
    first, last = (int(rows[0]), int(rows[-1])) if ascending else (int(rows.min()), int(rows.max()))
    if first < low or last >= high:
        return f"row {first if first < low else last} is not among its rows, {low} to {high - 1}"
    return None


def _finite(values: Tensor) -> bool:
    """One reduction; a sum of finite values may overflow, and then every value is looked at."""
    return math.isfinite(values.sum()) or bool(values.isfinite().all())


def _wrong(push: Push, what: str) -> InputError:
    return InputError(what, where=f"push of ticket {push.ticket}, share {push.share}, by client {push.client}")
