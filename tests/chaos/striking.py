"""Striking processes of a run that goes on: who they are stands in the heads of its journals."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from processes import alive


@dataclass(frozen=True)
class Struck:
    """What was struck, with what, and when since the beginning."""

    name: str
    pid: int
    signal: signal.Signals
    at: float


def living(run: Path) -> dict[str, int]:
    """The processes of a run that live, besides its supervisor: `role rank` to pid."""
    found: dict[str, tuple[int, int]] = {}
    for journal in sorted(run.glob("journal/*.jsonl")):
        with open(journal, encoding="utf-8") as file:
            first = file.readline()
        if not first.endswith("\n"):
            continue
        head = json.loads(first)
        name = f"{head['role']} {head['rank']}"
        if head["role"] != "supervisor" and (head["generation"], head["life"]) >= found.get(name, (0, 0))[:2]:
            found[name] = (head["generation"], head["life"], head["pid"])
    return {name: pid for name, (*_, pid) in found.items() if alive(pid)}


class Striker(threading.Thread):
    """Strikes a run's processes as a schedule says, from when all of them are there.

    Args:
        run: its directory.
        count: how many processes it has besides the supervisor.
        schedule: (seconds since they are there, names of those that are struck, with what).
    """

    def __init__(self, run: Path, count: int, schedule: list[tuple[float, list[str], signal.Signals]]) -> None:
        super().__init__(name="striker", daemon=True)
        self._run, self._count, self._schedule = run, count, sorted(schedule, key=lambda strike: strike[0])
        self._over = threading.Event()
        self.struck: list[Struck] = []
        self.seen: set[int] = set()
        """The pids of all that were ever there."""

    def run(self) -> None:
        while len(self._look()) < self._count and not self._over.wait(0.01):
            pass
        began = time.monotonic()
        for at, names, what in self._schedule:
            while (left := at - (time.monotonic() - began)) > 0:
                if self._over.wait(min(left, 0.05)):
                    return
                self._look()
            here = self._look()
            for name in names:
                if (pid := here.get(name)) is not None:
                    try:
                        os.kill(pid, what)
                    except ProcessLookupError:
                        continue
                    self.struck.append(Struck(name, pid, what, round(time.monotonic() - began, 3)))
        while not self._over.wait(0.05):
            self._look()

    def end(self) -> None:
        """Strikes no more."""
        self._over.set()
        self.join()

    def _look(self) -> dict[str, int]:
        here = living(self._run)
        self.seen |= set(here.values())
        return here


def storm(
    seed: int, targets: list[str], strikes: int, within: tuple[float, float], stops: bool = True
) -> list[tuple[float, list[str], signal.Signals]]:
    """A schedule drawn from a seed: kills and, every third, stops."""
    random = Random(seed)
    return [
        (
            random.uniform(*within),
            [random.choice(targets)],
            signal.SIGSTOP if stops and random.random() < 1 / 3 else signal.SIGKILL,
        )
        for _ in range(strikes)
    ]


Schedule = list[tuple[float, list[str], signal.Signals]]
Launch = Callable[[], object]
