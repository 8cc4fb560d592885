"""A client's side of the rounds: what it is asked to do, in order, each step on disk before the next."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from verbund.comm.wire import Message
from verbund.errors import ClusterLost, InputError, Interrupted, RunFailed, VerbundError
from verbund.exchange.federated.policy import Policy
from verbund.job import Job
from verbund.stage.federated.desk import failure_of
from verbund.stage.federated.home import Home, JobState
from verbund.stage.federated.line import Line
from verbund.stage.federated.orders import Orders
from verbund.stage.federated.secure_part import Declined, SecurePart

_OWN = ("kept", "samples", "token")
"""What of an update is not told."""
_DELIVERIES = 4
"""How often an update is sent that is gone at the server when it is to be counted."""


class Conversation:
    """Talks to the server, in a thread of its own.

    Args:
        line: to the server.
        home: for the audit log.
        folder: of the job.
        name: of the client, which keys the order of its samples.
        policy: what the owner permits.
        job: what is trained.
        notify: tells the owner.
    """

    def __init__(
        self, line: Line, home: Home, folder: Path, name: str, policy: Policy, job: Job, notify: Callable[[str], None]
    ) -> None:
        self._line, self._home, self._policy, self._job = line, home, policy, job
        self._notify = notify
        self._state = JobState.kept(folder)
        self._number = number_of(name)
        exchange = job.strategy.exchange
        self._secure: SecurePart | None = None
        if exchange.secure is not None:
            self._secure = SecurePart(name, home, self._state, policy, exchange, line, self._do)
        self._lock = threading.Lock()
        self._orders = Orders()
        self._ending = False
        self.outcome: str | None = None
        """How the training ended: done, or stopped by the server; None while it goes on."""
        self.model: Path | None = None

    @property
    def counted(self) -> int:
        """Rounds in which the client's update counted."""
        return self._state.counted

    def begin(self, orders: Orders) -> None:
        """From now on other processes do the work."""
        with self._lock:
            self._orders = orders

    def end_processes(self) -> None:
        """No more orders come."""
        with self._lock:
            self._orders.end()

    def stop(self) -> None:
        """The processes are gone for good."""
        self._ending = True

    def give_up(self, error: VerbundError) -> None:
        """The processes failed too often."""
        self._ending = True
        with self._lock:
            self._orders.close(error)

    def hold(self, stopped: Callable[[], bool]) -> None:
        """Does what the server asks until the end.

        Raises:
            VerbundError: what ends this client's part.
        """
        self._line.stopped = lambda: self._ending or stopped()
        if self._state.pending is not None:
            self._deliver()
        while not self._ending:
            message = self._line.next()
            task = message.fields
            if self._state.pending is not None and task.get("do") not in ("secure", "wait"):
                self._deliver()  # the exchanges are over: does it count?
            match task.get("do"):
                case "train":
                    self._train(task)
                case "secure" if self._secure is not None:
                    self._answer(self._secure, task, message)
                case "evaluate":
                    self._evaluate(task)
                case "end":
                    self._end(task)
                    self._line.leave()
                    return
                case "failed":
                    self.outcome = "failed"
                    self._line.leave()
                    raise RunFailed(f"the server gave up: {str(task.get('why'))[:200]}", where="--server")
                case "wait":
                    continue
                case other:
                    what = f"the server asks for `{str(other)[:40]}`, which is no part of this job"
                    raise InputError(what, where="--server", fix="Install the same version of verbund on both sides")

    def _train(self, task: dict[str, Any]) -> None:
        round_, members = int(task["round"]), int(task["members"])
        if self._state.pending is not None:  # under secure aggregation, and told to the server just now
            return
        if problem := self._policy.round_problem(members, self._state.counted, datetime.now()):
            self._notify(f"round {round_} is declined: {problem}")
            self._home.note("declined", round=round_, why=problem.what, server=self._line.head)
            self._line.ask("report", {"round": round_, "state": "declined", "reason": problem.where})
            return
        content = self._state.content
        try:
            self._line.fetch(task["sha256"], int(task["size"]), content)
        except InputError as error:
            self._fail(round_, error)
            return
        released = self._state.release() if self._noisy else 0
        try:
            done = self._do(
                {
                    "order": "train",
                    "sha256": task["sha256"],
                    "round": round_,
                    "version": int(task["version"]),
                    "client": self._number,
                    "memory": str(self._state.memory) if self._state.memory.exists() else None,
                    "keep": str(self._state.next_memory),
                    "evaluate": self._told,
                    "released": released,
                    "members": members,
                }
            )
        except Interrupted:
            raise
        except ClusterLost as error:  # others take their places, and the server still waits for this client
            if self._noisy:
                self._state.release(-1)  # nothing of it has left
            self._home.note("lost", round=round_, error=error.record())
            self._notify(f"round {round_} begins anew here: {error}")
            return
        except VerbundError as error:
            self._fail(round_, error)
            return
        if (spent := done.get("spent")) is not None:
            self._state.release(-1)
            self._notify(f"round {round_} is declined: one more update would exceed the privacy budget. {spent}")
            self._home.note("declined", round=round_, why=f"privacy: {spent}", server=self._line.head)
            self._line.ask("report", {"round": round_, "state": "declined", "reason": "privacy.budget"})
            return
        facts = {**done["facts"], "round": round_, "seconds": done["seconds"]}
        self._state.trained(facts, bool(done["kept"]))
        self._deliver()

    def _deliver(self) -> None:
        """Sends the pending update, and hears whether it counts."""
        facts = self._state.pending
        assert facts is not None
        content, digest = self._state.content, facts["sha256"]
        told = {key: value for key, value in facts.items() if key not in _OWN}
        told["sha256"] = facts.get("token", digest)  # of an update that nobody sees not even the hash
        for _ in range(_DELIVERIES):
            if self._secure is None and content.whole(digest):
                self._line.send(digest, content)
            message = self._line.ask("update", told)
            if message.kind != "missing":
                break
        answer = message.fields
        if answer.get("final") is False and answer.get("counts") is True:
            return  # the sum is still to come
        if self._secure is not None:
            self._secure.forget()
        counts = answer.get("counts") is True
        why = "" if counts else f" does not count: {str(answer.get('why'))[:300]}"
        self._home.note(
            "round",
            round=facts["round"],
            version=facts["version"],
            update=digest,
            bytes=facts["bytes"],
            counts=counts,
            epsilon=facts.get("epsilon"),
            server=self._line.head,
        )
        self._state.settled(counts)
        sent = "in the sum" if "token" in facts and counts else f"{facts['bytes']} bytes"
        self._notify(f"round {facts['round']}: {sent} after {facts['seconds']:.1f} s{why}")

    def _answer(self, secure: SecurePart, task: dict[str, Any], message: Message) -> None:
        """Answers a message of secure aggregation, or says that it will not."""
        round_ = int(task["round"])
        try:
            if why := secure.answer(task, message):
                self._notify(f"round {round_}: the server has no use for this client's `{task['step']}`: {why[:300]}")
            return
        except Declined as declined:
            self._notify(f"round {round_} is declined: {declined.problem}")
            self._home.note("declined", round=round_, why=declined.problem.what, server=self._line.head)
            state, reason = "declined", declined.problem.where
        except (Interrupted, ClusterLost):
            raise
        except VerbundError as error:
            self._home.note("refused", round=round_, error=error.record(), server=self._line.head)
            self._notify(f"round {round_} is refused: {error}")
            state, reason = "failed", failure_of(error)
        secure.forget()
        self._line.ask("report", {"round": round_, "state": state, "reason": reason})

    def _fail(self, round_: int, error: VerbundError) -> None:
        """The owner hears all, the server only of what kind it was."""
        self._home.note("failed", round=round_, error=error.record(), trace=error.trace)
        self._notify(f"round {round_} failed: {error}{f'{chr(10)}{error.trace}' if error.trace else ''}")
        self._line.ask("report", {"round": round_, "state": "failed", "reason": failure_of(error)})

    def _evaluate(self, task: dict[str, Any]) -> None:
        state = None
        if self._told:
            self._line.fetch(task["sha256"], int(task["size"]), self._state.content)
            memory = str(self._state.memory) if self._state.memory.exists() else None
            order = {"order": "evaluate", "sha256": task["sha256"], "memory": memory, "evaluate": True}
            state = self._do(order)["state"]
        self._line.ask("metrics", {"version": int(task["version"]), "state": state})

    def _end(self, task: dict[str, Any]) -> None:
        if task.get("done"):
            self._line.fetch(task["sha256"], int(task["size"]), self._state.content)
            memory = str(self._state.memory) if self._state.memory.exists() else None
            path = self._state.folder / "model.safetensors"
            order = {"order": "model", "sha256": task["sha256"], "memory": memory, "path": str(path), "evaluate": False}
            self._do(order)
            self.model = path
        self.outcome = "done" if task.get("done") else "stopped"
        self._home.note("ended", done=bool(task.get("done")), server=self._line.head)

    @property
    def _noisy(self) -> bool:
        """Whether nothing leaves this client without noise."""
        return self._job.strategy.exchange.privacy.kind == "local"

    @property
    def _told(self) -> bool:
        """Whether the server hears of metrics."""
        noisy = self._job.strategy.exchange.privacy.kind in ("local", "distributed")
        return self._policy.metrics and self._job.data.validation_fraction > 0 and not noisy

    def _do(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            orders = self._orders
        return orders.do(order, self._job.strategy.exchange.round.deadline)


def number_of(name: str) -> int:
    """A client's number, which keys the order of its samples with seed and round."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
