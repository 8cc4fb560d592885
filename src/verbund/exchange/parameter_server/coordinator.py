"""The coordinator: hands out tickets, says who holds which block, and remembers both over its own death.

All that it knows is a pure function of the events that it has been told; these are appended to a file before they take
effect, and read again by whoever takes its place. They reach the operating system at once, the disk when a view changes
or all come to rest.
"""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verbund.comm.wire import Message, Reply
from verbund.errors import ClusterLost, InputError, VerbundError
from verbund.exchange.parameter_server import membership
from verbund.exchange.parameter_server.asked import LIVES, flag, plan_of, table, text, whole, wholes
from verbund.exchange.parameter_server.gathering import Gathering, there
from verbund.exchange.parameter_server.leases import Leases
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.view import View

_WAIT = 5.0
"""Seconds after which a question that has no answer yet is answered with nothing, and is asked again."""
_LEASED = 64
"""Tickets that one question may get."""
_LOG = "coordinator.jsonl"
_COMPACT = 20_000
"""Events after which the file is written anew."""
_JUDGED = 1 << 16
_ISLANDS = 4096
"""That there may be at most, where they come and go."""
_RECORD = 1 << 21
_TEXT = 512

Places = Callable[[Plan], list[tuple[int, ...]]]


class Coordinator:
    """Answers servers and workers; `handle` is for `comm.wire.Replies`.

    Args:
        folder: where its memory lies; there may be one of a former process.
        leases: as they are at the beginning.
        servers: seats.
        places: by block the servers that are to hold it.
        judged: what decides on the end of training, as it is at the beginning: JSON values.
        fatal: is told of an error with which the run cannot go on.
    """

    def __init__(
        self,
        folder: Path,
        leases: Leases,
        servers: int,
        places: Places,
        judged: dict[str, Any],
        fatal: Callable[[VerbundError], None],
    ) -> None:
        self._leases, self._servers, self._places, self._fatal = leases, servers, places, fatal
        self._judged = judged
        self._plan: Plan | None = None
        self._view: View | None = None
        self._begun = False
        self._lead: tuple[int, int, int] | None = None  # island, generation, step
        self._gathering: Gathering | None = None
        self._changed = threading.Condition()
        self._path = folder / _LOG
        self._events = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._recall()
        self._file = self._opened()

    @property
    def ended(self) -> str | None:
        """Why training has ended, if it has."""
        return self._leases.ended

    def handle(self, message: Message) -> Reply:
        """Answers a request; see the methods `_on_…`."""
        answer = getattr(self, f"_on_{message.kind}", None)
        if answer is None:
            raise InputError(f"a coordinator knows no request `{message.kind}`")
        with self._changed:
            fields = answer(message.fields)
        return Reply("answer", fields or {})

    def end_soon(self, reason: str) -> None:
        """Training ends after what is leased."""
        with self._changed:
            self._event("end_soon", reason)

    def want(self, islands: int) -> None:
        """From now on there are to be the first so many islands: those beyond get no more tickets, and end."""
        if self._leases.divided:
            return
        with self._changed:
            for number, own in enumerate(self._leases.islands):
                if own.leaves != (number >= islands):
                    self._event("release" if number >= islands else "admit", number)

    # -- requests ------------------------------------------------------------------------------------------------

    def _on_enter(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A worker of an island has come, with the plan that its model gives."""
        leases = self._leases
        most = len(leases.islands) if leases.divided else _ISLANDS
        island, record = whole(fields, "island", 0, most - 1), fields.get("plan")
        plan = plan_of(record)
        known = leases.islands[island].generation if island < len(leases.islands) else 0
        generation = whole(fields, "generation", 0, known + LIVES)
        if self._plan is None:
            self._event("plan", record)
        elif self._plan.model != plan.model:
            raise InputError(
                f"island {island} has another model than the others",
                where="model()",
                fix="All must build the same tensors, whatever their environment",
            )
        if generation < known:
            raise _fenced(island)
        if generation > known:
            self._event("enter", island, generation)
        return {"judged": self._judged, "rested": self._leases.rested, "begun": self._begun}

    def _on_begun(self, fields: dict[str, Any]) -> None:
        """All blocks have their first values."""
        self._member(fields)
        self._event("begun")

    def _on_lease(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A worker wants its island's tickets from number so and so on, up to a count of them, and says of how many its
        pushes are acknowledged; waits a while for the first."""
        self._on_done(fields)
        island = self._member(fields)
        own = self._leases.islands[island]
        worker = whole(fields, "worker", 0, len(own.done) - 1)
        number = whole(fields, "number", own.first, own.first + len(own.given))
        wanted = min(whole(fields, "count", 1), _LEASED)
        until = time.monotonic() + _WAIT
        while True:
            self._member(fields)
            if self._leases.ended is not None:
                return {"end": self._leases.ended, "step": self._leases.rested}
            own = self._leases.islands[island]
            known = own.first + len(own.given)
            count = sum(1 for n in range(number, number + wanted) if self._leases.lease(island, n))
            if count:
                if number + count > known:
                    self._remember("lease", island, number, count)
                tickets = [self._leases.ticket(island, n) for n in range(number, number + count)]
                again = [ticket for ticket in tickets if ticket in own.again]
                return {"tickets": tickets, "low": self._leases.low, "again": again}
            if self._leases.resting and (lead := self._leads(island)) is not None:
                return lead
            keep = self._gathering.wanted(island, worker) if self._gathering is not None else None
            if self._leases.resting and keep is not None:
                return {"keep": keep}
            if self._leases.gone(island):
                return {"end": "released", "step": self._leases.rested}
            left = until - time.monotonic()
            if left <= 0:
                return {"waits_for": self._leases.missing()}
            self._changed.wait(left)

    def _on_done(self, fields: dict[str, Any]) -> None:
        """A worker's pushes of its first so many tickets are acknowledged."""
        island = self._member(fields)
        worker = whole(fields, "worker", 0, len(self._leases.islands[island].done) - 1)
        done = whole(fields, "done")
        if done > self._leases.islands[island].done[worker]:
            self._event("done", island, worker, done)

    def _on_settle(self, fields: dict[str, Any]) -> None:
        """The leading island has done what was due at a stop."""
        self._member(fields)
        reason = None if fields.get("reason") is None else text(fields, "reason", _TEXT)
        self._event("settle", whole(fields, "step"), reason, table(fields, "judged", _JUDGED))

    def _on_gather(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The leading island wants what all others keep to be written; waits a while for it."""
        island, step = self._member(fields), whole(fields, "step")
        islands = there(self._leases.islands)
        if island not in islands:  # it is to go: what it keeps goes with it
            islands[island] = whole(fields, "generation")
        if self._gathering is None or not self._gathering.is_of(step, island, islands):
            self._gathering = Gathering(step, island, islands, len(self._leases.islands[island].done))
            self._changed.notify_all()
        mine = self._gathering
        self._changed.wait_for(lambda: self._gathering is not mine or mine.records is not None, _WAIT)
        if self._gathering is not mine or (records := mine.records) is None:
            return {}
        return {**mine.place(island), "records": records}

    def _on_kept(self, fields: dict[str, Any]) -> None:
        """A worker has written what it keeps."""
        island = self._member(fields)
        worker = whole(fields, "worker", 0, len(self._leases.islands[island].done) - 1)
        if self._gathering is not None:
            self._gathering.take(island, worker, whole(fields, "step"), table(fields, "record", _RECORD))
            self._changed.notify_all()

    def _on_seat(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A server listens, which knows the plan."""
        view = self._known_view()
        server = whole(fields, "server", 0, self._servers - 1)
        known = view.seats[server]
        generation = whole(fields, "generation", 0, known.generation + LIVES)
        address, recovered = text(fields, "address", _TEXT), flag(fields, "recovered")
        if generation < known.generation:
            raise ClusterLost(f"another process has taken the seat of server {server}")
        if (address, generation) != (known.address, known.generation):
            self._event("seat", server, address, generation, recovered)
        assert self._view is not None
        return {"view": self._view.record()}

    def _on_plan(self, fields: dict[str, Any]) -> dict[str, Any]:
        """For a server: the plan, once there is one, and the view as it is; waits a while."""
        self._changed.wait_for(lambda: self._plan is not None, _WAIT)
        if self._plan is None or self._view is None:
            return {}
        return {"plan": self._plan.record(), "view": self._view.record()}

    def _on_joined(self, fields: dict[str, Any]) -> None:
        """A primary has given a joining server some blocks."""
        view = self._known_view()
        server, generation = whole(fields, "server", 0, self._servers - 1), whole(fields, "generation")
        blocks = wholes(fields, "blocks", len(view.joining))
        if any(server in view.joining[block] for block in blocks):
            self._event("joined", server, generation, blocks)

    def _on_watch(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The view, once it is newer than what the asker knows, or after a while."""
        known = whole(fields, "known", -1)
        self._changed.wait_for(lambda: self._view is not None and self._view.number > known, _WAIT)
        return {"view": self._view.record()} if self._view is not None and self._view.number > known else {}

    # -- state ---------------------------------------------------------------------------------------------------

    def _member(self, fields: dict[str, Any]) -> int:
        """The island that asks, which is as its newest processes."""
        island = self._island(fields)
        if whole(fields, "generation") != self._leases.islands[island].generation:
            raise _fenced(island)
        return island

    def _island(self, fields: dict[str, Any]) -> int:
        return whole(fields, "island", 0, len(self._leases.islands) - 1)

    def _known_view(self) -> View:
        if self._view is None:
            raise InputError("there is no plan yet, of which this request speaks")
        return self._view

    def _leads(self, island: int) -> dict[str, Any] | None:
        """What an island has to do at a stop where it leads; the first one there does."""
        step = self._leases.stop
        generation = self._leases.islands[island].generation
        if step is None:
            return None
        if self._lead is not None and self._lead[2] == step:
            leader, life, _ = self._lead
            if self._leases.islands[leader].generation == life and leader != island:
                return None
        if self._leases.islands[island].leaves and self._lead != (island, generation, step):
            return None
        if self._lead != (island, generation, step):
            self._event("lead", island, generation, step)  # so that after this process's death no other leads as well
        return {"meet": step, "reason": self._leases.reason, "judged": self._judged}

    def _event(self, name: str, *values: Any) -> None:
        """Applies an event, and remembers it if it is one that can be applied."""
        before = self._view.number if self._view is not None else -1
        try:
            getattr(self, f"_take_{name}")(*values)
        except ClusterLost as error:
            self._fatal(error)
            raise
        self._remember(name, *values)
        changed = self._view is not None and self._view.number != before
        if changed or name == "settle":
            os.fsync(self._file.fileno())
        if self._events > _COMPACT:
            self._compact()
        self._changed.notify_all()

    def _remember(self, name: str, *values: Any) -> None:
        self._file.write(json.dumps([name, *values]).encode() + b"\n")
        self._events += 1

    def _recall(self) -> None:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):  # torn: whoever told it has no answer, and tells it again
            os.truncate(self._path, whole)
        for line in raw[:whole].splitlines():
            name, *values = json.loads(line)
            getattr(self, f"_take_{name}")(*values)
            self._events += 1

    def _compact(self) -> None:
        state = {
            "leases": self._leases.record(),
            "plan": self._plan.record() if self._plan is not None else None,
            "view": self._view.record() if self._view is not None else None,
            "judged": self._judged,
            "lead": self._lead,
            "begun": self._begun,
        }
        beside = self._path.with_suffix(".new")
        with open(beside, "wb") as file:
            file.write(json.dumps(["all", state]).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)
        self._file.close()
        self._file = self._opened()
        self._events = 1

    def _opened(self) -> io.FileIO:
        return io.FileIO(self._path, "a")

    def _take_all(self, state: dict[str, Any]) -> None:
        self._leases.load(state["leases"])
        self._plan = Plan.of(state["plan"]) if state["plan"] is not None else None
        self._view = View.of(state["view"]) if state["view"] is not None else None
        self._judged, self._begun = state["judged"], bool(state["begun"])
        self._lead = tuple(state["lead"]) if state["lead"] is not None else None

    def _take_lead(self, island: int, generation: int, step: int) -> None:
        self._lead = (island, generation, step)

    def _take_begun(self) -> None:
        self._begun = True

    def _take_plan(self, record: dict[str, Any]) -> None:
        self._plan = Plan.of(record)
        self._view = membership.first(self._places(self._plan), self._servers, len(self._leases.islands))

    def _take_enter(self, island: int, generation: int) -> None:
        self._gathering = None  # whoever asked asks again
        self._leases.enter(island, generation)
        assert self._view is not None
        self._view = membership.entered(self._view, island, generation)

    def _take_release(self, island: int) -> None:
        self._leases.release(island)

    def _take_admit(self, island: int) -> None:
        self._leases.admit(island)

    def _take_lease(self, island: int, number: int, count: int) -> None:
        for n in range(number, number + count):
            self._leases.lease(island, n)

    def _take_done(self, island: int, worker: int, count: int) -> None:
        self._leases.done(island, worker, count)

    def _take_end_soon(self, reason: str) -> None:
        self._leases.end_soon(reason)

    def _take_settle(self, step: int, reason: str | None, judged: dict[str, Any]) -> None:
        self._gathering = None
        self._leases.settle(step, reason)
        self._judged = judged

    def _take_seat(self, server: int, address: str, generation: int, recovered: bool) -> None:
        assert self._view is not None
        self._view = membership.seated(self._view, server, address, generation, recovered)

    def _take_joined(self, server: int, generation: int, blocks: list[int]) -> None:
        assert self._view is not None
        self._view = membership.joined(self._view, server, generation, blocks)


def _fenced(island: int) -> ClusterLost:
    return ClusterLost(f"other processes have taken the place of island {island}: this one may not go on")
