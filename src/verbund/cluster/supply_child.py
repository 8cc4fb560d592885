"""The process that gets a host's supply: a child of the warm server, which must not start threads nor wait."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbund.comm.parent import die_with_parent
from verbund.comm.rendezvous import Meeting
from verbund.comm.wire import Connection
from verbund.errors import RunFailed, VerbundError, text_of


class SupplyChild:
    """Starts at once; what it tells can be read from its pipe.

    Args:
        meeting: of the run.
        trees: what is missing; see `supplies.Tree.record`.
        cache: where this host keeps what comes.
        alone: whether it looks nowhere else.
        connection: the warm server's own, which the child closes.
    """

    def __init__(
        self,
        meeting: Meeting,
        trees: Sequence[Mapping[str, Any]],
        cache: Path,
        alone: bool,
        connection: Connection,
    ) -> None:
        server = os.getpid()
        self._pipe, writing = os.pipe2(os.O_CLOEXEC)
        self._rest = b""
        self.ended = self._done = False
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            die_with_parent(server)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            _supply(writing, meeting, trees, cache, alone)
        os.close(writing)

    def fileno(self) -> int:
        """Readable when it has told something."""
        return self._pipe

    def told(self) -> list[dict[str, Any]]:
        """What it has told since the last call; at its end at least how that came."""
        read = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + read).split(b"\n")
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._done = self._done or any("bytes" not in one for one in found)
        if not read:
            self.ended = True
            os.close(self._pipe)
            if not self._done:
                found.append({"error": RunFailed("the process that received task and data was killed").record()})
        return found

    def end(self) -> None:
        """Ends it before it is done; its other end is read no more."""
        if not self.ended:
            os.kill(self._pid, signal.SIGKILL)
            os.close(self._pipe)
            self.ended = True


def _supply(pipe: int, meeting: Meeting, trees: Sequence[Mapping[str, Any]], cache: Path, alone: bool) -> None:
    from verbund.cluster.supplying import Supplying

    def tell(**fields: Any) -> None:
        os.write(pipe, json.dumps(fields).encode() + b"\n")

    try:
        supplying = Supplying(meeting, cache, alone, lambda count: tell(bytes=count))
        tell(places=supplying.places(trees))
    except VerbundError as error:
        tell(error=error.record())
    except Exception as error:  # told by the warm server to the command, which names it as the cause
        what = f"{type(error).__name__}: {text_of(error)}"
        tell(error=RunFailed(f"task and data cannot be received: {what}").record())
    finally:
        os._exit(0)
