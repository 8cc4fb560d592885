"""What can go wrong in a round of secure aggregation."""

from __future__ import annotations

from verbund.errors import RunFailed


class ServerCheated(RunFailed):
    """What the server sent would let it learn more than the sum, or is not of this round. The client has erased its
    secrets and reveals nothing."""


class ClientCheated(RunFailed):
    """A client's message is wrong; it no longer takes part in the round.

    Args:
        client: its name.
        what: what is wrong with what it sent.
    """

    def __init__(self, client: str, what: str) -> None:
        super().__init__(what, where=f"client {client}", fix="Ask who runs it; the others go on without it")
        self.client = client


class TooFewClients(RunFailed):
    """So few clients remain that their sum must not be shown, or cannot be had."""
