"""The local cluster: processes of this machine, forked from a warm server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verbund.cluster.forked import PRELOAD, ForkedCluster
from verbund.cluster.started import StartedServer
from verbund.comm.rendezvous import Meeting
from verbund.observe.memory import available_bytes


class LocalCluster(ForkedCluster):
    """Starts the warm server at once; `start` forks from it.

    Args:
        orphan_grace: seconds within which all processes have ended after this one was lost.
        preload: modules that the job needs besides, to be imported once.
        environment: variables of the processes; what the user has set stays as it is.
    """

    def __init__(
        self, orphan_grace: float = 30.0, preload: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        meeting = Meeting.create()
        assert meeting.folder is not None
        super().__init__(meeting, meeting.folder)
        settings = {"orphan_grace": orphan_grace, "preload": [*PRELOAD, *preload]}
        self.server = StartedServer(0, None, self.meeting, settings, environment or {})
        """The one warm server."""
        self._servers.append(self.server)

    @property
    def address(self) -> None:
        """Nobody comes from elsewhere."""

    def free_memory(self) -> dict[str, int | None]:
        """Of this machine."""
        return {"": available_bytes()}
