"""A process's line to the coordinator: its questions, and the newest view."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verbund.comm.wire import Call, Calls, Closed, Connection, Message, WireError
from verbund.errors import ClusterLost, RunFailed, VerbundError
from verbund.exchange.parameter_server.plan import Plan
from verbund.exchange.parameter_server.view import View

_ASK_SECONDS = 60.0
_TOLD = 8
"""Tellings whose acknowledgement is not waited for."""


@dataclass(frozen=True)
class Leased:
    """A ticket to work on; all tickets below `low` are done everywhere. Of one that is given `again` a push may have
    come from processes that are lost."""

    ticket: int
    low: int
    again: bool = False


@dataclass(frozen=True)
class Rest:
    """All rest after `step` steps, and this island does what is due.

    Args:
        step: how many are done.
        reason: why training ends here, as far as that is known.
        judged: what decides on its end: JSON values.
    """

    step: int
    reason: str | None
    judged: dict[str, Any]


@dataclass(frozen=True)
class Keep:
    """What this worker keeps between steps is to be written for the checkpoint of `step`, as part `place` of `of`."""

    step: int
    place: int
    of: int


@dataclass(frozen=True)
class End:
    """Training has ended after `step` steps."""

    step: int
    reason: str


class Coordination:
    """Questions to the coordinator, which may be another process after a while.

    Args:
        connect: makes a connection to whoever coordinates now, within so many seconds.
        deadline: seconds that others may take for what this process waits for.
    """

    def __init__(self, connect: Callable[[float], Connection], deadline: float) -> None:
        self._deadline = deadline
        self._quick = Calls(connect, "the coordinator")
        self._slow = Calls(connect, "the coordinator")  # for questions that wait there
        self._watching = Calls(connect, "the coordinator")
        self._told: deque[Call] = deque()
        self._who: dict[str, int] = {}
        self._view: View | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._trouble: VerbundError | None = None
        self._seen: list[Callable[[View], None]] = []
        self._thread: threading.Thread | None = None

    # -- workers -------------------------------------------------------------------------------------------------

    def enter(self, island: int, generation: int, plan: Plan) -> dict[str, Any]:
        """Says that an island's worker has come; what there is to know for it: `judged`, `rested`, and whether
        all blocks have `begun`.

        Raises:
            InputError: if others have another model.
            ClusterLost: if newer processes have taken the island's place.
        """
        self._who = {"island": island, "generation": generation}
        return self._ask("enter", {**self._who, "plan": plan.record()})

    def begun(self) -> None:
        """All blocks have their first values."""
        self._ask("begun", self._who)

    def lease(self, number: int, count: int, worker: int, done: int) -> list[Leased] | Rest | Keep | End:
        """The island's tickets from that number on, once the first may be done.

        Args:
            number: of those since the island entered.
            count: how many are wanted; there may be fewer.
            worker: of the island.
            done: of how many of them this worker's pushes are acknowledged.

        Raises:
            RunFailed: if others have not done in time what it waits for.
        """
        since = time.monotonic()
        while True:
            answer = self._wait(
                "lease", {**self._who, "number": number, "count": count, "worker": worker, "done": done}
            )
            if "tickets" in answer:
                low, again = int(answer["low"]), set(answer["again"])
                return [Leased(int(ticket), low, ticket in again) for ticket in answer["tickets"]]
            if "meet" in answer:
                return Rest(int(answer["meet"]), answer["reason"], answer["judged"])
            if "keep" in answer:
                return _keep(answer["keep"])
            if "end" in answer:
                return End(int(answer["step"]), str(answer["end"]))
            if self._closing:
                raise Closed("this process ends")
            if time.monotonic() - since > self._deadline:
                raise RunFailed(
                    f"no ticket within {self._deadline:.0f} s: all wait for {answer.get('waits_for')}",
                    fix="If a step may take longer, raise `cluster.step_deadline`",
                )

    def done(self, worker: int, count: int) -> None:
        """Says that this worker's part of the island's first so many tickets is acknowledged; does not wait."""
        fields = {**self._who, "worker": worker, "done": count}
        self._told.append(self._quick.start("done", fields, _ASK_SECONDS))
        while len(self._told) > _TOLD:
            _answer(self._told.popleft().result)

    def settle(self, step: int, reason: str | None, judged: dict[str, Any]) -> None:
        """What was due at a stop is done; with a reason training ends there."""
        self._ask("settle", {**self._who, "step": step, "reason": reason, "judged": judged})

    def gather(self, step: int) -> tuple[Keep, list[dict[str, Any]]]:
        """Has all other islands write what they keep, as this one leads a checkpoint; which part is this island's, and
        the records of what the others have written.

        Raises:
            RunFailed: if they have not in time.
        """
        since = time.monotonic()
        while time.monotonic() - since < self._deadline:
            answer = self._wait("gather", {**self._who, "step": step})
            if "records" in answer:
                return _keep(answer), answer["records"]
        raise RunFailed(f"other islands have not written within {self._deadline:.0f} s what they keep between steps")

    def kept(self, worker: int, step: int, record: dict[str, Any]) -> None:
        """Says what this worker has written of what it keeps."""
        self._ask("kept", {**self._who, "worker": worker, "step": step, "record": record})

    # -- servers -------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Plan, View]:
        """The plan, once the first worker has made it, and the view as it is.

        Raises:
            RunFailed: if nobody has made one in time.
        """
        since = time.monotonic()
        while True:
            if "plan" in (answer := self._wait("plan", {})):
                return Plan.of(answer["plan"]), View.of(answer["view"])
            if time.monotonic() - since > self._deadline:
                raise RunFailed(f"no worker has built the model within {self._deadline:.0f} s")

    def seat(self, server: int, generation: int, address: str, recovered: bool) -> View:
        """Says that a server listens.

        Raises:
            ClusterLost: if what it should hold is nowhere any more, or another process has its seat.
        """
        fields = {"server": server, "generation": generation, "address": address, "recovered": recovered}
        return View.of(self._ask("seat", fields)["view"])

    def joined(self, server: int, generation: int, blocks: Sequence[int]) -> None:
        """Says that a joining server has been given some blocks."""
        self._ask("joined", {"server": server, "generation": generation, "blocks": list(blocks)})

    # -- the view ------------------------------------------------------------------------------------------------

    def watch(self, seen: Callable[[View], None] = lambda _: None) -> None:
        """From now on this process knows the newest view; `seen` is told of each."""
        self._seen.append(seen)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="view", daemon=True)
            self._thread.start()

    def newest(self) -> View:
        """The newest view that is known here; waits for the first.

        Raises:
            RunFailed: if there is none in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._view is not None or self._trouble is not None, self._deadline)
            if self._trouble is not None:
                raise self._trouble
            if self._view is None:
                raise RunFailed(f"the coordinator has told of no servers within {self._deadline:.0f} s")
            return self._view

    def newer(self, than: int, seconds: float) -> View:
        """A view of a higher number than this; after so many seconds whichever is the newest."""
        with self._changed:
            self._changed.wait_for(lambda: self._knows(than) or self._trouble is not None, max(seconds, 0.0))
        return self.newest()

    def close(self, wait: bool = True) -> None:
        """Ends the line; who waits for an answer gets none.

        Args:
            wait: until its threads have ended.
        """
        self._closing = True
        for calls in (self._quick, self._slow, self._watching):
            calls.close(wait)

    def _knows(self, number: int) -> bool:
        return self._view is not None and self._view.number > number

    def _watch(self) -> None:
        known = -1
        while not self._closing:
            try:
                answer = self._watching.ask("watch", {"known": known}, self._deadline).fields
                if "view" not in answer:
                    continue
                view = View.of(answer["view"])
            except (WireError, VerbundError) as error:
                if self._closing:
                    return
                with self._changed:
                    lost = ClusterLost(f"the coordinator is gone: {error}")
                    self._trouble = error if isinstance(error, VerbundError) else lost
                    self._changed.notify_all()
                return
            known = view.number
            for seen in self._seen:
                seen(view)
            with self._changed:
                self._view = view
                self._changed.notify_all()

    def _ask(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        return _answer(lambda: self._quick.ask(kind, fields, _ASK_SECONDS)).fields

    def _wait(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        return _answer(lambda: self._slow.ask(kind, fields, _ASK_SECONDS)).fields


def _keep(told: dict[str, Any]) -> Keep:
    return Keep(int(told["step"]), int(told["place"]), int(told["of"]))


def _answer(ask: Callable[[], Message]) -> Message:
    try:
        return ask()
    except WireError as error:
        raise ClusterLost(f"the coordinator is gone: {error}") from None
