"""A parameter server: answers the requests of clients and of other servers about the blocks of one seat.

Bodies are received and checked outside of the lock, applied inside, and acknowledged outside: once all holders, or the
log, have them. A read's answer waits likewise for whatever it has seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from verbund.checkpoint.read import Checkpoint
from verbund.comm.shared_memory.identity import Unavailable
from verbund.comm.wire import Closed, Connection, Listener, Memory, Message, Replies, Reply
from verbund.errors import InputError, RunFailed, VerbundError, shortened
from verbund.exchange.parameter_server import records, requests
from verbund.exchange.parameter_server.asked import whole, wholes
from verbund.exchange.parameter_server.clipping import Clipping
from verbund.exchange.parameter_server.custody import Custody
from verbund.exchange.parameter_server.exposed import Inbox
from verbund.exchange.parameter_server.image import Image
from verbund.exchange.parameter_server.inbound import Inbound
from verbund.exchange.parameter_server.push import Outcome, Push
from verbund.exchange.parameter_server.reading import Reading, Saves
from verbund.exchange.parameter_server.replication import Moved
from verbund.exchange.parameter_server.requests import block_of, sender
from verbund.exchange.parameter_server.view import View

_KEEP_BYTES = 1 << 24


class Server:
    """One server.

    Args:
        custody: the blocks of its seat.
        closing: is called before a connection to this server is closed, from a thread of its own.
    """

    def __init__(self, custody: Custody, closing: Callable[[], object] = lambda: None) -> None:
        self.custody = custody
        self._plan, self._deadline = custody.plan, custody.deadline
        self._reading = Reading(self.custody)
        self._saves = Saves(self.custody, self._deadline)
        self._listener: Listener | None = None
        self._connections: set[Connection] = set()
        self._own = threading.local()
        self._inboxes: dict[str, Inbox] = {}
        """The memory of clients on this host."""
        self._replies = Replies(self._handle, _KEEP_BYTES, closing)
        self._inbound = Inbound(self._deadline)
        self._counts = {"pushes": 0, "applied": 0, "waiting": 0, "known": 0, "late": 0, "rows": 0, "bytes": 0}
        self._counts |= {"records": 0}
        self._requests: dict[str, Callable[[Message], Reply]] = {
            "window": self._window,
            "push": self._push,
            "pull": self._pull,
            "squares": self._squares,
            "clip": self._clip,
            "begin": self._begin,
            "load": self._load,
            "record": self._record,
            "save": self._save,
            "saved": self._saved,
            "view": self._told,
        }

    @property
    def failure(self) -> VerbundError | None:
        """Why it can acknowledge nothing any more, such as a full disk; the process is of no further use then."""
        return self.custody.failure

    def serve(self, listener: Listener) -> None:
        """Answers whoever dials, until `close`; the listener is closed then."""
        self._listener = listener
        while not self.custody.closed:
            try:
                connection = listener.accept()
            except Closed:
                return
            with self.custody.changed:
                self._connections.add(connection)
            threading.Thread(target=self._answer, args=(connection,), name="answers", daemon=True).start()

    def see(self, view: View) -> None:
        """There is this view; an older one than what is known changes nothing."""
        self.custody.see(view)

    def close(self) -> None:
        """Answers no more; what is in the log is synced."""
        with self.custody.changed:
            self.custody.closed = True
            self.custody.changed.notify_all()
            connections = list(self._connections)
        if self._listener is not None:
            self._listener.close()
        for connection in connections:
            connection.end()
        self.custody.close()

    def totals(self) -> dict[str, Any]:
        """What it has done, for the report: counts, bytes, seconds."""
        return {**self._counts, **self._reading.totals(), **self.custody.totals()}

    def _answer(self, connection: Connection) -> None:
        self._own.memory, self._own.answers = Memory(), Memory()
        try:
            self._replies.serve(connection, None, self._own.memory)
        finally:
            with self.custody.changed:
                self._connections.discard(connection)

    def _handle(self, message: Message) -> Reply:
        request = self._requests.get(message.kind)
        if request is None:
            raise InputError(f"a parameter server knows no request `{message.kind}`")
        if message.fields.get("model") != self._plan.model:
            fix = "Client and server must be started with the same job and the same model"
            raise InputError("this request is about another model", where=sender(message.fields), fix=fix)
        try:
            return request(message)
        except Moved as moved:
            return Reply("moved", {"view": moved.view}, keep=False)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            what = f"a request `{message.kind}` is damaged: {type(error).__name__}: {shortened(str(error))}"
            raise InputError(what, where=sender(message.fields)) from error

    def _until(self, fields: dict[str, Any]) -> float:
        """When a request must be answered: its own wish, within the deadline."""
        wish = fields.get("seconds")
        seconds = float(wish) if isinstance(wish, int | float) else self._deadline
        return time.monotonic() + min(max(seconds, 0.0), self._deadline)

    # -- requests ------------------------------------------------------------------------------------------------

    def _told(self, message: Message) -> Reply:
        self.see(View.of(message.fields["record"]))
        return Reply("seen", keep=False)

    def _window(self, message: Message) -> Reply:
        """A client on the same host asks for this server's memory, and gives its own."""
        if self.custody.exposed is None:
            return Reply("none", keep=False)
        try:
            inbox, name = Inbox(message.fields["outbox"]), str(message.fields["name"])
        except (Unavailable, KeyError, TypeError):
            return Reply("none", keep=False)
        with self.custody.changed:
            for former in [other for other, each in self._inboxes.items() if each.over or other == name]:
                self._inboxes.pop(former).close()
            self._inboxes[name] = inbox
        return Reply("window", self.custody.exposed.record(), keep=False)

    def _push(self, message: Message) -> Reply:
        fields, custody = message.fields, self.custody
        blocks: list[int] = []
        try:
            push = self._received(message)
            blocks = [part.block for part in push.parts]
            custody.await_view(fields)
            custody.fence(push.client, push.generation)
            with custody.changed:
                custody.check_primary(blocks)
            custody.holdings.check(push)
        except InputError as error:
            with custody.changed:
                custody.check_primary(blocks, begun=False)  # it may have moved in between, which is nobody's mistake
            raise InputError(error.what, where=error.where or sender(fields), fix=error.fix) from None
        until = self._until(fields)
        with custody.changed:
            custody.fence(push.client, push.generation)
            custody.check_primary(blocks)
            outcomes, number = custody.change(push)
            self._count(push, outcomes)
        done = False
        try:
            done = custody.settle(dict.fromkeys(blocks, number), until, everyone=True)
        finally:
            if not done:
                self._own.memory.leave()  # somebody may still be sending what is in it
        told: dict[str, Any] = {"outcomes": records.outcome_fields(outcomes)}
        if not fields.get("pull"):
            return Reply("pushed", told)
        dense = [block for block in blocks if self._plan.blocks[block].kind != "rows"]
        least, looks = requests.least_of(fields), bool(fields.get("looks"))
        arrays, more = self._reading.read([(block, None) for block in dense], least, looks, self._own.answers, until)
        return Reply("pushed", {**told, **more}, arrays, keep=False)

    def _received(self, message: Message) -> Push:
        push = requests.push_of(message, self._plan, self._inboxes)
        if "places" in message.fields and self.custody.follows:  # who gets it later reads it later
            parts = [
                p if p.values is None or p.message is not None else replace(p, values=p.values.clone())
                for p in push.parts
            ]
            push = replace(push, parts=parts)
        return push

    def _pull(self, message: Message) -> Reply:
        fields = message.fields
        parts = requests.parts_of(message, self._plan)
        self.custody.await_view(fields)
        least, looks = requests.least_of(fields), bool(fields.get("looks"))
        arrays, told = self._reading.read(parts, least, looks, self._own.answers, self._until(fields))
        return Reply("pulled", told, arrays, keep=False)

    def _squares(self, message: Message) -> Reply:
        """What the blocks here know of the norm of a ticket's gradient."""
        fields = message.fields
        blocks, ticket = wholes(fields, "blocks", len(self._plan.blocks)), whole(fields, "ticket")
        self._check_clips(fields)
        self.custody.await_view(fields)
        found = self._reading.squares(blocks, ticket, self._until(fields))
        return Reply("squares", {"squares": [[square.value, square.norm] for square in found]}, keep=False)

    def _clip(self, message: Message) -> Reply:
        """The blocks here take a ticket by its norm, unless they have."""
        fields, custody = message.fields, self.custody
        client, generation = whole(fields, "client"), whole(fields, "generation")
        clipping = Clipping.of(fields, self._plan)
        self._check_clips(fields)
        until = self._until(fields)
        custody.await_view(fields)
        with custody.changed:
            custody.fence(client, generation)
            custody.check_primary(clipping.blocks)
            if early := [b for b in clipping.blocks if not custody.holdings.complete(b, clipping.ticket)]:
                raise InputError(f"block {early[0]} is clipped before all shares have come", where=sender(fields))
            left = clipping.of_blocks({b for b in clipping.blocks if custody.holdings.version(b) == clipping.ticket})
            if left.blocks:
                custody.change(left)
            needed = custody.needed(clipping.blocks)
        custody.settle(needed, until)
        return Reply("clipped", keep=False)

    def _check_clips(self, fields: dict[str, Any]) -> None:
        if self._plan.rule.clip is None:
            raise InputError("no gradients are clipped here", where=sender(fields))

    def _begin(self, message: Message) -> Reply:
        block, values, version, state = requests.beginning_of(message, self._plan)
        until = self._until(message.fields)
        self.custody.await_view(message.fields)
        self.custody.begin([block], lambda number: self.custody.holdings.create(number, values, version, state), until)
        return Reply("begun", {}, keep=False)

    def _load(self, message: Message) -> Reply:
        fields, custody = message.fields, self.custody
        blocks = [block_of(value, self._plan) for value in fields["blocks"]]
        checkpoint = Checkpoint.open(Path(fields["folder"]), verify=False)
        version = int(fields.get("version", 0))
        for block in blocks:
            until = self._until(fields)
            custody.await_view(fields)
            custody.begin([block], lambda number: custody.holdings.load(number, checkpoint, version), until)
        return Reply("begun", keep=False)

    def _save(self, message: Message) -> Reply:
        fields = message.fields
        step, folder, part = int(fields["step"]), Path(fields["folder"]), int(fields["part"])
        self.custody.await_view(fields)
        self._saves.start(step, str(fields["by"]), folder, part, self._until(fields))
        return Reply("saving", keep=False)

    def _saved(self, message: Message) -> Reply:
        fields = message.fields
        record = self._saves.result(int(fields["step"]), str(fields["by"]), self._until(fields))
        return Reply("saved", {"record": record})

    def _record(self, message: Message) -> Reply:
        """What a primary sends."""
        fields, custody = message.fields, self.custody
        stream, view = wholes(fields, "stream"), custody.view
        if len(stream) != 3 or (view is not None and not custody.may_send(stream, view)):
            raise InputError("a record comes of no server's stream")
        with self._inbound.turn(stream, whole(fields, "sequence", 1)) as mine:
            if not mine:
                return Reply("taken")
            if fields["of"] == "view":
                self.see(View.of(fields["record"]))
                return Reply("taken")
            custody.await_view(fields)
            record = records.decode(Message(fields["of"], fields, message.arrays), self._plan, own=True)
            with custody.changed:
                custody.check_sender(stream, records.blocks_of(record))
                versions = None
                if not isinstance(record, Image):
                    absent = [block for block in records.blocks_of(record) if block not in custody.holdings]
                    if absent:
                        raise RunFailed(f"a {fields['of']} came of block {absent[0]}, which is not here")
                    versions = wholes(fields, "versions")
                _, number = custody.change(record, versions)
                self._counts["records"] += 1
            with ExitStack() as failed:
                failed.callback(self._own.memory.leave)  # somebody may still be writing what is in it
                custody.wait_logged(number)
                failed.pop_all()
        return Reply("taken")

    def _count(self, push: Push, outcomes: list[Outcome]) -> None:
        self._counts["pushes"] += 1
        self._counts["bytes"] += sum(tensor.nbytes for tensor in push.arrays().values())
        for part, outcome in zip(push.parts, outcomes, strict=True):
            self._counts[outcome.state] += 1
            self._counts["rows"] += 0 if part.rows is None else len(part.rows)
