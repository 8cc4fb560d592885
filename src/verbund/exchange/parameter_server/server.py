"""A parameter server: the blocks of one seat, and the requests of clients and of other servers.

Bodies are received and checked outside of the lock, applied inside, and acknowledged outside: once all holders, or the
log, have them. A read's answer waits likewise for whatever it has seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbund.checkpoint.read import Checkpoint
from verbund.checkpoint.snapshot import Snapshot
from verbund.comm.shared_memory.identity import Unavailable
from verbund.comm.wire import Closed, Connection, Credentials, Listener, Memory, Message, Payload, Replies, Reply
from verbund.errors import InputError, RunFailed, VerbundError, shortened
from verbund.exchange.parameter_server import records
from verbund.exchange.parameter_server.asked import LIVES, whole, wholes
from verbund.exchange.parameter_server.exposed import Exposed, Inbox
from verbund.exchange.parameter_server.holdings import Holdings, Image
from verbund.exchange.parameter_server.inbound import Inbound
from verbund.exchange.parameter_server.log import BOUND, Log
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.push import Outcome, Push, tensor_of
from verbund.exchange.parameter_server.records import Record
from verbund.exchange.parameter_server.replication import Joined, Moved, Replication, Self
from verbund.exchange.parameter_server.view import View

_VIEW_SECONDS = 5.0  # that a view may take to get here, of which the sender of a request knows
_KEEP_BYTES = 1 << 24


class Server:
    """One server.

    Args:
        plan: of the run.
        rank: its seat.
        generation: of this process.
        folder: for the log, where there are no replicas; what is there is taken up. None: no log.
        credentials: for dialling other servers.
        deadline: seconds that a request may take.
        joined: is told, by a primary, of a server that has all blocks which it was to join.
        log_bytes: that a log may have before a snapshot takes its place, if what is held is not larger.
        patience: seconds of another server's silence after which records are sent to it again.
        closing: is called before a connection to this server is closed, from a thread of its own.

    Raises:
        CheckpointError: if the folder cannot be taken up.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        generation: int,
        folder: Path | None = None,
        credentials: Credentials = None,
        deadline: float = 60.0,
        joined: Joined | None = None,
        log_bytes: int = BOUND,
        patience: float = 30.0,
        closing: Callable[[], object] = lambda: None,
    ) -> None:
        self._plan = plan
        self._model = plan.model
        self._rank = rank
        self._generation = generation
        self._deadline = deadline
        self._exposed = Exposed.make(plan)
        self._holdings = Holdings(plan, self._exposed.adopt if self._exposed is not None else lambda *_: None)
        self._changed = threading.Condition()
        self._view: View | None = None
        self._mine: frozenset[int] = frozenset()
        self._number = 0
        """Of the last record."""
        self._last: dict[int, int] = {}
        """By block, of the last record that has changed it."""
        self._failure: VerbundError | None = None
        self._closed = False
        self._listener: Listener | None = None
        self._connections: set[Connection] = set()
        self._own = threading.local()
        self._inboxes: dict[str, Inbox] = {}
        """The memory of clients on this host."""
        self._replies = Replies(self._handle, _KEEP_BYTES, closing)
        self._inbound = Inbound(deadline)
        self._snapshot = Snapshot()
        self._saves: dict[tuple[int, str], Future[dict[str, Any]]] = {}
        """By step and by who asks, which after a loss may be another."""
        self._saving = threading.Lock()
        self._counts = {"pushes": 0, "applied": 0, "waiting": 0, "known": 0, "late": 0, "rows": 0, "bytes": 0}
        self._counts |= {"pulls": 0, "pulled_bytes": 0, "records": 0}
        self._applying = 0.0
        own = Self(rank, generation, self._model)
        self._replication = Replication(own, self._send_image, joined, credentials, deadline, patience)
        self._log = Log(folder, self._image, log_bytes) if folder is not None else None
        if self._log is not None:
            self._number = self._log.recover(self._holdings)
            here = [block for block in range(len(plan.blocks)) if block in self._holdings]
            self._last = dict.fromkeys(here, self._number)
            self._expose(here)
        self._requests: dict[str, Callable[[Message], Reply]] = {
            "window": self._window,
            "push": self._push,
            "pull": self._pull,
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
        return self._failure or (self._log.failure if self._log is not None else None)

    def serve(self, listener: Listener) -> None:
        """Answers whoever dials, until `close`; the listener is closed then."""
        self._listener = listener
        while not self._closed:
            try:
                connection = listener.accept()
            except Closed:
                return
            with self._changed:
                self._connections.add(connection)
            threading.Thread(target=self._answer, args=(connection,), name="answers", daemon=True).start()

    def see(self, view: View) -> None:
        """There is this view; an older one than what is known changes nothing."""
        with self._changed:
            if self._view is not None and view.number <= self._view.number:
                return
            self._view = view
            self._mine = frozenset()
            if view.seats[self._rank].generation == self._generation:
                blocks = range(len(self._plan.blocks))
                self._mine = frozenset(block for block in blocks if view.holders[block][:1] == (self._rank,))
                for block in blocks:
                    has = self._rank in view.holders[block] or self._rank in view.joining[block]
                    if not has and block in self._holdings:
                        self._holdings.drop(block)
            self._replication.update(view, self._mine)
            self._changed.notify_all()

    def close(self) -> None:
        """Answers no more; what is in the log is synced."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = list(self._connections)
        if self._listener is not None:
            self._listener.close()
        for connection in connections:
            connection.end()
        self._replication.close()
        if self._log is not None:
            self._log.close()

    def totals(self) -> dict[str, Any]:
        """What it has done, for the report: counts, bytes, seconds."""
        found: dict[str, Any] = {**self._counts, "applying_seconds": self._applying, **self._replication.totals()}
        return found | (self._log.totals() if self._log is not None else {})

    # Requests

    def _answer(self, connection: Connection) -> None:
        self._own.memory, self._own.answers = Memory(), Memory()
        try:
            self._replies.serve(connection, None, self._own.memory)
        finally:
            with self._changed:
                self._connections.discard(connection)

    def _handle(self, message: Message) -> Reply:
        request = self._requests.get(message.kind)
        if request is None:
            raise InputError(f"a parameter server knows no request `{message.kind}`")
        if message.fields.get("model") != self._model:
            fix = "Client and server must be started with the same job and the same model"
            raise InputError("this request is about another model", where=_sender(message.fields), fix=fix)
        try:
            return request(message)
        except Moved as moved:
            return Reply("moved", {"view": moved.view}, keep=False)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            what = f"a request `{message.kind}` is damaged: {type(error).__name__}: {shortened(str(error))}"
            raise InputError(what, where=_sender(message.fields)) from error

    def _told(self, message: Message) -> Reply:
        self.see(View.of(message.fields["record"]))
        return Reply("seen", keep=False)

    def _window(self, message: Message) -> Reply:
        """A client on the same host asks for this server's memory, and gives its own."""
        if self._exposed is None:
            return Reply("none", keep=False)
        try:
            inbox, name = Inbox(message.fields["outbox"]), str(message.fields["name"])
        except (Unavailable, KeyError, TypeError):
            return Reply("none", keep=False)
        with self._changed:
            for former in [other for other, each in self._inboxes.items() if each.over or other == name]:
                self._inboxes.pop(former).close()
            self._inboxes[name] = inbox
        return Reply("window", self._exposed.record(), keep=False)

    def _push(self, message: Message) -> Reply:
        fields = message.fields
        blocks: list[int] = []
        try:
            push = self._received(message)
            blocks = [part.block for part in push.parts]
            self._await_view(fields)
            self._fence(push)
            with self._changed:
                self._check_primary(blocks)
            self._holdings.check(push)
        except InputError as error:
            with self._changed:
                self._check_primary(blocks, begun=False)  # it may have moved in between, which is nobody's mistake
            raise InputError(error.what, where=error.where or _sender(fields), fix=error.fix) from None
        until = self._until(fields)
        with self._changed:
            self._fence(push)
            self._check_primary(blocks)
            outcomes = self._apply(push)
            number = self._commit(push, outcomes)
            self._count(push, outcomes)
        done = False
        try:
            done = self._settle(dict.fromkeys(blocks, number), until, everyone=True)
        finally:
            if not done:
                self._own.memory.leave()  # somebody may still be sending what is in it
        told: dict[str, Any] = {"outcomes": records.outcome_fields(outcomes)}
        if self._exposed is not None:
            self._exposed.settled({b: o.version for b, o in zip(blocks, outcomes, strict=True)})
        if not fields.get("pull"):
            return Reply("pushed", told)
        dense = [block for block in blocks if self._plan.blocks[block].kind != "rows"]
        arrays, more = self._read([(block, None) for block in dense], fields, until)
        return Reply("pushed", {**told, **more}, arrays, keep=False)

    def _received(self, message: Message) -> Push:
        """The push of a message, whose values may lie in its client's memory."""
        places = message.fields.get("places")
        if places is None:
            return Push.of(message.fields, message.arrays, self._plan)
        inbox = self._inboxes.get(str(message.fields.get("outbox")))
        if inbox is None or not isinstance(places, list) or len(places) != len(message.fields["parts"]):
            raise InputError("a push speaks of memory that it has not shown")
        values: dict[str, Tensor] = {}
        for number, (place, part) in enumerate(zip(places, message.fields["parts"], strict=True)):
            if place is not None:
                block = self._plan.blocks[_block(part[0], self._plan)]
                dtype = getattr(torch, block.dtype)
                values[f"v{number}"] = inbox.view(place, block.count, dtype)
        push = Push.of(message.fields, message.arrays, self._plan, values)
        if self._replication.follows:  # who gets it later reads it later
            parts = [p if p.values is None else replace(p, values=p.values.clone()) for p in push.parts]
            push = replace(push, parts=parts)
        return push

    def _pull(self, message: Message) -> Reply:
        fields = message.fields
        given = fields.get("parts")
        if not isinstance(given, list) or not given:
            raise InputError("a pull has no list of parts", where=_sender(fields))
        parts: list[tuple[int, Tensor | None]] = []
        for number, item in enumerate(given):
            if not (isinstance(item, list) and len(item) == 2 and type(item[0]) is int):
                raise InputError(f"part {number} of a pull is not block, rows", where=_sender(fields))
            if not 0 <= item[0] < len(self._plan.blocks):
                raise InputError(f"there is no block {item[0]}", where=_sender(fields))
            rows = message.arrays.get(f"r{number}")
            if not (item[1] is not None) == (rows is not None) == (self._plan.blocks[item[0]].kind == "rows"):
                what = f"of a table rows are pulled, and of other blocks none, which block {item[0]} does not fit"
                raise InputError(what, where=_sender(fields))
            parts.append((item[0], None if rows is None else torch.from_numpy(rows)))
        self._await_view(fields)
        arrays, told = self._read(parts, fields, self._until(fields))
        return Reply("pulled", told, arrays, keep=False)

    def _begin(self, message: Message) -> Reply:
        fields, arrays = message.fields, dict(message.arrays)
        block = _block(fields.get("block"), self._plan)
        dtype = self._plan.blocks[block].dtype
        values = arrays.pop("values", None)
        named = fields.get("optimizer") or []
        if len(named) != len(arrays):
            raise InputError("a beginning has other optimiser states than it speaks of", where=_sender(fields))
        state = {str(name): tensor_of(arrays[f"o{n}"], str(kind)) for n, (name, kind) in enumerate(named)}
        first = None if values is None else tensor_of(values, dtype)
        version = int(fields.get("version", 0))
        return self._begun(
            fields, [block], lambda: self._holdings.create(block, first, version, state or None), self._until(fields)
        )

    def _load(self, message: Message) -> Reply:
        fields = message.fields
        blocks = [_block(value, self._plan) for value in fields["blocks"]]
        checkpoint = Checkpoint.open(Path(fields["folder"]), verify=False)
        version = int(fields.get("version", 0))
        for block in blocks:
            self._begun(
                fields,
                [block],
                lambda block=block: self._holdings.load(block, checkpoint, version),  # type: ignore[misc]
                self._until(fields),
            )
        return Reply("begun", keep=False)

    def _begun(self, fields: dict[str, Any], blocks: list[int], make: Callable[[], None], until: float) -> Reply:
        self._await_view(fields)
        with self._changed:
            self._check_primary(blocks, begun=False)
            for block in blocks:
                if block not in self._holdings:
                    make()
                    self._expose([block])
                    self._commit(self._holdings.image(block), [])
            needed = {block: self._last.get(block, 0) for block in blocks}
        self._settle(needed, until)
        return Reply("begun", {}, keep=False)

    def _save(self, message: Message) -> Reply:
        step, folder, part = int(message.fields["step"]), Path(message.fields["folder"]), int(message.fields["part"])
        self._await_view(message.fields)
        key = step, str(message.fields["by"])
        with self._saving:
            if key not in self._saves:
                for former in self._saves.values():
                    former.exception(self._deadline)
                with self._changed:
                    blocks = [block for block in sorted(self._mine) if block in self._holdings]
                    future = self._snapshot.save(self._holdings.pieces(blocks), folder, part)
                    needed = {block: self._last.get(block, 0) for block in blocks}
                self._saves = {key: future}
                self._settle(needed, self._until(message.fields))
        return Reply("saving", keep=False)

    def _saved(self, message: Message) -> Reply:
        step = int(message.fields["step"])
        future = self._saves.get((step, str(message.fields["by"])))
        if future is None:
            raise RunFailed(f"step {step} is not being saved here", where=f"server {self._rank}")
        try:
            return Reply("saved", {"record": future.result(self._until(message.fields) - time.monotonic())})
        except TimeoutError:
            raise RunFailed(f"step {step} is not written in time", where=f"server {self._rank}") from None

    def _record(self, message: Message) -> Reply:
        """What a primary sends."""
        fields = message.fields
        stream, view = wholes(fields, "stream"), self._view
        if len(stream) != 3 or (view is not None and not self._may_send(stream, view)):
            raise InputError("a record comes of no server's stream")
        with self._inbound.turn(stream, whole(fields, "sequence", 1)) as mine:
            if not mine:
                return Reply("taken")
            if fields["of"] == "view":
                self.see(View.of(fields["record"]))
                return Reply("taken")
            self._await_view(fields)
            told = Message(fields["of"], fields, message.arrays)
            record = records.decode(told, self._plan, own=True)
            with self._changed:
                self._check_sender(fields, records.blocks_of(record))
                if isinstance(record, Push):
                    absent = [part.block for part in record.parts if part.block not in self._holdings]
                    if absent:
                        raise RunFailed(f"a push came of block {absent[0]}, which is not here")
                outcomes = self._apply(record)
                if isinstance(record, Push) and [outcome.version for outcome in outcomes] != fields.get("versions"):
                    raise RunFailed("a replica's blocks have other versions than the primary's")
                self._commit(record, outcomes)
                self._counts["records"] += 1
                number = self._number
            if self._log is not None:
                with ExitStack() as failed:
                    failed.callback(self._own.memory.leave)  # somebody may still be writing what is in it
                    self._log.wait(number, self._deadline)
                    failed.pop_all()
        return Reply("taken")

    # What they are made of

    def _until(self, fields: dict[str, Any]) -> float:
        """When a request must be answered: its own wish, within the deadline."""
        wish = fields.get("seconds")
        seconds = float(wish) if isinstance(wish, int | float) else self._deadline
        return time.monotonic() + min(max(seconds, 0.0), self._deadline)

    def _await_view(self, fields: dict[str, Any]) -> None:
        """Waits a moment for the view of which the sender knows."""
        number = fields.get("view")
        if type(number) is not int:
            raise InputError("a request does not say by which view it comes", where=_sender(fields))
        with self._changed:
            here = self._changed.wait_for(
                lambda: self._closed or (self._view is not None and self._view.number >= number),
                min(_VIEW_SECONDS, self._deadline),
            )
            if not here or self._closed:
                raise Moved(number if not self._closed else 0)

    def _fence(self, push: Push) -> None:
        view = self._view
        if view is None or push.client >= len(view.clients):
            raise InputError(f"there is no island {push.client}")
        if push.generation != view.clients[push.client]:
            raise RunFailed(
                f"island {push.client} of generation {push.generation} was replaced by generation "
                f"{view.clients[push.client]}",
                where=f"server {self._rank}",
            )

    def _check_primary(self, blocks: Sequence[int], begun: bool = True) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closed or not self._mine.issuperset(blocks):
            raise Moved(self._view.number if self._view is not None else 0)
        for block in blocks:
            if begun and block not in self._holdings:
                name = self._plan.blocks[block].name
                raise InputError(f"block {block} (`{name}`) has not begun: it has no values that a push could change")

    def _may_send(self, stream: Sequence[int], view: View) -> bool:
        """Whether there can be such a server; it may be newer than what is known here."""
        rank, generation, _ = stream
        return rank < len(view.seats) and rank != self._rank and generation <= view.seats[rank].generation + LIVES

    def _check_sender(self, fields: dict[str, Any], blocks: Sequence[int]) -> None:
        view = self._view
        assert view is not None
        rank, generation, _ = fields["stream"]
        if self.failure is not None:
            raise self.failure
        known = view.seats[rank].generation == generation
        own = view.seats[self._rank].generation == self._generation
        for block in blocks:
            right = view.holders[block][:1] == (rank,) and block not in self._mine
            here = self._rank in view.holders[block] or self._rank in view.joining[block]
            if not (known and own and right and here):
                raise Moved(view.number)

    def _apply(self, record: Record) -> list[Outcome]:
        start = time.perf_counter()
        blocks = records.blocks_of(record)
        try:
            with self._exposed.changing(blocks) if self._exposed is not None else nullcontext():
                outcomes = records.apply(self._holdings, record)
                self._expose(blocks)
            return outcomes
        except Exception as error:
            # Half of it may have been done: this is no longer what the others have.
            self._failure = RunFailed(f"a record could not be applied: {error}", where=f"server {self._rank}")
            raise self._failure from error
        finally:
            self._applying += time.perf_counter() - start

    def _expose(self, blocks: Sequence[int]) -> None:
        """Says which versions readers find."""
        if self._exposed is not None:
            for block in blocks:
                self._exposed.has(block, self._holdings.version(block))

    def _commit(self, record: Record, outcomes: list[Outcome]) -> int:
        """Gives a record its number, and hands it to replicas and log."""
        self._number += 1
        blocks = records.blocks_of(record)
        self._last.update(dict.fromkeys(blocks, self._number))
        versions = {block: outcome.version for block, outcome in zip(blocks, outcomes, strict=False)}
        self._replication.append(self._number, record, versions)
        if self._log is not None:
            self._log.append(self._number, record)
        self._changed.notify_all()
        return self._number

    def _settle(self, needed: dict[int, int], until: float, everyone: bool = False) -> bool:
        """Waits until what these blocks have had up to these numbers cannot be lost; see `Replication.wait`."""
        done = self._replication.wait(needed, until, everyone)
        if self._log is not None:
            self._log.wait(max(needed.values(), default=0), until - time.monotonic())
        return done

    def _read(
        self, parts: Sequence[tuple[int, Tensor | None]], fields: dict[str, Any], until: float
    ) -> tuple[dict[str, Payload], dict[str, Any]]:
        """Once all blocks have the least version: values by place in `parts`, as `v<i>`, and `versions`; and the
        `places` of values in this server's memory, if the client reads there."""
        blocks = [block for block, _ in parts]
        least = _least(fields)
        with self._changed:
            while True:
                self._check_primary(blocks, begun=False)
                behind = [b for b in blocks if b not in self._holdings or self._holdings.version(b) < least]
                if not behind:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    raise self._behind(behind, least)
                self._changed.wait(left)
            self._own.answers.begin()  # the former answer has been sent
            arrays: dict[str, Payload] = {}
            places: list[int | None] = [None] * len(parts)
            for number, (block, rows) in enumerate(parts):
                if rows is not None:
                    arrays[f"v{number}"] = self._holdings.read_rows(block, rows)
                elif not fields.get("looks") or (place := self._place(block)) is None:
                    arrays[f"v{number}"] = self._holdings.read([block], self._room(block))
                else:
                    places[number] = place
            versions = [self._holdings.version(block) for block in blocks]
            needed = {block: self._last.get(block, 0) for block in blocks}
            self._counts["pulls"] += 1
            self._counts["pulled_bytes"] += sum(int(getattr(array, "nbytes", 0)) for array in arrays.values())
        self._settle(needed, until)
        if self._exposed is not None:
            self._exposed.settled(dict(zip(blocks, versions, strict=True)))
        return arrays, {"versions": versions, "places": places}

    def _place(self, block: int) -> int | None:
        """Where in this server's memory a block's values lie."""
        values = self._holdings.values(block)
        return self._exposed.place(block, values) if self._exposed is not None and values is not None else None

    def _room(self, block: int) -> Tensor:
        """Memory of this connection for the values of a block, until its next answer."""
        dtype = getattr(torch, self._plan.blocks[block].dtype)
        raw = torch.from_numpy(self._own.answers.take(self._plan.blocks[block].count * dtype.itemsize))
        return raw.view(dtype)

    def _behind(self, behind: list[int], least: int) -> RunFailed:
        """Who is missing, for a reader that has waited too long."""
        block, where = behind[0], f"server {self._rank}"
        name = self._plan.blocks[block].name
        if block not in self._holdings:
            return RunFailed(f"nobody has given block {block} (`{name}`) its first values", where=where)
        version = self._holdings.version(block)
        what = f"block {block} (`{name}`) is at version {version}, and version {least} was waited for"
        if self._plan.rule.consistency == "synchronous":
            shares = ", ".join(map(str, self._holdings.missing(block)))
            what += f": of ticket {version} these shares have not come: {shares}"
        return RunFailed(what, where=where)

    def _count(self, push: Push, outcomes: list[Outcome]) -> None:
        self._counts["pushes"] += 1
        for part, outcome in zip(push.parts, outcomes, strict=True):
            self._counts[outcome.state] += 1
            self._counts["rows"] += 0 if part.rows is None else len(part.rows)
            self._counts["bytes"] += sum(tensor.nbytes for tensor in (part.values, part.rows) if tensor is not None)

    def _image(self, block: int) -> tuple[int, Image] | None:
        with self._changed:
            return (self._number, self._holdings.image(block)) if block in self._holdings else None

    def _send_image(self, block: int, take: Callable[[int, Image | None], None]) -> None:
        with self._changed:
            take(self._number, self._holdings.image(block) if block in self._holdings else None)


def _sender(fields: dict[str, Any]) -> str | None:
    client = fields.get("client")
    return f"island {client}" if type(client) is int else None


def _least(fields: dict[str, Any]) -> int:
    least = fields.get("least", 0)
    if type(least) is not int:
        raise InputError("`least` of a request is no version", where=_sender(fields))
    return least


def _block(value: Any, plan: Plan) -> int:
    if type(value) is not int or not 0 <= value < len(plan.blocks):
        raise InputError(f"there is no block {value!r}")
    return value
