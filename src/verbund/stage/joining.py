"""`verbund join`: this machine takes part in a run, as its arguments and its environment say."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from verbund.cluster import joining
from verbund.cluster.invitation import SECRET_FILE
from verbund.cluster.joining import Place
from verbund.comm.wire import Secret
from verbund.errors import InputError
from verbund.stage.before import notifier


@dataclass(frozen=True)
class Joined:
    """What became of it.

    Args:
        joined: the command's address; None: another process of this machine did it.
        slots: how many workers this machine took.
        text: for people.
    """

    joined: str | None
    slots: int
    text: str


def join(
    address: str | None,
    secret_file: Path | None,
    slots: int | None,
    *,
    own: str | None = None,
    within: float = 600.0,
    grace: float = 0.0,
    keep: Path | None = None,
    quiet: bool = True,
) -> Joined:
    """Takes part until the run is over; what is None is taken from the environment (`Place.of`).

    Args:
        address: the command's, `HOST:PORT`, or the path of the file that tells it.
        secret_file: with the run's secret.
        slots: how many workers this machine takes.
        own: this machine's address for the others.
        within: seconds until the command must be there, and need this machine.
        grace: seconds for which the first Ctrl-C or SIGTERM does not end it while the run needs this machine.
        keep: the folder in which this machine has task and data, even if it sees those of the command.
        quiet: nothing on standard error.

    Raises:
        InputError: if address or secret are missing or wrong, or the command refuses this machine.
        ClusterLost: if the command does not come in time or is lost.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    place = Place.of(os.environ)
    if place.local_rank:
        text = f"local rank {place.local_rank}: the process of local rank 0 joins with all slots of this machine"
        return Joined(None, 0, text)
    address = address or place.address
    if address is None:
        fix = "The command prints it; or start this by torchrun or srun, or set `VERBUND_JOIN`"
        raise InputError("HOST:PORT of the command is missing", where="arguments", fix=fix)
    file = secret_file or Path(os.environ.get(SECRET_FILE, ""))
    if not str(file) or file == Path():
        fix = f"The command says where its secret lies; give it as `--secret-file` or `{SECRET_FILE}`"
        raise InputError("the secret is missing", where="arguments", fix=fix)
    slots = place.slots if slots is None else slots
    if slots < 1:
        raise InputError("a machine that joins takes at least 1 worker", where="--slots")
    if within <= 0:
        raise InputError("must be greater than 0", where="--within")
    if grace < 0:
        raise InputError("must not be negative", where="--grace")
    if own is not None:
        _check(own)
    secret, tell = Secret.read(file), notifier(quiet)
    joining.join(address, secret, slots, rank=place.rank, own=own, within=within, grace=grace, keep=keep, tell=tell)
    return Joined(address, slots, "the run is over")


def _check(own: str) -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, own)
        except OSError:
            continue
        return
    raise InputError(f"`{own}` is no address", where="--address", fix="Give it in numbers, e.g. 10.0.0.2")
