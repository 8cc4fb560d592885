"""Keys and values through which processes find each other; the supervisor's side of `comm.store`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verbund.comm.wire import Array, Connection, Message, WireError

_NOTHING = np.empty(0, np.uint8)
_KEYS = 100_000
_BYTES = 1 << 26
_AT_ONCE = 64
"""No answer tells more values than so many."""


@dataclass(frozen=True)
class _Waiting:
    connection: Connection
    number: int
    keys: list[str]
    wants_value: bool
    seen: int | None
    """How many of the values that were set the asker has got, if they stay as they are."""


class Keys:
    """All stores of a run, by name. Whoever asks for what is not there yet is answered when it is."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Array]] = {}
        self._said: dict[str, list[str]] = {}
        """The keys that were set, in order; not those that are counted or compared, whose values change."""
        self._waiting: dict[str, list[_Waiting]] = {}
        self._bytes = 0

    def answer(self, connection: Connection, message: Message) -> None:
        """Answers a process, now or when there is what it asks for."""
        fields, arrays = message.fields, message.arrays
        name, keys, number = str(fields["store"]), [str(key) for key in fields["keys"]], int(fields["number"])
        values = self._values.setdefault(name, {})
        known = all(key in values for key in keys)
        match fields["what"]:
            case "get" | "wait" as what:
                waiting = _Waiting(connection, number, keys, what == "get", fields.get("seen"))
                if known:
                    self._reply(waiting, name)
                else:
                    self._waiting.setdefault(name, []).append(waiting)
            case "set":
                if not known:
                    self._said.setdefault(name, []).append(keys[0])
                self._put(name, keys[0], arrays["value"])
                _send(connection, number)
            case "add":
                now = int(values[keys[0]].tobytes() if known else b"0") + int(fields["amount"])
                self._put(name, keys[0], np.frombuffer(str(now).encode(), np.uint8))
                _send(connection, number, {"sum": now})
            case "check":
                _send(connection, number, {"found": known})
            case "compare_set":
                self._compare_set(name, keys[0], message)
                _send(connection, number, value=values.get(keys[0], arrays["expected"]))
            case "delete":
                former = values.pop(keys[0], None)
                self._bytes -= len(keys[0]) + former.nbytes if former is not None else 0
                _send(connection, number, {"found": former is not None})
            case "count":
                _send(connection, number, {"count": len(values)})
            case other:
                raise ValueError(f"a store cannot {other}")

    def forget(self, name: str) -> None:
        """Nobody asks a store for anything any more."""
        values = self._values.pop(name, {})
        self._said.pop(name, None)
        self._waiting.pop(name, None)
        self._bytes -= sum(len(key) + value.nbytes for key, value in values.items())

    def forget_eras(self, what: str, before: int) -> None:
        """Nobody asks the stores `WHAT/ERA/…` of earlier eras for anything any more."""
        for name in {*self._values, *self._waiting}:
            first, _, rest = name.partition("/")
            if first == what and int(rest.partition("/")[0]) < before:
                self.forget(name)

    def _compare_set(self, name: str, key: str, message: Message) -> None:
        expected, present = message.arrays["expected"], self._values[name].get(key)
        if (present is None and not expected.size) or (present is not None and np.array_equal(present, expected)):
            self._put(name, key, message.arrays["value"])

    def _put(self, name: str, key: str, value: Array) -> None:
        values = self._values[name]
        former = values.get(key)
        self._bytes += value.nbytes + len(key) if former is None else value.nbytes - former.nbytes
        if len(values) >= _KEYS or self._bytes > _BYTES:
            raise ValueError(f"the store has more than {_KEYS} keys or {_BYTES} bytes")
        values[key] = value
        if waiting := self._waiting.pop(name, None):
            still = []
            for one in waiting:
                if all(key in values for key in one.keys):
                    self._reply(one, name)
                else:
                    still.append(one)
            self._waiting[name] = still

    def _reply(self, waiting: _Waiting, name: str) -> None:
        values = self._values[name]
        value = values[waiting.keys[0]] if waiting.wants_value else _NOTHING
        said: list[str] = []
        if waiting.seen is not None:
            said = [key for key in self._said.get(name, [])[waiting.seen :] if key in values][:_AT_ONCE]
        found = {str(number): values[key] for number, key in enumerate(said)}
        _send(waiting.connection, waiting.number, {"said": said}, value=value, **found)


def _send(connection: Connection, number: int, fields: dict[str, object] | None = None, **arrays: Array) -> None:
    try:
        connection.send("answer", {"number": number, **(fields or {})}, None, **arrays)
    except WireError:
        return  # its exit is on the way
