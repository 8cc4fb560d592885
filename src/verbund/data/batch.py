"""What a loader is asked for, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verbund.data.samples import Ids, Samples


@dataclass(frozen=True)
class Item:
    """One micro-batch to read: the samples `ids` of global batch `ticket`.

    A phantom has a sample only so that the worker can take part in collectives; it weighs nothing.
    """

    ticket: int
    ids: Ids
    phantom: bool = False
    training: bool = True


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `columns` by name, dimension 0 being the sample, in the order of `ids`."""

    ticket: int
    ids: Ids
    columns: dict[str, Tensor]
    phantom: bool = False

    def with_columns(self, columns: dict[str, Tensor]) -> Batch:
        """The same batch with other columns."""
        return replace(self, columns=columns)


Transform = Callable[[Batch], Batch]


def read(samples: Samples, item: Item, transform: Transform | None) -> Batch:
    """Reads one item here and now; its tensors share their memory with the arrays that were read."""
    rows = samples.source.rows(item.ids, item.ticket if item.training else None)
    batch = Batch(item.ticket, item.ids, {name: torch.from_numpy(value) for name, value in rows.items()}, item.phantom)
    return transform(batch) if transform is not None else batch
