"""A process's own side of its supervision: signs of life, requests to stop, the report of how it ended."""

from __future__ import annotations

import importlib
import itertools
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from verbund.cluster.last_words import LastWords
from verbund.cluster.membership import Era
from verbund.cluster.process import ProcessSpec
from verbund.cluster.supplies import APART, named_by_owner
from verbund.comm.files import Line, Location, Remote
from verbund.comm.rendezvous import Meeting, dial
from verbund.comm.wire import Array, Closed, Connection, Deadline, Message, WireError
from verbund.errors import ClusterLost, RunFailed, VerbundError, shortened, text_of

_TURN = 0.02
_LOOK_SECONDS = 0.5
_UNREACHABLE = 1.5
"""Times `cluster.lost_after`, within which the supervisor notices a machine that nobody reaches."""
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Dismissed(Exception):
    """This worker is no member of the newest era: its work is done."""


class Worker:
    """What an entry gets: who it is, its settings, and the line to its supervisor.

    A thread of its own sends signs of life and listens. When the supervisor is lost, `stopping` becomes true so that
    the step in progress is the last, and the process ends after `orphan_grace` seconds whatever it is doing.
    """

    def __init__(self, meeting: Meeting, spec: ProcessSpec, connection: Connection, last_words: LastWords) -> None:
        self.meeting = meeting
        self.spec = spec
        self.settings = spec.settings
        self.stopping = False
        self.orphaned = False
        self.born = time.monotonic_ns()
        self.hears: Callable[[Message], None] = lambda _: None
        """Is called by the listening thread with every message of the supervisor; must be quick."""
        self.cut: Callable[[], None] = lambda: None
        """Called by that thread when a machine is gone: what goes on with peers there does not break by itself."""
        self.stalled: Callable[[], dict[str, float]] = dict
        """By address of a peer the seconds for which its machine has acknowledged nothing; asked by that thread."""
        self.at_end: list[Callable[[], None]] = []
        """Called before the process ends, however it ends short of a kill; each must be quick."""
        self.joins = bool(spec.settings.get("joins"))
        """Whether the others have begun without it."""
        self.era = Era(-1, ()) if self.joins else Era(0, tuple(range(spec.world)))
        """The newest membership that this worker knows of."""
        self._regrouped = threading.Condition()
        self._files: Line | None = None
        self._connection = connection
        self._asked: dict[int, queue.SimpleQueue[Message | None]] = {}
        self._questions = itertools.count()
        self._doing = ("starting", 0, time.monotonic())
        self._last_words = last_words
        self._listening = threading.Thread(target=self._listen, name="supervision", daemon=True)

    @property
    def address(self) -> str:
        """Where the others reach this process: its host's own address, or loopback if all are on one."""
        return self.spec.address or "127.0.0.1"

    def location(self, path: str) -> Location:
        """A file or folder of the run, by the path that its owner has for it. Not before `supervise`: where this host
        does not see the folder, a line to the owner is made, with a thread of its own."""
        apart = self.settings.get(APART, ())
        if not any(Path(path).is_relative_to(folder) for folder in apart):
            return Path(path)
        if self._files is None:
            self._files = Line(self.meeting)
        return Remote(self._files, path)

    def supervise(self) -> None:
        """Starts the signs of life. Not before loader processes were forked: a fork wants a single thread."""
        self._listening.start()

    def doing(self, what: str, step: int) -> None:
        """Says what this process does from now on; what a message names when it does not go on."""
        self._doing = (what, step, time.monotonic())
        self._last_words.write(what, step)

    def send(self, kind: str, **fields: Any) -> None:
        """Tells the supervisor something; a lost supervisor is noticed by the listening thread."""
        try:
            self._connection.send(kind, fields)
        except WireError:
            self.stopping = True

    def mention(self, kind: str, **fields: Any) -> None:
        """Tells the supervisor something that may be left out while it stands still, so that the work need not."""
        try:
            if self._connection.roomy():
                self._connection.send(kind, fields)
        except WireError:
            self.stopping = True

    def later_era(self, than: int, timeout: float) -> bool:
        """Waits for an era after that of number `than`, and who joins for one of which it is a member; whether it has
        come, within so many seconds."""

        def come() -> bool:
            return self.era.number > than and (not self.joins or self.spec.rank in self.era.members)

        with self._regrouped:
            return self._regrouped.wait_for(lambda: come() or self.orphaned, timeout) and not self.orphaned

    def leave(self) -> None:
        """Tells the supervisor that this process was asked to end. For a signal's handler: the line may be in use."""
        threading.Thread(target=self.send, args=("leaving",), daemon=True).start()

    def ask_in(self, era: int) -> Callable[[str, dict[str, Any], dict[str, Array], float], Message]:
        """`ask` that waits only as long as the era lasts."""
        return lambda kind, fields, arrays, timeout: self.ask(kind, fields, arrays, timeout, era)

    def ask(
        self, kind: str, fields: dict[str, Any], arrays: dict[str, Array], timeout: float, era: int | None = None
    ) -> Message:
        """The supervisor's answer. Only after `supervise`, whose thread receives it.

        Args:
            kind: what is asked.
            fields: JSON values.
            arrays: what travels raw.
            timeout: seconds.
            era: after which nobody waits any more.

        Raises:
            Deadline: if there is none within `timeout` seconds, or the era is over.
            WireError: if the supervisor is gone.
        """
        number = next(self._questions)
        answers = self._asked[number] = queue.SimpleQueue()
        try:
            self._connection.send(kind, {**fields, "number": number}, None, **arrays)
            answer = self._answered(answers, timeout, era)
        except queue.Empty:
            raise Deadline(f"no answer within {timeout:.0f} s") from None
        finally:
            del self._asked[number]
        if answer is None:
            raise Closed("the supervisor is gone")
        return answer

    def _answered(self, answers: queue.SimpleQueue[Message | None], timeout: float, era: int | None) -> Message | None:
        until = time.monotonic() + timeout
        while era is not None and era == self.era.number and time.monotonic() < until:
            try:
                return answers.get(timeout=_TURN)
            except queue.Empty:
                continue
        return answers.get(timeout=timeout) if era is None else answers.get_nowait()

    def _listen(self) -> None:
        beat = float(self.settings.get("heartbeat", 2.0))
        unreachable = _UNREACHABLE * float(self.settings.get("lost_after", 30.0))
        looks = time.monotonic()
        while True:
            what, step, since = self._doing
            try:
                if time.monotonic() > looks:
                    looks = time.monotonic() + _LOOK_SECONDS
                    for address, seconds in self.stalled().items():
                        if seconds > unreachable:
                            self._connection.send("unreachable", {"address": address, "seconds": seconds})
                if self._connection.roomy():
                    self._connection.send(
                        "beat", {"doing": what, "step": step, "seconds": round(time.monotonic() - since, 3)}
                    )
                message = self._connection.receive(beat) if self._connection.ready(beat) else None
            except Deadline:
                continue
            except WireError:
                break
            if message is None:
                continue
            if message.kind == "stop":
                self.stopping = True
            elif message.kind == "regroup":
                # That of the groups there are now: whoever hears of the era makes others, which are not to be cut.
                cut = self.cut if message.fields.get("cut") else None
                with self._regrouped:
                    self.era = Era(int(message.fields["era"]), tuple(map(int, message.fields["members"])))
                    self._regrouped.notify_all()
                if cut is not None:
                    cut()
            elif message.kind == "answer":
                if (answers := self._asked.get(message.fields["number"])) is not None:
                    answers.put(message)
            elif message.kind == "end":
                self._finish()
                os._exit(1)
            self.hears(message)
        for answers in list(self._asked.values()):
            answers.put(None)
        self.orphaned = self.stopping = True
        with self._regrouped:
            self._regrouped.notify_all()
        time.sleep(float(self.settings.get("orphan_grace", 30.0)))
        self._finish()
        os._exit(1)

    def _finish(self) -> None:
        for action in self.at_end:
            try:
                action()
            except Exception as error:
                os.write(2, f"verbund: {self.spec.name}: {error}\n".encode())


def run(meeting: Meeting, spec: ProcessSpec, last_words: LastWords) -> NoReturn:
    """The life of a forked process: runs the spec's entry and reports its result or first error."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            connection = dial(meeting, spec.role, spec.rank)
        except (OSError, WireError) as error:  # the supervisor was killed in the meantime, perhaps
            last_words.write(f"connecting ({error})", 0)
            os._exit(status)
        worker = Worker(meeting, spec, connection, last_words)
        signal.signal(signal.SIGTERM, lambda *_: worker.leave())
        status = _guarded(worker, spec)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _guarded(worker: Worker, spec: ProcessSpec) -> int:
    try:
        module, _, function = spec.entry.partition(":")
        if not module.startswith("verbund."):
            raise RunFailed(f"`{spec.entry}` is no entry of this package")
        result = getattr(importlib.import_module(module), function)(worker)
        worker._finish()
        worker.send("done", result=result)
        return 0
    except BaseException as error:
        worker._finish()
        told = named_by_owner(describe(error), spec.settings)
        worker.send("failed", at=time.monotonic(), secondary=isinstance(error, ClusterLost), **told)
        return error.exit_status if isinstance(error, VerbundError) else 1


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain values: the error for the user, and the traceback for `--debug` and the journal."""
    trace = shortened("".join(traceback.format_exception(error)), 20_000)
    if isinstance(error, VerbundError):
        return {"error": error.record(), "trace": trace}
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [f for f in frames if not f.filename.startswith(_OWN) and "site-packages" not in f.filename]
    frame = next(reversed(foreign or frames), None)
    where = f"{frame.filename}, line {frame.lineno}" if frame is not None else None
    fix = None
    text = text_of(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        fix = (
            "Give a smaller `train.micro_batch`, fewer workers on this machine, or a mesh that divides the model, such "
            "as shard=2"
        )
    what = f"{type(error).__name__}: {shortened(text.splitlines()[0])}" if text else type(error).__name__
    return {"error": RunFailed(what, where=where, fix=fix).record(), "trace": trace}
