"""Collectives over the wire, for links that are slow or not trusted: each two members are joined by a connection."""

from verbund.comm.ring.group import WireGroup
from verbund.comm.ring.meeting import Store

__all__ = ["Store", "WireGroup"]
