"""The warm server: a process that has imported torch once and forks workers from itself.

Importing torch costs more than a second of one core; a fork of a process that has it costs milliseconds. The server
stays single-threaded, so that a fork is safe, and is the parent of all workers: they die with it, and it ends when its
supervisor does.

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

from verbund.cluster import worker
from verbund.cluster.process import ProcessSpec
from verbund.comm.parent import die_with_parent
from verbund.comm.rendezvous import Meeting, dial
from verbund.comm.wire import Connection, WireError


def main() -> None:
    folder, grace, *modules = sys.argv[1:]
    meeting = Meeting(Path(folder))
    os.dup2(2, 1)  # standard output belongs to the command alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    connection = dial(meeting, "warm", 0)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    try:
        _serve(connection, meeting, wake_read, children)
    except WireError:
        _end(children, float(grace))
    meeting.remove()


def _serve(connection: Connection, meeting: Meeting, wake: int, children: set[int]) -> None:
    """Forks on request and reports who ended, until the supervisor is gone."""
    while True:
        readable, _, _ = select.select([connection.fileno(), wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
            for pid, status in _reaped(children):
                connection.send("exit", {"pid": pid, "status": status})
        if connection.fileno() in readable:
            message = connection.receive()
            if message.kind == "leave":
                _end(children, 0.0)
                return
            spec = ProcessSpec(**message.fields)
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                die_with_parent(server)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.close()
                worker.run(meeting, spec)
            children.add(pid)
            connection.send("forked", {"pid": pid, "role": spec.role, "rank": spec.rank})


def _reaped(children: set[int]) -> list[tuple[int, int]]:
    ended = []
    for pid in list(children):
        try:
            done, raw = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            done, raw = pid, 0
        if done:
            children.discard(pid)
            ended.append((pid, os.waitstatus_to_exitcode(raw)))
    return ended


def _end(children: set[int], grace: float) -> None:
    """Waits for the children to end by themselves, then kills them."""
    deadline = time.monotonic() + grace
    while children and time.monotonic() < deadline:
        _reaped(children)
        time.sleep(0.05)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    while children:
        _reaped(children)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
