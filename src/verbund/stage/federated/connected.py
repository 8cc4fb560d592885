"""What a federated server knows of one client while its process lives."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from verbund.comm.wire import Connection, Replies


@dataclass
class Client:
    """Its connections, and what it has said over them."""

    replies: Replies
    connections: list[Connection] = field(default_factory=list)
    gone: float = field(default_factory=time.monotonic)
    """Since when it has no connection, if it has none."""
    joined: bool = False
    refuses: bool = False
    spent: bool = False
    """Whether its privacy budget is spent, so that it is asked for no more updates."""
    past: tuple[int, int] = (0, 0)
    """Bytes received and sent over connections that have ended."""

    @property
    def bytes(self) -> tuple[int, int]:
        """Received and sent, of whole messages."""
        living = self.connections
        return (
            self.past[0] + sum(connection.received_bytes for connection in living),
            self.past[1] + sum(connection.sent_bytes for connection in living),
        )
