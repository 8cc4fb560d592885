"""Watching the view: where servers' clients learn who holds what."""

from __future__ import annotations

import threading
from typing import Protocol

from verbund.exchange.parameter_server.view import View


class Watch(Protocol):
    """Has the newest view."""

    def newest(self) -> View:
        """The newest one that is known, without waiting."""

    def newer(self, than: int, seconds: float) -> View:
        """A view of a higher number than this; after so many seconds whichever is the newest."""


class Views:
    """A watch within one process: whoever learns of a view tells it.

    Args:
        view: the first one.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._changed = threading.Condition()

    def tell(self, view: View) -> None:
        """There is this view; an older one than what is known changes nothing."""
        with self._changed:
            if view.number > self._view.number:
                self._view = view
                self._changed.notify_all()

    def newest(self) -> View:
        """See `Watch`."""
        return self._view

    def newer(self, than: int, seconds: float) -> View:
        """See `Watch`."""
        with self._changed:
            self._changed.wait_for(lambda: self._view.number > than, max(seconds, 0.0))
            return self._view
