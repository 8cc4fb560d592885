"""The shares of a ticket that has not been taken yet, added up in the order of the shares, whenever they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_Share = tuple[Tensor, Tensor | None, float]  # values, rows, scale


def scaled(values: Tensor, factor: float, buffer: Tensor | None) -> Tensor:
    """values · factor, in that memory if there is some; of whole numbers the factor is one too."""
    return torch.mul(values, factor if values.is_floating_point() else int(factor), out=buffer)


class Ticket:
    """What has come of one ticket of one block.

    Of whole blocks there is one running sum as long as the shares come in order; one that comes too early is kept.

    Args:
        rate: factor on the learning rates of its step.
        buffer: memory that the sum may have, flat.
    """

    def __init__(self, rate: float, buffer: Tensor | None = None) -> None:
        self.rate = rate
        self.norm: float | None = None
        """Of the whole model's gradient, where that is what the ticket waits for."""
        self._buffer = buffer
        self._weights: dict[int, float] = {}
        self._summed = 0  # shares below it are in the sum
        self._sum: Tensor | None = None
        self._kept: dict[int, _Share] = {}

    def __len__(self) -> int:
        """How many shares have come."""
        return len(self._weights)

    @property
    def shares(self) -> set[int]:
        """Those that have come."""
        return set(self._weights)

    @property
    def weight(self) -> float:
        """Of all shares that have come."""
        return sum(self._weights[share] for share in sorted(self._weights))

    def add(self, share: int, values: Tensor | None, rows: Tensor | None, scale: float, weight: float) -> None:
        """Takes a share. Its tensors are not kept; None adds its weight alone."""
        self._weights[share] = weight
        if values is not None:
            if rows is None and share == self._summed:
                self._add(values, scale)
            else:
                self._kept[share] = (values.clone(), None if rows is None else rows.clone(), scale)
        while self._summed in self._weights:
            early = self._kept.get(self._summed)
            if early is not None:
                if early[1] is not None:
                    break  # rows are added up at the end: each share has its own
                self._add(early[0], early[2])
                del self._kept[self._summed]
            self._summed += 1

    def total(self) -> tuple[Tensor | None, Tensor | None]:
        """The sum of values · scale, and of a table the rows that it is of; None if no share has values. It may be this
        ticket's own memory: whoever changes it, or asks before all shares that count have come, ends this."""
        ordered = [self._kept[share] for share in sorted(self._kept)]
        if ordered and ordered[0][1] is not None:
            return _rows_total(ordered)
        for values, _, scale in ordered:  # shares before these are not waited for
            self._add(values, scale)
        self._kept.clear()
        return self._sum, None

    def square(self) -> float:
        """The squared norm of the mean gradient, once all shares that count have come; 0 if nothing was learnt."""
        total, _ = self.total()
        if total is None or not self.weight:
            return 0.0
        return (float(torch.linalg.vector_norm(total)) / self.weight) ** 2

    def fields(self) -> dict[str, Any]:
        """As JSON values, all but tensors."""
        kept = [[share, scale, rows is not None] for share, (_, rows, scale) in sorted(self._kept.items())]
        return {
            "rate": self.rate,
            "weights": [[share, self._weights[share]] for share in sorted(self._weights)],
            "summed": self._summed,
            "kept": kept,
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        found = {} if self._sum is None else {"sum": self._sum}
        for share, (values, rows, _) in self._kept.items():
            found[f"{share}"] = values
            if rows is not None:
                found[f"{share}/rows"] = rows
        return found

    @staticmethod
    def of(fields: dict[str, Any], tensors: dict[str, Tensor]) -> Ticket:
        """What `fields` and `tensors` told of."""
        ticket = Ticket(float(fields["rate"]))
        ticket._weights = {int(share): float(weight) for share, weight in fields["weights"]}
        ticket._summed = int(fields["summed"])
        ticket._sum = tensors.get("sum")
        for share, scale, has_rows in fields["kept"]:
            rows = tensors[f"{share}/rows"] if has_rows else None
            ticket._kept[int(share)] = (tensors[f"{share}"], rows, float(scale))
        return ticket

    def _add(self, values: Tensor, scale: float) -> None:
        if self._sum is None:
            self._sum = scaled(values, scale, self._buffer)
        else:
            self._sum.add_(values, alpha=scale if values.is_floating_point() else int(scale))


def _rows_total(shares: list[_Share]) -> tuple[Tensor, Tensor]:
    """The sum of shares of a table, over all rows that one of them has."""
    every = [rows for _, rows, _ in shares if rows is not None]
    if len(every) == 1:
        return shares[0][0] * shares[0][2], every[0]
    rows = torch.unique(torch.cat(every))
    total: Tensor | None = None
    for (values, _, scale), own in zip(shares, every, strict=True):
        values = values.view(len(own), -1) if len(own) else values.view(0, 0)
        if not len(own):
            continue
        if total is None:
            total = values.new_zeros((len(rows), values.shape[1]))
        total.index_add_(0, torch.searchsorted(rows, own), values, alpha=scale)
    return (shares[0][0] if total is None else total.view(-1)), rows
