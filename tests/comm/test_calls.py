"""Requests are done once, whatever is lost on the way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from verbund.comm.wire import (
    Calls,
    Closed,
    Connection,
    Deadline,
    Listener,
    Message,
    Refused,
    Replies,
    Reply,
    Secret,
    WireError,
    dial,
    listen,
    replies,
)
from verbund.errors import DataError, RunFailed

SECRET = Secret.create()
Faults = Callable[[str], bool]


class Server:
    """Adds up what is pushed. `faults(when)` says whether the connection breaks before or after a request is done."""

    def __init__(self, faults: Faults = lambda when: False, **limits: Any) -> None:
        self.total = np.zeros(4)
        self.done: list[int] = []
        self.faults = faults
        self.listener: Listener = listen("tcp:127.0.0.1:0", SECRET)
        self.replies = Replies(self.handle, **limits)
        self.connections: list[Connection] = []
        self.threads: list[threading.Thread] = []
        self.thread = threading.Thread(target=self.accept)
        self.thread.start()

    def handle(self, message: Message) -> Reply:
        number = message.fields.get("number", 0)
        if message.kind == "pull":
            return Reply("values", arrays={"x": self.total.copy()}, keep=False)
        if message.kind == "bad":
            raise DataError("no such block", where="block 7")
        if message.kind == "broken":
            raise KeyError("x")
        if message.kind == "slow":
            time.sleep(message.fields["seconds"])
        self.done.append(number)
        self.total += message.arrays["x"]
        return Reply("pushed", {"version": len(self.done)}, {"x": self.total.copy()})

    def accept(self) -> None:
        while True:
            try:
                connection = self.listener.accept(None)
            except Closed:
                return
            self.connections.append(connection)
            thread = threading.Thread(target=self.serve, args=(connection,))
            thread.start()
            self.threads.append(thread)

    def serve(self, connection: Connection) -> None:
        try:
            while True:
                message = connection.receive(None)
                if self.faults("before"):
                    break
                if self.faults("after"):
                    connection.end()
                self.replies.answer(connection, message)
        except WireError:
            pass
        connection.end()
        connection.close()

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.end()
        for thread in [self.thread, *self.threads]:
            thread.join(10.0)
            assert not thread.is_alive()


@contextmanager
def serving(faults: Faults = lambda when: False, **limits: Any) -> Iterator[tuple[Server, Calls]]:
    server = Server(faults, **limits)
    calls = Calls(lambda seconds: dial(server.listener.address, SECRET, seconds), "the server")
    try:
        yield server, calls
    finally:
        calls.close()
        server.close()


def test_answers_come_into_places() -> None:
    with serving() as (_, calls):
        answer = calls.ask("push", {"number": 3}, 5.0, x=np.ones(4))
        assert (answer.kind, answer.fields, answer.arrays["x"].tolist()) == ("pushed", {"version": 1}, [1.0] * 4)
        place = np.zeros(4)
        assert calls.ask("pull", None, 5.0, {"x": place}).placed == {"x"}
        assert place.tolist() == [1.0] * 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_is_done_once(seed: int) -> None:
    """Requests, and answers, are lost with their connections; each push counts once."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def faults(when: str) -> bool:
        with lock:
            return chance.random() < 0.15

    with serving(faults) as (server, calls):
        under_way = [calls.start("push", {"number": number}, 30.0, x=np.full(4, 1.0)) for number in range(60)[:20]]
        for number in range(20, 60):
            under_way.append(calls.start("push", {"number": number}, 30.0, x=np.full(4, 1.0)))
            under_way.pop(0).result()
        for call in under_way:
            call.result()
        assert sorted(server.done) == list(range(60))
        assert server.total.tolist() == [60.0] * 4
        assert len(server.connections) > 3


def test_a_repeat_while_it_is_being_done() -> None:
    """The answer goes to the newest connection, and the work is done once."""
    with serving() as (server, calls):
        call = calls.start("slow", {"seconds": 0.3, "number": 1}, 10.0, x=np.ones(4))
        time.sleep(0.1)
        server.connections[0].end()
        assert call.result().fields == {"version": 1}
        assert server.done == [1]


def test_errors_of_the_other_side() -> None:
    with serving() as (_, calls):
        with pytest.raises(DataError, match="no such block") as caught:
            calls.ask("bad", None, 5.0)
        assert caught.value.where == "block 7"
        with pytest.raises(RunFailed, match="KeyError"):
            calls.ask("broken", None, 5.0)
        assert calls.ask("pull", None, 5.0).kind == "values"


def test_deadlines() -> None:
    with serving() as (server, calls):
        with pytest.raises(Deadline, match="the server did not answer in time"):
            calls.ask("slow", {"seconds": 0.5}, 0.1, x=np.ones(4))
        assert calls.ask("pull", None, 5.0).kind == "values"
        server.close()
        start = time.monotonic()
        with pytest.raises(Deadline, match="nobody listens"):
            calls.ask("pull", None, 0.5)
        assert time.monotonic() - start < 2.0


def test_the_other_side_stands_still() -> None:
    """Silence is not for ever: what is under way goes over a new connection."""
    with serving() as (server, _):
        silent: list[Connection] = []

        def connect(seconds: float) -> Connection:
            if not silent:
                silent.append(dial(quiet.address, SECRET, seconds))
                return silent[0]
            return dial(server.listener.address, SECRET, seconds)

        quiet = listen("tcp:127.0.0.1:0", SECRET)
        calls = Calls(connect, "the server", patience=0.3)
        assert calls.ask("push", None, 5.0, x=np.ones(4)).fields == {"version": 1}
        calls.close()
        quiet.close()


def test_another_secret() -> None:
    with serving() as (server, _):
        calls = Calls(lambda seconds: dial(server.listener.address, Secret.create(), seconds), "the server")
        with pytest.raises(Refused):
            calls.ask("pull", None, 5.0)
        calls.close()


def test_what_is_under_way_is_bounded() -> None:
    with serving() as (server, _):
        calls = Calls(
            lambda seconds: dial(server.listener.address, SECRET, seconds), "the server", window=2, window_bytes=100
        )
        first = calls.start("slow", {"seconds": 0.3}, 5.0, x=np.ones(4))
        calls.start("slow", {"seconds": 0.3}, 5.0, x=np.ones(4))
        with pytest.raises(Deadline, match="took no more requests"):
            calls.start("slow", {"seconds": 0.3}, 0.1, x=np.ones(4))
        first.result()
        calls.close()
        with pytest.raises(Closed):
            calls.ask("pull", None, 1.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_thread_s_requests_are_done_in_order(seed: int) -> None:
    """Also those that are started while earlier ones are sent again over a new connection."""
    with serving() as (server, _):
        chance = random.Random(seed)
        for _ in range(20):
            del server.done[:]
            calls = Calls(lambda seconds: dial(server.listener.address, SECRET, seconds), "the server")
            under_way = []
            for number in range(30):
                under_way.append(calls.start("push", {"number": number}, 10.0, x=np.ones(4)))
                time.sleep(chance.choice([0.0, 0.0, 0.001]))
            for call in under_way:
                call.result()
            assert server.done == list(range(30))
            calls.close()


def test_waiting_a_while() -> None:
    with serving() as (_, calls):
        call = calls.start("slow", {"seconds": 0.2, "number": 1}, 5.0, x=np.ones(4))
        assert not call.wait(0.02)
        assert call.wait(5.0)
        assert call.result().fields == {"version": 1}
        late = calls.start("slow", {"seconds": 0.3}, 0.05, x=np.ones(4))
        assert late.wait(5.0)
        with pytest.raises(Deadline):
            late.result()


def test_giving_up() -> None:
    """What was given up gives its room to others, and its place stays as it is."""
    with serving() as (server, _):
        calls = Calls(lambda seconds: dial(server.listener.address, SECRET, seconds), "the server", window=1)
        place = np.zeros(4)
        assert calls.ask("push", {"number": 0}, 5.0, x=np.ones(4)).fields == {"version": 1}
        call = calls.start("slow", {"seconds": 0.2, "number": 1}, 5.0, {"x": place}, x=np.ones(4))
        call.give_up()
        with pytest.raises(Closed, match="given up"):
            call.result()
        assert calls.ask("push", {"number": 2}, 5.0, x=np.ones(4)).fields == {"version": 3}
        assert place.tolist() == [0.0] * 4
        calls.close()


def test_giving_up_what_nobody_takes() -> None:
    """A request is given up while a thread still sends it: nothing reads its arrays after that."""
    listener = listen("tcp:127.0.0.1:0", SECRET)
    calls = Calls(lambda seconds: dial(listener.address, SECRET, seconds), "the server")
    time.sleep(0.05)
    values = np.zeros(1 << 26, np.uint8)
    started = threading.Thread(target=lambda: calls.start("push", None, 30.0, x=values))
    started.start()
    deadline = time.monotonic() + 5.0
    while not (calls._under_way and next(iter(calls._under_way.values())).sending) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    begun = time.monotonic()
    next(iter(calls._under_way.values())).give_up()
    started.join(5.0)
    assert not started.is_alive()
    assert time.monotonic() - begun < 2.0
    calls.close()
    listener.close()


def test_what_cannot_travel() -> None:
    with serving() as (_, calls):
        with pytest.raises(ValueError, match="does not travel"):
            calls.ask("push", None, 5.0, x=np.array([object()]))
        with pytest.raises(ValueError, match="no names"):
            calls.ask("push", {"reply": 1}, 5.0)
        assert calls.ask("pull", None, 5.0).kind == "values"


class Ends:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, kind: str, fields: dict[str, Any], **arrays: Any) -> None:
        self.sent.append(Message(kind, fields, arrays))


class TestKept:
    def ask(self, server: Replies, number: int, answered: int = 1, caller: str = "a") -> Message:
        ends: Any = Ends()
        server.answer(ends, Message("push", {"request": [caller, number, answered]}))
        return ends.sent[0] if ends.sent else Message("nothing")

    def test_until_the_caller_has_the_answer(self) -> None:
        done: list[str] = []
        server = Replies(lambda message: (done.append("x"), Reply("pushed"))[1])
        assert [self.ask(server, n).kind for n in (1, 2, 1, 2)] == ["pushed"] * 4
        assert len(done) == 2
        assert self.ask(server, 3, answered=3).kind == "pushed"
        assert self.ask(server, 1, answered=1).kind == "nothing"  # late, and answered long ago
        assert len(done) == 3

    def test_within_limits(self) -> None:
        """What had to be given up is refused, not done again."""
        done: list[str] = []
        server = Replies(
            lambda message: (done.append("x"), Reply("pushed", arrays={"x": np.ones(10)}))[1], keep_bytes=200
        )
        for number in range(1, 5):
            self.ask(server, number)
        assert [self.ask(server, number).kind for number in range(1, 5)] == ["failed", "failed", "pushed", "pushed"]
        assert len(done) == 4

    def test_callers_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replies, "_CALLERS", 2)
        server = Replies(lambda message: Reply("pushed"))
        for caller in "ab":
            self.ask(server, 1, caller=caller)
        with pytest.raises(WireError, match="too many callers"):
            self.ask(server, 1, caller="c")
        monkeypatch.setattr(replies, "_IDLE_SECONDS", 0.0)
        assert self.ask(server, 1, caller="c").kind == "pushed"

    @pytest.mark.parametrize(
        "given", [None, [], ["a", 1], ["a", 1, 0], ["a", True, 1], ["a", 1.0, 1], [1, 1, 1], ["a" * 65, 1, 1], "abc"]
    )
    def test_no_request(self, given: Any) -> None:
        ends: Any = Ends()
        with pytest.raises(WireError, match="no request"):
            Replies(lambda message: Reply("x")).answer(ends, Message("push", {"request": given}))
