"""What an owner permits: checked at the client, before any code of a job runs and before each round."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from verbund.errors import JobError, Problem
from verbund.job.problems import problems
from verbund.job.section import Positive, Section, listed

_HEX = frozenset("0123456789abcdef")


def _task(value: str) -> str:
    if value != "*" and (len(value) != 64 or not _HEX.issuperset(value)):
        raise ValueError(f"`{value}` is neither a SHA-256 in hexadecimal digits nor `*`")
    return value


def _hours(value: str) -> str:
    _span(value)
    return value


def _key(value: str) -> str:
    if len(value) != 64 or not _HEX.issuperset(value):
        raise ValueError(f"`{value[:80]}` is no public key: 64 hexadecimal digits, as `verbund federate identity` says")
    return value


Tasks = Annotated[list[Annotated[str, AfterValidator(_task)]], BeforeValidator(listed)]
Key = Annotated[str, AfterValidator(_key)]
Peers = dict[str, Key]
Hours = Annotated[list[Annotated[str, AfterValidator(_hours)]], BeforeValidator(listed)]


class Policy(Section):
    """An owner's policy file."""

    tasks: Tasks = []
    """SHA-256 of each task file whose code may run here; `*`: any, from a server that is trusted with that."""
    minimum_cohort: Positive = 2
    """Clients that must take part in a round besides and with this one: the mean of one is its own update."""
    rounds: Positive | None = None
    """Rounds of one job that may be taken part in."""
    hours: Hours = []
    """Times of the day, local, at which it may be trained, such as `20:00-06:00`; none: always."""
    secure_aggregation: bool = False
    """Whether the server may see no single update."""
    minimum_neighbours: Positive = 2
    """Under secure aggregation: others that each client of a round must have its secrets divided among."""
    peers: Peers = {}
    """Under secure aggregation: by name the public keys of those who may take part, as the owners have told each other
    (`verbund federate identity`). None: whoever is enrolled, with the key that was seen first."""
    epsilon: Annotated[float, Field(gt=0.0)] | None = None
    """Privacy budget: a job must have differential privacy, and a budget of no more."""
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """At which the budget is meant: the job's must not be larger."""
    sample_counts: bool = True
    """Whether the server may learn how many samples are trained on; else the job must weigh all clients alike."""
    metrics: bool = True
    """Whether sums of metrics over the own validation part may be told."""

    @staticmethod
    def read(path: Path | None) -> Policy:
        """The policy in a file; without a file, what holds where none is given.

        Raises:
            JobError: with all that is wrong with it.
        """
        if path is None:
            return Policy()
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise JobError([Problem(str(path), f"the policy cannot be read: {error}")]) from None
        try:
            return Policy.model_validate(raw)
        except ValidationError as error:
            found = problems(error, Policy, raw)
            named = [Problem(f"{path}, {key}" if key else str(path), p.what, p.fix) for key, p in found]
            raise JobError(named) from None

    def job_problems(self, facts: Mapping[str, Any]) -> list[Problem]:
        """Why this job is not taken part in.

        Args:
            facts: `task` (SHA-256 of its task file), `task_at` (where it can be read), `secure` (whether aggregation
                is), `epsilon` and `delta` (its privacy budget; None if it has none), `weighted` (whether the server
                learns sample counts).
        """
        found = []
        if "*" not in self.tasks and facts["task"] not in self.tasks:
            found.append(
                Problem(
                    "policy, tasks",
                    f"the task file with the SHA-256 {facts['task']} is not permitted",
                    f'Read {facts["task_at"]}; if its code may run here, add `tasks = ["{facts["task"]}"]`',
                )
            )
        if self.secure_aggregation and not facts["secure"]:
            what = "the job has no secure aggregation: the server would see this client's update"
            found.append(Problem("policy, secure_aggregation", what))
        if self.epsilon is not None:
            budget = facts["epsilon"]
            if budget is None:
                found.append(Problem("policy, epsilon", "the job has no differential privacy with a budget"))
            elif budget > self.epsilon or (facts["delta"] or 1.0) > self.delta:
                what = f"the job's privacy budget is ε {budget:g} at δ {facts['delta']:g}"
                found.append(Problem("policy, epsilon", f"{what}; permitted is ε {self.epsilon:g} at δ {self.delta:g}"))
        if not self.sample_counts and facts["weighted"]:
            what = "the job weighs clients by their samples, whose number may not be told"
            found.append(Problem("policy, sample_counts", what, 'Ask for `strategy.exchange.rule.weights = "uniform"`'))
        return found

    def secure_problem(self, keys: Mapping[str, str], known: Mapping[str, str], neighbours: int) -> Problem | None:
        """Why no part is taken in a secure round, if so.

        Args:
            keys: by name the public keys of the cohort, as the server tells them.
            known: those of them that were seen before.
            neighbours: how many of the others each client divides its secrets among.
        """
        if len(keys) < self.minimum_cohort:
            return Problem("policy, minimum_cohort", f"it has {len(keys)} clients, fewer than {self.minimum_cohort}")
        if neighbours < self.minimum_neighbours:
            what = f"a client's secrets are divided among {neighbours} others, fewer than {self.minimum_neighbours}"
            return Problem("policy, minimum_neighbours", what)
        for name, key in keys.items():
            if self.peers and name not in self.peers:
                return Problem("policy, peers", f"`{name}` is in it, whom the policy does not name")
            if key != (expected := self.peers.get(name, known.get(name, key))):
                what = f"the server shows another public key of `{name}`, {key[:16]}… for {expected[:16]}…"
                fix = "Ask its owner, not the server; a key that is right goes into the policy's `peers`"
                return Problem("policy, peers", what, fix)
        return None

    def round_problem(self, cohort: int, rounds: int, now: datetime) -> Problem | None:
        """Why a round is not taken part in, if so.

        Args:
            cohort: clients that were asked.
            rounds: of this job that were taken part in so far.
            now: local time.
        """
        if cohort < self.minimum_cohort:
            return Problem(
                "policy, minimum_cohort", f"the round has {cohort} clients, fewer than {self.minimum_cohort}"
            )
        if self.rounds is not None and rounds >= self.rounds:
            return Problem("policy, rounds", f"{rounds} rounds were taken part in, which is all that are permitted")
        if self.hours and not any(_within(span, now) for span in self.hours):
            return Problem("policy, hours", f"it is {now:%H:%M}, and training is permitted at {', '.join(self.hours)}")
        return None


def _span(text: str) -> tuple[int, int]:
    """Minutes of the day from which and before which."""
    try:
        begin, end = (part.strip().split(":") for part in text.split("-"))
        (from_hour, from_minute), (to_hour, to_minute) = (list(map(int, begin)), list(map(int, end)))
    except ValueError:
        raise ValueError(f"`{text}` is no time of the day such as `20:00-06:00`") from None
    if not (0 <= from_hour < 24 and 0 <= to_hour <= 24 and 0 <= from_minute < 60 and 0 <= to_minute < 60):
        raise ValueError(f"`{text}` is no time of the day such as `20:00-06:00`")
    return from_hour * 60 + from_minute, to_hour * 60 + to_minute


def _within(text: str, now: datetime) -> bool:
    begin, end = _span(text)
    minute = now.hour * 60 + now.minute
    return begin <= minute < end if begin <= end else minute >= begin or minute < end
