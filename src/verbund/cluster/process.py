"""What a cluster starts and watches: the contract between supervisor and cluster."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from verbund.comm.wire import Connection
from verbund.errors import ClusterLost


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    Args:
        role: what it is: `worker`, `preflight`, ….
        rank: its number within its role.
        world: how many of that role there are.
        entry: the function it runs, as `module:function` below `verbund.stage`; it gets a `Worker`.
        generation: the membership it belongs to.
        settings: plain JSON values for the entry.
    """

    role: str
    rank: int
    world: int
    entry: str
    generation: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass
class Process:
    """A started process and its connection to the supervisor."""

    spec: ProcessSpec
    pid: int
    connection: Connection


@dataclass(frozen=True)
class Exit:
    """A process that ended: its exit status, negative for a signal's number; what it did, and in which step."""

    pid: int
    status: int
    doing: str = "starting"
    step: int = 0

    def __str__(self) -> str:
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = f"signal {-self.status}"
        return f"was killed by {name}"


class Cluster(Protocol):
    """Where processes run; knows nothing of training."""

    def start(self, specs: list[ProcessSpec], timeout: float) -> list[Process]:
        """Starts processes and waits until each has said hello."""
        ...

    def fileno(self) -> int:
        """Readable when `exits` has something to tell."""
        ...

    def exits(self) -> Iterator[Exit]:
        """The processes that have ended since the last call; does not wait."""
        ...

    def kill(self, process: Process) -> None:
        """Ends a process that did not end by itself."""
        ...

    def abandon(self, processes: list[Process]) -> ClusterLost:
        """Gives up the wait for these processes' exits, ends all that is left, and says who is missing."""
        ...

    def close(self) -> None:
        """Ends whatever is left and cleans up."""
        ...
