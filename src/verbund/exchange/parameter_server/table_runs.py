"""Which blocks the rows of a table lie in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verbund.errors import InputError
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Part


class TableRuns:
    """The runs of rows of all tables of a plan.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._runs: dict[str, list[int]] = {}
        for number, block in enumerate(plan.blocks):
            if block.kind == "rows":
                self._runs.setdefault(block.name, []).append(number)
        for runs in self._runs.values():
            runs.sort(key=lambda number: plan.blocks[number].offset[0])
        self._ends = {
            name: torch.tensor([plan.blocks[n].offset[0] + plan.blocks[n].length[0] for n in runs])
            for name, runs in self._runs.items()
        }

    def width(self, table: str) -> int:
        """Elements of a row."""
        return self._plan.blocks[self._of(table)[0]].width

    def dtype(self, table: str) -> torch.dtype:
        """Of the values."""
        found = getattr(torch, self._plan.blocks[self._of(table)[0]].dtype)
        assert isinstance(found, torch.dtype)
        return found

    def split(self, table: str, rows: Tensor) -> list[tuple[int, int, int]]:
        """Blocks, with the first and the last but one place in `rows` of those that lie in them.

        Args:
            table: its name.
            rows: int64, ascending.

        Raises:
            InputError: if there is no such table, or rows lie outside of it.
        """
        runs, ends = self._of(table), self._ends[table]
        if not len(rows):
            return []
        first = self._plan.blocks[runs[0]].offset[0]
        if int(rows[0]) < first or int(rows[-1]) >= int(ends[-1]):
            wrong = int(rows[0]) if int(rows[0]) < first else int(rows[-1])
            raise InputError(f"the table has no row {wrong}; it has {int(ends[-1])}", where=table)
        places = [0, *torch.searchsorted(rows, ends).tolist()]
        return [(run, low, high) for run, low, high in zip(runs, places, places[1:], strict=False) if low < high]

    def parts(self, table: str, rows: Tensor, values: Tensor, versions: Mapping[int, int]) -> list[Part]:
        """The gradient of a table as parts of a push.

        Args:
            table: its name.
            rows: int64, ascending, each once.
            values: [len(rows), width].
            versions: by block, those that the gradient was computed with.
        """
        return [
            Part(block, versions.get(block, 0), values[low:high].reshape(-1), rows[low:high])
            for block, low, high in self.split(table, rows)
        ]

    def _of(self, table: str) -> list[int]:
        if table not in self._runs:
            raise InputError(f"the model has no table `{table}`")
        return self._runs[table]
