"""The owner of a run's files, in this process, as processes of other hosts meet it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from verbund.cluster.file_service import FileService
from verbund.comm.files import ROLE
from verbund.comm.rendezvous import Listener, Meeting
from verbund.comm.wire import WireError


class Owner:
    """Lets in whoever knows the secret of `meeting`."""

    def __init__(self) -> None:
        self.service = FileService()
        self._listener = Listener(Meeting.at("127.0.0.1", 5.0))
        self.meeting = self._listener.meeting
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                accepted = self._listener.accept()
            except WireError:
                continue
            if accepted is not None:
                connection, role, _ = accepted
                assert role == ROLE
                self.service.serve(connection)

    def close(self) -> None:
        self._closing.set()
        self.service.close()
        self._listener.close()
        self._thread.join(15)


@contextmanager
def owner() -> Iterator[Owner]:
    one = Owner()
    try:
        yield one
    finally:
        one.close()
