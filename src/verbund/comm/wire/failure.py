"""What can go wrong on the wire."""

from __future__ import annotations


class WireError(Exception):
    """The peer sent what is no frame of ours, or too much; the connection is of no further use."""


class Closed(WireError):
    """The peer closed the connection, or there is none."""


class Deadline(WireError):
    """Nothing, or not everything, arrived in time."""


class Refused(WireError):
    """The two ends do not trust each other: another secret, another authority, no credentials."""
