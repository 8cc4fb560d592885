"""The ledger of a block: which shares of which tickets it has, so that nothing is taken twice."""

from __future__ import annotations

from typing import Any


class Ledger:
    """Every share of the tickets below `low`, and of later tickets those that were added.

    Args:
        shares: into how many a ticket is divided.
        low: all tickets below count as there.
    """

    def __init__(self, shares: int = 1, low: int = 0) -> None:
        self.low = low
        self._shares = shares
        self._later: dict[int, set[int]] = {}

    def __contains__(self, key: tuple[int, int]) -> bool:
        ticket, share = key
        return ticket < self.low or share in self._later.get(ticket, ())

    def add(self, ticket: int, share: int) -> bool:
        """Notes a share; False if it was there."""
        if (ticket, share) in self:
            return False
        self._later.setdefault(ticket, set()).add(share)
        self._close()
        return True

    def forget(self, low: int) -> None:
        """From now on every share of the tickets below `low` counts as there."""
        if low <= self.low:
            return
        self.low = low
        for ticket in [ticket for ticket in self._later if ticket < low]:
            del self._later[ticket]
        self._close()

    def record(self) -> dict[str, Any]:
        """As JSON values; equal ledgers have equal records."""
        later = [[ticket, *sorted(self._later[ticket])] for ticket in sorted(self._later)]
        return {"low": self.low, "later": later}

    @staticmethod
    def of(record: dict[str, Any], shares: int = 1) -> Ledger:
        """The ledger that `record` gave."""
        ledger = Ledger(shares, int(record["low"]))
        ledger._later = {int(ticket): set(map(int, found)) for ticket, *found in record["later"]}
        return ledger

    def _close(self) -> None:
        """Raises the low-water mark over tickets that are there whole."""
        while len(self._later.get(self.low, ())) == self._shares:
            del self._later[self.low]
            self.low += 1
