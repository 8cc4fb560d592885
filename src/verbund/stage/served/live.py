"""The servers of a run that is being trained, for who is none of its processes: where they are, and how to read there.

What a reader must know lies in the run's folder while its coordinator listens, for this user alone: the address and, of
a training on several hosts, its secret.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from verbund.comm.wire import Closed, Connection, Credentials, Refused, Secret, dial
from verbund.errors import InputError
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.coordination import Coordination
from verbund.exchange.parameter_server.reader import Reader
from verbund.run import Run

_ADDRESS, _SECRET = "address", "secret"


def announce(run: Run, address: str, credentials: Credentials) -> None:
    """Says where the coordinator of a run listens; a later one takes an earlier one's place."""
    secret, beside = run.servers / _SECRET, run.servers / f"{_ADDRESS}.new"
    if isinstance(credentials, Secret) and not secret.exists():
        credentials.write(secret)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(address)
    os.replace(beside, run.servers / _ADDRESS)


def withdraw(run: Run) -> None:
    """Nobody listens any more."""
    for name in (_ADDRESS, _SECRET):
        (run.servers / name).unlink(missing_ok=True)


def reader(run: Run, deadline: float) -> tuple[Reader, Callable[[], None]]:
    """Reads from the servers of a run, which may have been started a moment ago; and what ends that.

    Raises:
        ClusterLost: if it is not being trained, or not any more.
        RunFailed: if no worker has built the model in time.
    """
    coordination = Coordination(lambda seconds: _connect(run, seconds), deadline)
    with ExitStack() as failed:
        failed.callback(coordination.close)
        plan, _ = coordination.plan()
        failed.pop_all()
    coordination.watch()
    client = Client(plan, None, 0, coordination, _credentials(run), deadline)

    def close() -> None:
        client.close()
        coordination.close()

    return Reader(plan, client), close


def _connect(run: Run, seconds: float) -> Connection:
    if not run.being_trained:
        raise Refused("the run is not being trained any more")
    try:
        address = (run.servers / _ADDRESS).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Closed("it does not listen yet") from None
    return dial(address, _credentials(run), seconds)


def _credentials(run: Run) -> Credentials:
    path = run.servers / _SECRET
    try:
        return Secret.read(path) if path.exists() else None
    except InputError:
        if not path.exists():  # training has ended in this moment
            raise Refused("the run is not being trained any more") from None
        raise
