"""How the members of a group find and connect each other, by a store that all can reach."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Protocol

from verbund.comm.peer_lost import PeerLost
from verbund.comm.wire import Connection, Credentials, Deadline, WireError, dial, listen

_HELLO = "member"
_LOOK_SECONDS = 0.5


class Store(Protocol):
    """What torch's stores are, too. `get` waits for the key, with a deadline of its own."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def connect(
    store: Store, name: str, rank: int, world: int, address: str, credentials: Credentials, timeout: float
) -> dict[int, Connection]:
    """A connection to every other member: each dials those of lower rank.

    Raises:
        PeerLost: naming who did not come.
        InputError: if the address cannot be listened at.
    """
    deadline = time.monotonic() + timeout
    found: dict[int, Connection] = {}
    with closing(listen(address, credentials, stall=timeout)) as listener:
        store.set(f"{name}/{rank}", listener.address.encode())
        try:
            for other in range(rank):
                found[other] = _dialled(store, name, rank, other, credentials, deadline, timeout)
            while missing := [other for other in range(rank + 1, world) if other not in found]:
                left = max(0.0, deadline - time.monotonic())
                try:
                    connection = listener.accept(min(left, _LOOK_SECONDS))
                except Deadline:
                    if left > _LOOK_SECONDS:
                        _look(store, name, rank)
                        continue
                    names = ", ".join(map(str, missing))
                    raise PeerLost(
                        f"the members of {name} did not meet within {timeout:g} s: missing ranks {names}"
                    ) from None
                other = _who(connection, name, deadline)
                if other in missing:
                    found[other] = connection
                    connection.break_after(timeout)
                else:
                    connection.close()  # a stray
        except BaseException:
            for connection in found.values():
                connection.end()
                connection.close()
            raise
    return found


def _look(store: Store, name: str, rank: int) -> None:
    """Asks whether anybody waits still: the store says if the members are others by now."""
    try:
        store.check([f"{name}/{rank}"])
    except (RuntimeError, WireError) as error:
        raise PeerLost(f"the members of {name} did not meet: {error}") from error


def _dialled(
    store: Store, name: str, rank: int, other: int, credentials: Credentials, deadline: float, timeout: float
) -> Connection:
    try:
        address = store.get(f"{name}/{other}").decode()
        connection = dial(address, credentials, max(deadline - time.monotonic(), 1e-3), stall=timeout)
        connection.send(_HELLO, {"group": name, "rank": rank})
        connection.break_after(timeout)
    except (RuntimeError, LookupError, OSError, WireError) as error:  # what stores and wires raise
        raise PeerLost(f"rank {other} of {name} cannot be reached: {str(error).strip().splitlines()[0]}") from error
    return connection


def _who(connection: Connection, name: str, deadline: float) -> int:
    """The rank that a member of this group says it has; −1 for anybody else."""
    try:
        hello = connection.receive(max(deadline - time.monotonic(), 1e-3))
    except WireError:
        return -1
    rank = hello.fields.get("rank")
    return rank if hello.kind == _HELLO and hello.fields.get("group") == name and type(rank) is int else -1
