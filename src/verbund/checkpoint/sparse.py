"""Boxes of which only some rows are stored: the others are a function of their number, or all alike.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verbund.checkpoint.box import Box

_SEED = 1 << 64


@dataclass(frozen=True, slots=True)
class Filler:
    """What the rows hold that are not stored.

    Args:
        value: every element of them.
        born: seed and scale of `randomness.rows.born`, which makes them from their numbers; `value` is not used then.
    """

    value: float = 0.0
    born: tuple[int, float] | None = None

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {"value": self.value} if self.born is None else {"born": list(self.born)}


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Which rows of a box are stored.

    Args:
        key: in the box's file of their numbers in the global tensor: int64, ascending, each once.
        count: how many there are.
        filler: the others.
    """

    key: str
    count: int
    filler: Filler

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {"key": self.key, "count": self.count, **self.filler.record()}

    @staticmethod
    def of(record: Any, box: Box, shape: tuple[int, ...]) -> StoredRows:
        """What `record` gave.

        Raises:
            ValueError: if it gave something else, or the box cannot have such rows.
        """
        if not isinstance(record, dict):
            raise ValueError("rows that are no object")
        key, count, value, born = (record.get(name) for name in ("key", "count", "value", "born"))
        if not whole_rows(box, shape):
            raise ValueError(f"rows of the box {box}, which does not have whole rows")
        if not isinstance(key, str) or type(count) is not int or not 0 <= count <= box.length[0]:
            raise ValueError("rows without key or count")
        if born is None:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError("rows that do not say what the others hold")
            return StoredRows(key, count, Filler(float(value)))
        if not (isinstance(born, list) and len(born) == 2 and type(born[0]) is int and type(born[1]) in (int, float)):
            raise ValueError("rows that are born of no seed and scale")
        if not -_SEED < born[0] < _SEED or not math.isfinite(born[1]):
            raise ValueError("rows that are born of a seed or scale out of range")
        return StoredRows(key, count, Filler(born=(born[0], float(born[1]))))


def whole_rows(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box of a tensor of this shape has all columns."""
    return len(shape) > 0 and not any(box.offset[1:]) and box.length[1:] == shape[1:]
