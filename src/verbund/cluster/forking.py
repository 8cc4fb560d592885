"""What a warm server does: forks workers on request, and tells who has ended."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from verbund.cluster import host, worker
from verbund.cluster.last_words import LastWords
from verbund.cluster.process import ProcessSpec
from verbund.cluster.supplies import same_files
from verbund.cluster.supply_child import SupplyChild
from verbund.comm.parent import adopt_orphans, die_with_parent, end_children
from verbund.comm.rendezvous import Meeting, dial
from verbund.comm.title import entitle
from verbund.comm.wire import Connection, WireError

_ORPHAN_SECONDS = 0.3
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_END_SECONDS = 5.0


def serve(asked: dict[str, Any]) -> None:
    """The life of a warm server.

    Args:
        asked: `meeting`, `number`, `orphan_grace`, `preload`; over several hosts also `address`, its own, and `folder`,
            where the command runs; and `keep`, where this host has what it gets from there even if it sees it.
    """
    meeting = Meeting.of(asked["meeting"])
    entitle("warm server")
    # Many workers have many connections each, and a shell's soft limit is low for the sake of programs that `select`.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.dup2(2, 1)  # standard output belongs to the command alone
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    adopt_orphans()
    try:
        connection = dial(meeting, "warm", asked["number"])
    except (OSError, WireError) as error:
        meeting.remove()  # the supervisor was killed before this process could start
        sys.exit(f"the command cannot be reached from this host: {error}" if meeting.folder is None else 1)
    children: dict[int, LastWords] = {}
    try:
        if "address" in asked:
            connection.send("facts", host.facts(asked["address"], None if asked.get("keep") else asked["folder"]))
        for module in asked["preload"]:
            importlib.import_module(module)
        _keep_compiled(asked.get("keep"))
        gc.collect()
        gc.freeze()
        _serve(connection, meeting, wake_read, children, asked.get("keep"))
    except WireError:
        _end(children, float(asked["orphan_grace"]))
    meeting.remove()


def _serve(
    connection: Connection, meeting: Meeting, wake: int, children: dict[int, LastWords], keep: str | None
) -> None:
    """Forks on request and reports who ended, until the supervisor is gone."""
    supply: SupplyChild | None = None
    while True:
        heard = [connection.fileno(), wake] + ([supply.fileno()] if supply is not None else [])
        readable, _, _ = select.select(heard, [], [])
        if supply is not None and supply.fileno() in readable:
            for told in supply.told():
                connection.send("supply", told)
            if supply.ended:
                supply = None
        if wake in readable:
            os.read(wake, 4096)
            for kind, fields in _changed(children):
                connection.send(kind, fields)
        while connection.ready():
            message = connection.receive()
            if message.kind == "leave":
                _end(children, 0.0)
                return
            if message.kind == "kill" and message.fields["pid"] in children:
                os.kill(message.fields["pid"], signal.SIGKILL)
            elif message.kind == "supply":
                if supply is not None:
                    supply.end()
                supply = SupplyChild(meeting, message.fields["trees"], _cache(keep), keep is not None, connection)
            elif message.kind == "same":
                told = message.fields
                same = keep is None and same_files(Path(told["folder"]), told["kind"], told["files"])
                connection.send("same", {"same": same})
            elif message.kind == "shared":
                marks = message.fields["marks"]
                connection.send("seen", {"missing": marks if keep is not None else host.unseen(marks)})
            elif message.kind == "fork":
                _fork(connection, meeting, ProcessSpec(**message.fields), children)


def _keep_compiled(keep: str | None) -> None:
    """What torch compiles is kept in this host's own cache where it does not see the command's."""
    folder = os.environ.get(_COMPILED)
    if folder is not None and (keep is not None or not Path(folder).parent.is_dir()):
        os.environ[_COMPILED] = str(_cache(keep) / "compiled")


def _cache(keep: str | None) -> Path:
    """Where this host keeps what it gets from the command."""
    from verbund.data.prepare import default_cache  # which takes its time

    return Path(keep) if keep is not None else default_cache()


def _fork(connection: Connection, meeting: Meeting, spec: ProcessSpec, children: dict[int, LastWords]) -> None:
    server = os.getpid()
    last_words = LastWords()
    pid = os.fork()
    if pid == 0:
        die_with_parent(server)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.close()
        entitle(spec.name)
        worker.run(meeting, spec, last_words)
    children[pid] = last_words
    connection.send("forked", {"pid": pid, "role": spec.role, "rank": spec.rank})


def _changed(children: dict[int, LastWords]) -> list[tuple[str, dict[str, Any]]]:
    """Who of the children has ended, and how, and who was stopped by a signal or goes on; adopted ones are only laid to
    rest."""
    news: list[tuple[str, dict[str, Any]]] = []
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return news
        if pid == 0:
            return news
        if os.WIFSTOPPED(raw) or os.WIFCONTINUED(raw):
            if pid in children:
                news.append(("stopped" if os.WIFSTOPPED(raw) else "continued", {"pid": pid}))
        elif (last_words := children.pop(pid, None)) is not None:
            doing, step = last_words.read()
            last_words.close()
            status = os.waitstatus_to_exitcode(raw)
            news.append(("exit", {"pid": pid, "status": status, "doing": doing, "step": step}))


def _end(children: dict[int, LastWords], grace: float) -> None:
    """Waits for the children to end by themselves, then kills them, and then whatever they left behind."""
    deadline = time.monotonic() + grace
    while children and time.monotonic() < deadline:
        _changed(children)
        time.sleep(0.05)
    for pid in children:
        os.kill(pid, signal.SIGKILL)  # a zombie at most: nobody else takes the children's pids
    # Helpers that clean up after their parent (multiprocessing's) get a moment for it.
    end_children(_ORPHAN_SECONDS, _END_SECONDS)
