"""The warm server: a process that has imported torch once and forks workers from itself.

Importing torch costs more than a second of one core; a fork of a process that has it costs milliseconds. The server
stays single-threaded, so that a fork is safe, and is the parent of all workers: they die with it, and it ends when its
supervisor does. It adopts what workers leave behind (processes that a user's task has started), and ends that too.

Run as `python -m verbund.cluster.warm FOLDER GRACE MODULE…`.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from verbund.cluster import worker
from verbund.cluster.last_words import LastWords
from verbund.cluster.process import ProcessSpec
from verbund.comm.parent import adopt_orphans, die_with_parent
from verbund.comm.parent import children as living
from verbund.comm.rendezvous import Meeting, dial
from verbund.comm.wire import Connection, WireError

_ORPHAN_SECONDS = 0.3
_END_SECONDS = 5.0


def main() -> None:
    folder, grace, *modules = sys.argv[1:]
    meeting = Meeting(Path(folder))
    os.dup2(2, 1)  # standard output belongs to the command alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    adopt_orphans()
    try:
        connection = dial(meeting, "warm", 0)
    except (OSError, WireError):
        meeting.remove()  # the supervisor was killed before this process could start
        sys.exit(1)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    children: dict[int, LastWords] = {}
    try:
        _serve(connection, meeting, wake_read, children)
    except WireError:
        _end(children, float(grace))
    meeting.remove()


def _serve(connection: Connection, meeting: Meeting, wake: int, children: dict[int, LastWords]) -> None:
    """Forks on request and reports who ended, until the supervisor is gone."""
    while True:
        readable, _, _ = select.select([connection.fileno(), wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
            for ended in _reaped(children):
                connection.send("exit", ended)
        if connection.fileno() in readable:
            message = connection.receive()
            if message.kind == "leave":
                _end(children, 0.0)
                return
            spec = ProcessSpec(**message.fields)
            server = os.getpid()
            last_words = LastWords()
            pid = os.fork()
            if pid == 0:
                die_with_parent(server)
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.close()
                worker.run(meeting, spec, last_words)
            children[pid] = last_words
            connection.send("forked", {"pid": pid, "role": spec.role, "rank": spec.rank})


def _reaped(children: dict[int, LastWords]) -> list[dict[str, Any]]:
    """Who of the children has ended, and how; adopted ones are only laid to rest."""
    ended: list[dict[str, Any]] = []
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if (last_words := children.pop(pid, None)) is not None:
            doing, step = last_words.read()
            last_words.close()
            ended.append({"pid": pid, "status": os.waitstatus_to_exitcode(raw), "doing": doing, "step": step})


def _end(children: dict[int, LastWords], grace: float) -> None:
    """Waits for the children to end by themselves, then kills them, and then whatever they left behind."""
    deadline = time.monotonic() + grace
    while children and time.monotonic() < deadline:
        _reaped(children)
        time.sleep(0.05)
    for pid in children:
        os.kill(pid, signal.SIGKILL)  # a zombie at most: nobody else takes the children's pids
    # Helpers that clean up after their parent (multiprocessing's) get a moment for it.
    killing = time.monotonic() + _ORPHAN_SECONDS
    deadline = killing + _END_SECONDS
    while (left := living()) and time.monotonic() < deadline:
        _reaped(children)
        if time.monotonic() > killing:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.005)


if __name__ == "__main__":
    main()
