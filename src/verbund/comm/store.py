"""The store through which the workers of a generation find each other: torch's interface over the wire.

torch's own TCPStore listens on all interfaces and asks nobody for a secret; this one lives in the supervisor, and is
reached over the connection that a worker has to it anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed

from verbund.comm.wire import Array, Deadline, Message, WireError

Ask = Callable[[str, dict[str, Any], dict[str, Array], float], Message]
"""Asks the supervisor: kind, fields, arrays, seconds until there must be an answer."""

# Of which its stubs do not know.
_Base: Any = torch.distributed.Store  # type: ignore[attr-defined]
_SECONDS = 60.0


class Store(_Base):  # type: ignore[misc]
    """Keys and values in the supervisor.

    Args:
        ask: how it is asked.
        name: of this store among others there.
        timeout: seconds that a wait for a key may take where nobody says.
        once: that what is `set` under a key stays so. Who waits for one value then gets with it all those that it has
            not got yet, so that each of n workers that meet asks a few times, and not 2 n.
    """

    def __init__(self, ask: Ask, name: str, timeout: float, once: bool = False) -> None:
        super().__init__()
        self._ask, self._name, self._timeout, self._once = ask, name, timeout, once
        self._seen: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._asked("set", [key], value)

    def get(self, key: str) -> bytes:
        if key not in self._seen:
            answer = self._asked("get", [key], timeout=self._timeout)
            self._learn(answer)
            return self._value(answer)
        return self._seen[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if missing := [key for key in keys if key not in self._seen]:
            seconds = self._timeout if timeout is None else timeout.total_seconds()
            self._learn(self._asked("wait", missing, timeout=seconds))

    def check(self, keys: list[str]) -> bool:
        return bool(self._asked("check", keys).fields["found"])

    def add(self, key: str, amount: int) -> int:
        return int(self._asked("add", [key], amount=amount).fields["sum"])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._value(self._asked("compare_set", [key], desired, expected))

    def delete_key(self, key: str) -> bool:
        return bool(self._asked("delete", [key]).fields["found"])

    def num_keys(self) -> int:
        return int(self._asked("count", []).fields["count"])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def _asked(
        self,
        what: str,
        keys: list[str],
        value: bytes | str | None = None,
        expected: bytes | str | None = None,
        timeout: float = _SECONDS,
        amount: int = 0,
    ) -> Message:
        arrays = {
            name: _array(given) for name, given in (("value", value), ("expected", expected)) if given is not None
        }
        fields = {"store": self._name, "what": what, "keys": keys, "amount": amount}
        if self._once:
            fields["seen"] = len(self._seen)
        try:
            return self._ask("store", fields, arrays, timeout)
        except Deadline:
            raise RuntimeError(f"nobody has said {', '.join(keys)} within {timeout:.0f} s") from None
        except WireError as error:
            raise RuntimeError(f"the supervisor is gone: {error}") from None

    def _learn(self, answer: Message) -> None:
        for number, key in enumerate(answer.fields.get("said", ())):
            self._seen[key] = bytes(answer.arrays[str(number)].tobytes())

    @staticmethod
    def _value(answer: Message) -> bytes:
        return bytes(answer.arrays["value"].tobytes())


def _array(value: bytes | str) -> Array:
    return np.frombuffer(value.encode() if isinstance(value, str) else bytes(value), np.uint8)
