"""What a supervisor knows of each process: how long it may be silent, and who has brought all to a standstill."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbund.cluster.process import Cluster, Exit, Process
from verbund.cluster.silence import Pauses, allowed
from verbund.errors import ClusterLost, VerbundError
from verbund.job import Cluster as Limits

ADDING_UP = "adding up gradients"
"""What a worker does that waits for the others in a step's collective."""

_SUSPENDED_BEATS = 2
"""Heartbeats after which a process that is known to be stopped counts as lost."""


@dataclass
class Failure:
    """One process's end before its work was done."""

    process: str
    at: float
    error: VerbundError
    secondary: bool
    trace: str | None = None


@dataclass
class Watched:
    """A process that was started, and what it has told."""

    process: Process
    heard: float
    pauses: Pauses = field(default_factory=Pauses)
    doing: str = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    result: dict[str, Any] | None = None
    exit: Exit | None = None
    failed: bool = False
    connected: bool = True
    beaten: bool = False
    over: float | None = None
    """Since when only the news of its exit is missing."""
    killed: bool = False
    silence: tuple[ClusterLost, str] | None = None
    """That it gives no signs of life, and the words in it for what it did at its last one."""
    replaced: bool = False
    """Another process takes its place, or none needs to: how it ends does not matter any more."""
    leaves: bool = False
    """The next era is without it."""

    @property
    def name(self) -> tuple[str, int]:
        return self.process.spec.role, self.process.spec.rank


class Failed(Exception):
    """All failures of a run, the first cause first."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(str(failures[0].error))
        self.failures = failures

    @property
    def error(self) -> VerbundError:
        return self.failures[0].error


def patience(watched: Watched, living: Sequence[Watched], limits: Limits, cluster: Cluster) -> float:
    """How long a process may give no sign of life, in seconds.

    Args:
        watched: the process.
        living: all that are needed still.
        limits: the job's.
        cluster: which knows of some that they are stopped.
    """
    # It gives them from when it has loaded task and data, which may take as long as a step.
    if not watched.beaten:
        return limits.step_deadline
    soon = _SUSPENDED_BEATS * limits.heartbeat
    silent = time.monotonic() - watched.heard
    if silent > soon and cluster.suspended(watched.process):
        return min(soon, limits.lost_after)
    if silent <= limits.lost_after:
        return limits.lost_after
    host = watched.process.host
    return allowed(limits.lost_after, (other.pauses for other in living if other.process.host == host))


def standing_still(living: Sequence[Watched], deadline: float) -> tuple[Watched, ClusterLost] | None:
    """Whether a process does not go on, who is to blame, and what the user is told.

    Args:
        living: those that are needed still.
        deadline: seconds that anything may take.
    """
    now = time.monotonic()
    # Who serves waits for others, and is done only when they are.
    late = [w for w in living if now - w.since > deadline and not w.process.spec.serves]
    if not late:
        return None
    # Those that wait in a collective are not the cause where somebody else has not come to it.
    culprits = [w for w in late if w.doing != ADDING_UP] or [w for w in living if w.doing != ADDING_UP] or late
    names = ", ".join(f"{w.process.spec.name} ({w.doing}, step {w.step}, for {now - w.since:.0f} s)" for w in culprits)
    waited = "the others wait for " if len(culprits) < len(living) else ""
    fix = "If a step may take longer, raise `cluster.step_deadline`"
    if any(w.doing == "waiting for data" for w in culprits):
        fix = f"What reads the data hangs: `dataset()`, `augment()`, or the disk. {fix}"
    return culprits[0], ClusterLost(f"no progress for {deadline:.0f} s: {waited}{names}", fix=fix)


def death(watched: Watched, ended: Exit) -> ClusterLost:
    """That a process has ended before its work was done."""
    fix = "The kernel kills what uses too much memory: `dmesg` tells" if ended.status == -9 else None
    return ClusterLost(f"{watched.process} {ended} while {ended.doing} (step {ended.step})", fix=fix)


def unreachable(process: Process, told: Mapping[str, Any]) -> ClusterLost:
    """That a process does not reach another's machine, which this one does: else that would be lost by now."""
    return ClusterLost(
        f"{process} does not reach {told['address']}: nothing was acknowledged for {float(told['seconds']):.0f} s, "
        "though both reach this machine",
        where="network",
        fix="`verbund doctor JOB --network` measures every link; look at what lies between the two",
    )
