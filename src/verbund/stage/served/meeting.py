"""Where the processes of a run with servers listen, and how they find each other."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from verbund.cluster.worker import Worker
from verbund.comm.store import Store
from verbund.comm.wire import Connection, Credentials, Deadline, Listener, WireError, dial, listen
from verbund.comm.wire.address import Tcp
from verbund.exchange.parameter_server.coordination import Coordination

_COORDINATOR = "coordinator"
_TURN = 1.0


def credentials(worker: Worker) -> Credentials:
    """What the processes of a run prove to each other: in the private folder of one machine nothing."""
    return worker.meeting.secret


def listener(worker: Worker) -> Listener:
    """Where this process listens: a name of its own in the private folder of the command, which may make so many runs
    that process numbers come again, or a port of its host."""
    spec, folder = worker.spec, worker.meeting.folder
    if folder is not None:
        return listen(f"unix:{folder / f'{spec.role}-{spec.rank}-{secrets.token_hex(4)}'}")
    return listen(str(Tcp(worker.address, 0)), credentials(worker))


def publish(worker: Worker, address: str, timeout: float) -> None:
    """Tells all where the coordinator is now."""
    Store(worker.ask, "servers", timeout).set(_COORDINATOR, address)


def coordination(worker: Worker, deadline: float) -> Coordination:
    """A line to the coordinator, wherever it is."""
    store, trust = Store(worker.ask, "servers", deadline), credentials(worker)

    def connect(seconds: float) -> Connection:
        return dial(bytes(store.get(_COORDINATOR)).decode(), trust, seconds)

    return Coordination(connect, deadline)


def accept(listening: Listener, serve: Callable[[Connection], None]) -> None:
    """Serves each connection in a thread of its own, until the listener is closed."""

    def accepting() -> None:
        while True:
            try:
                connection = listening.accept(_TURN)
            except Deadline:
                continue
            except WireError:
                return
            threading.Thread(target=serve, args=(connection,), name="serving", daemon=True).start()

    threading.Thread(target=accepting, name="accepting", daemon=True).start()
