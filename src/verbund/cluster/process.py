"""What a cluster starts and watches: the contract between supervisor and cluster."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verbund.cluster.supplies import Supplies
from verbund.comm.wire import Connection
from verbund.errors import ClusterLost
from verbund.job import Job


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
        host: the number of the host where it must run; None: where the cluster places it.
        place: its number among those of its role on its host, set by the cluster.
        neighbours: how many of them are there, itself among them; set by the cluster where it is 0.
        residents: how many processes of any role are there, likewise.
        life: how many processes had this role and rank before it in this generation.
        serves: whether it works for others: it ends when all who do not have ended, being told to `finish`.
        address: its host's own address, where processes of several hosts meet; None: all are on this machine.
    """

    role: str
    rank: int
    world: int
    entry: str
    generation: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    host: int | None = None
    place: int = 0
    neighbours: int = 0
    residents: int = 0
    address: str | None = None
    life: int = 0
    serves: bool = False

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
    host: int = 0
    """The number of its host in the cluster."""

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from all others: pids are a host's own."""
        return self.host, self.pid

    def __str__(self) -> str:
        on = f" on {self.spec.address}" if self.spec.address else ""
        return f"{self.spec.name} (pid {self.pid}{on})"


@dataclass(frozen=True)
class Exit:
    """A process that ended: its exit status, negative for a signal's number; what it did, and in which step."""

    pid: int
    status: int
    doing: str = "starting"
    step: int = 0
    host: int = 0
    lost: ClusterLost | None = None
    """Its end was not seen: what it depended on is lost."""

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

    @property
    def address(self) -> str | None:
        """This machine's, at which its processes dial it; None where none come from elsewhere."""
        ...

    @property
    def scratch(self) -> Path:
        """A folder that all its processes see, for what lasts no longer than the cluster."""
        ...

    @property
    def lost(self) -> ClusterLost | None:
        """Why no process can be started any more, if so."""
        ...

    def settled(self, job: Job) -> Job:
        """The job with the hosts that there are; waits until there are enough of them for it.

        Before each start: hosts that were lost have been replaced by others then.

        Raises:
            ClusterLost: if there are not, within `cluster.join_within`.
            InputError: if the job cannot run on them.
        """
        ...

    def placed(self, world: int) -> list[int]:
        """The host's number for each of so many workers."""
        ...

    def free_memory(self) -> dict[str, int | None]:
        """Bytes that are free on each host, by its name; None where it is not known."""
        ...

    @property
    def apart(self) -> list[str]:
        """The hosts that do not see all folders that were shared."""
        ...

    def share(self, folders: Sequence[Path]) -> None:
        """Lets processes on all hosts use these folders as `Worker.location` gives them, whether hosts see them or not.

        What such folders have of a run can be read and written from other hosts; see `FileService`.
        """
        ...

    def supply(self, supplies: Supplies) -> None:
        """Sees to it that processes on all hosts find these files; waits until that is so. Once more changes nothing.

        Raises:
            InputError: if a host has no room for them, or cannot write them.
            ClusterLost: if a host is lost meanwhile, or nothing more comes there.
        """
        ...

    def start(self, specs: list[ProcessSpec], timeout: float) -> list[Process]:
        """Starts processes and waits until each has said hello."""
        ...

    def begin(self, specs: list[ProcessSpec], timeout: float) -> Any:
        """Starts processes and does not wait; what it gives is for `poll` and `give_up`."""
        ...

    def poll(self, starting: Any) -> list[Process] | None:
        """The processes that were begun, once each has said hello; None: not yet.

        Raises:
            ClusterLost: if they cannot all come any more; then none is left.
        """
        ...

    def give_up(self, starting: Any) -> None:
        """Ends what was begun and is not wanted any more."""
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

    def replaced(self, host: int) -> bool:
        """Whether another machine has taken the place of a lost host, under its number; does not wait."""
        ...

    def suspended(self, process: Process) -> bool:
        """Whether a process is known to be stopped by a signal."""
        ...

    def abandon(self, processes: list[Process]) -> ClusterLost:
        """Gives up the wait for these processes' exits, ends all that is left, and says who is missing."""
        ...

    def close(self) -> None:
        """Ends whatever is left and cleans up."""
        ...
