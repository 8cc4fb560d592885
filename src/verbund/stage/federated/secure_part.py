"""A client's part in secure rounds: its answers to the server's messages, and what it refuses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verbund.comm.wire import Message
from verbund.errors import ClusterLost, InputError, Problem
from verbund.exchange.federated.content import PART_BYTES
from verbund.exchange.federated.policy import Policy
from verbund.job import Exchange
from verbund.stage.federated.home import Home, JobState
from verbund.stage.federated.line import Line

if TYPE_CHECKING:
    from verbund.exchange.federated.secure import Client

_DELIVERIES = 4
_GONE = "the keys of these exchanges are gone with the process that had made them"
_TOLD = ("step", "fields", "run", "number", "round", "keys", "length", "headroom")


class Declined(Exception):
    """The owner's policy does not permit a round."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class SecurePart:
    """Answers a server's messages in the rounds of one job.

    The keys of a round live in this process alone: who is started again has dropped out of the exchanges that were
    under way, and takes part in the next ones. What is on disk says which those are.

    Args:
        name: of the client.
        home: its folder, with its identity and the public keys that it has seen.
        state: of the job; its pending update is what is added up.
        policy: what the owner permits.
        exchange: the job's settings.
        line: to the server.
        do: has the processes do an order.
    """

    def __init__(
        self,
        name: str,
        home: Home,
        state: JobState,
        policy: Policy,
        exchange: Exchange,
        line: Line,
        do: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._name, self._home, self._state, self._policy = name, home, state, policy
        self._exchange, self._line, self._do = exchange, line, do
        self._client: Client | None = None
        self._number = 0
        self._vector: Path | None = None

    def answer(self, task: dict[str, Any], message: Message) -> str:
        """Answers one message of the server; why the answer is of no use to it, if it is not.

        Raises:
            Declined: if the owner's policy does not permit the round.
            ServerCheated: if the message would let the server learn more than the sum.
            VerbundError: if what this client has cannot be added up.
        """
        if not all(key in task for key in _TOLD) or not isinstance(task["fields"], dict):
            raise InputError("a message of secure aggregation is not what it is said to be")
        if task["step"] == "invite":
            self._begin(task)
        elif self._client is None or task["number"] != self._number:
            raise Declined(Problem("restarted", _GONE))
        assert self._client is not None
        if task["step"] == "survivors":
            self._check_survivors(message)
        sent = self._client.receive(Message(task["step"], task["fields"], message.arrays))
        if sent.kind == "advertise":
            self._state.begin_secure(str(task["run"]), self._number)
        if sent.kind == "masked" and self._exchange.privacy.kind == "distributed":
            self._state.release()  # from now on the sum may be known that it is in
        if sent.kind == "reveal":
            self._state.reveal(str(task["run"]), int(task["round"]))
        return self._send(int(task["round"]), sent.kind, sent.packed())

    def forget(self) -> None:
        """Ends what is under way and erases its secrets."""
        if self._client is not None:
            self._client.erase()
        self._client = None
        if self._vector is not None:
            self._vector.unlink(missing_ok=True)
            self._vector = None

    def _begin(self, task: dict[str, Any]) -> None:
        from verbund.exchange.federated.secure import Client, Identity, Round
        from verbund.exchange.federated.secure.exchanges import terms_of

        self.forget()
        run, number, round_ = str(task["run"]), int(task["number"]), int(task["round"])
        keys = _keys(task["keys"])
        pending, secure = self._state.pending, self._exchange.secure
        assert secure is not None
        if run != self._line.head.log:
            raise InputError("the server speaks of another log than that whose heads it tells")
        if pending is None or pending["round"] != round_:
            raise Declined(Problem("restarted", f"there is no update for round {round_}"))
        if self._state.revealed[0] == run and self._state.revealed[1] >= round_:
            why = "shares were revealed in this round; the difference of two of its sums could be a single client's"
            raise Declined(Problem("revealed", why))
        before, last = self._state.begun
        after = last if before == run else -1
        if number <= after:
            raise Declined(Problem("restarted", _GONE))
        told = {"order": "encode", "sha256": pending["sha256"], "clients": len(keys), "samples": pending["samples"]}
        try:
            encoded = self._do({**told, **_asked(task), "released": self._state.released})
        except ClusterLost as error:  # others take their places
            raise Declined(Problem("processes", str(error))) from None
        if (spent := encoded.get("spent")) is not None:
            raise Declined(Problem("privacy.budget", f"one more sum would exceed the privacy budget. {spent}"))
        self._vector = self._state.content.path(encoded["sha256"])
        terms = terms_of(run, keys, secure, encoded["length"], encoded["headroom"])
        self._check_peers(keys, Round(terms, number, tuple(sorted(keys))).near.degree)
        identity = Identity.of(self._home.identity.path.read_text(encoding="ascii"))
        roster = {name: bytes.fromhex(key) for name, key in keys.items()}
        contribution = _file(self._vector)
        self._client = Client(self._name, identity, roster, terms, contribution, encoded["weight"], after)
        self._number = number

    def _check_peers(self, keys: dict[str, str], neighbours: int) -> None:
        known = self._home.peers()
        if problem := self._policy.secure_problem(keys, known, neighbours):
            raise Declined(problem)
        if new := {name: key for name, key in keys.items() if name not in known}:
            self._home.note("peers", server=self._line.head, keys=new)
            self._home.pin_peers(new)

    def _check_survivors(self, message: Message) -> None:
        many = int(np.count_nonzero(message.arrays.get("survived", np.zeros(0))))
        if many < self._policy.minimum_cohort:
            what = f"{many} clients are left in it, fewer than {self._policy.minimum_cohort}"
            raise Declined(Problem("policy, minimum_cohort", what))

    def _send(self, round_: int, step: str, packed: bytes) -> str:
        digest = hashlib.sha256(packed).hexdigest()
        content = self._state.content
        arrays = {"message": np.frombuffer(packed, np.uint8)} if len(packed) <= PART_BYTES else {}
        if not arrays:
            content.put(packed)
        for _ in range(_DELIVERIES):
            if not arrays and not self._line.send(digest, content):
                break  # nobody waits for it any more
            told = {"round": round_, "number": self._number, "step": step, "sha256": digest}
            answer = self._line.ask("secure", told, None, **arrays)
            if answer.kind != "missing":
                return str(answer.fields.get("why") or "")
        return "nobody waits for it any more"


def _asked(task: dict[str, Any]) -> dict[str, Any]:
    """What the server says besides of how vectors are made."""
    clip = task.get("clip")
    if clip is not None and not (isinstance(clip, float) and math.isfinite(clip) and clip > 0):
        raise InputError("the server speaks of a clipping norm that is no positive number")
    return {"clip": clip, "round": int(task["round"])}


def _keys(given: Any) -> dict[str, str]:
    """By name the public keys of a cohort.

    Raises:
        InputError: if they are not that.
    """
    known = isinstance(given, dict) and all(isinstance(key, str) and len(key) == 64 for key in given.values())
    try:
        return {str(name): bytes.fromhex(key).hex() for name, key in given.items()} if known else _no_keys()
    except ValueError:
        return _no_keys()


def _no_keys() -> dict[str, str]:
    raise InputError("the server's list of public keys is none")


def _file(path: Path) -> Any:
    """What masks the whole numbers in a file."""
    from verbund.exchange.federated.secure import as_words

    def contribution(masks: Any) -> Any:
        return masks.apply(as_words(np.frombuffer(path.read_bytes(), "<i8"), masks.word))

    return contribution
