"""Earlier values of a block, for delay compensation: what a gradient was computed with is what its base tells.

Kept with the block and changed by pushes alone, so that every server that has the block compensates in the same way.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

_Entry = tuple[int, Tensor, Tensor | None]  # version, values before the step from it, rows


class History:
    """What steps have replaced, as far back as a client may ask.

    A client's base never falls, so what lies before all clients' last bases is forgotten; and in any case all but twice
    as many entries as there are clients, as one of them may be gone.

    Args:
        version: of the block, now.
    """

    def __init__(self, version: int) -> None:
        self._begin = version  # the oldest version that is known
        self._entries: deque[_Entry] = deque()
        self._bases: dict[int, int] = {}

    def replaced(self, version: int, values: Tensor, rows: Tensor | None = None) -> None:
        """Notes the values that a step from `version` is about to replace; they become the history's."""
        self._entries.append((version, values, rows))

    def seen(self, client: int, base: int) -> None:
        """Notes which version a client has computed with last, and forgets what nobody will ask for."""
        self._bases[client] = max(base, self._bases.get(client, 0))
        oldest, limit = min(self._bases.values()), 2 * len(self._bases)
        while self._entries and (self._entries[0][0] < oldest or len(self._entries) > limit):
            self._begin = max(self._begin, self._entries.popleft()[0] + 1)

    def at(self, base: int, now: Tensor, rows: Tensor | None = None) -> Tensor | None:
        """The values at a version.

        Args:
            base: the version.
            now: the values as they are.
            rows: of a table, which rows of it `now` has.

        Returns:
            Of the shape of `now`; None if they are not known any more.
        """
        if base < self._begin:
            return None
        after = [entry for entry in self._entries if entry[0] >= base]
        if rows is None:
            return after[0][1] if after else now
        found = now.clone()
        for _, values, replaced in reversed(after):
            assert replaced is not None
            if not len(replaced):
                continue
            at = torch.searchsorted(replaced, rows).clamp_(max=len(replaced) - 1)
            same = replaced[at] == rows
            found[same] = values[at[same]]
        return found

    def fields(self) -> dict[str, Any]:
        """As JSON values, all but tensors."""
        return {
            "begin": self._begin,
            "bases": sorted([client, base] for client, base in self._bases.items()),
            "entries": [[version, rows is not None] for version, _, rows in self._entries],
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        found = {f"{version}": values for version, values, _ in self._entries}
        return found | {f"{version}/rows": rows for version, _, rows in self._entries if rows is not None}

    @staticmethod
    def of(fields: dict[str, Any], tensors: dict[str, Tensor]) -> History:
        """What `fields` and `tensors` told of."""
        history = History(int(fields["begin"]))
        history._bases = {int(client): int(base) for client, base in fields["bases"]}
        for version, has_rows in fields["entries"]:
            rows = tensors[f"{version}/rows"] if has_rows else None
            history._entries.append((int(version), tensors[f"{version}"], rows))
        return history


def compensate(gradient: Tensor, now: Tensor, then: Tensor, strength: float) -> None:
    """g + λ·g·g·(w − w'), in place: the gradient at w' becomes about that at w (Zheng et al., "Asynchronous Stochastic
    Gradient Descent with Delay Compensation", 2017, eq. 10)."""
    gradient.add_((now - then).mul_(gradient).mul_(gradient), alpha=strength)
