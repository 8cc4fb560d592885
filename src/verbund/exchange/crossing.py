"""What islands that train alone ask before they go on together, where one that is lost or late is left out."""

from __future__ import annotations

from typing import Protocol


class Crossing(Protocol):
    """The border between islands, as `LocalSteps` needs it."""

    def gather(self, step: int, joins: bool) -> None:
        """All that take part meet, before an exchange; if they are others than before, `LocalSteps.regroup` has been
        called when it returns, and what was under way begins again among them.

        Args:
            step: how many are done.
            joins: whether others may come back here.
        """
        ...

    def waits(self, step: int) -> None:
        """This worker has come to where an exchange arrives."""
        ...

    def agree(self, what: str, step: int, ok: bool) -> bool:
        """Whether what was done together is done, by all: then it counts.

        Args:
            what: it is, the same for all.
            step: how many are done.
            ok: whether it is done as far as this worker knows.
        """
        ...
