"""The error of a collective whose other members do not go on."""

from __future__ import annotations

from verbund.errors import ClusterLost


class PeerLost(ClusterLost):
    """A collective broke off because another process is gone or did not come."""
