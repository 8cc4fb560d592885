"""Every error a user can meet, each with what to do about it.

An error is one short paragraph: what is wrong, where, what to do. Its `exit_status` is the process's:
1 the run failed, 2 the input is wrong, 3 the cluster was lost, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar


def shortened(text: str, limit: int = 2000) -> str:
    """A text of bounded length: its head and its tail, where it is longer."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]} … [{len(text) - limit} characters] … {text[-tail:]}"


def text_of(error: BaseException) -> str:
    """An exception's text, whatever its class does when it is asked for it."""
    try:
        return str(error).strip()
    except Exception as another:
        return f"(its text cannot be had: {type(another).__name__})"


def remedy(text: str) -> str | None:
    """What to do about a failure that bears the kernel's words for a limit of this process; None for all others."""
    if os.strerror(errno.EMFILE) not in text:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"Raise the limit on open files (`ulimit -n`, {limit} here), or use fewer workers on one machine"


def _paragraph(where: str | None, what: str, fix: str | None) -> str:
    sentences = [part if part.endswith((".", "?", "!")) else f"{part}." for part in (what, fix) if part]
    return " ".join([f"{where}:", *sentences] if where else sentences)


class VerbundError(Exception):
    """Base of all errors that are the user's business.

    Args:
        what: what is wrong, one clause or sentence without a final stop.
        where: file, key, row, process: as exact as it is known.
        fix: what the user can do about it, a sentence without a final stop.
    """

    exit_status: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = shortened(what, 10_000)
        super().__init__(self.what)
        self.where = where
        self.fix = remedy(self.what) or fix
        self.trace: str | None = None
        """The traceback in the process where it happened, for `--debug`."""
        self.run: Path | None = None
        """The directory of the run that ended with it."""

    def __str__(self) -> str:
        return _paragraph(self.where, self.what, self.fix)

    def record(self) -> dict[str, Any]:
        """The error as plain JSON values, for the journal and for crossing a process border; what is not declared here
        counts as what it is derived from."""
        known = next(kind for kind in type(self).__mro__ if kind.__name__ in _KINDS)
        return {"kind": known.__name__, "what": self.what, "where": self.where, "fix": self.fix}


class RunFailed(VerbundError):
    """A worker's own exception, or a result that makes going on pointless."""


class InputError(VerbundError):
    """The job, the task, the data or the arguments are wrong."""

    exit_status = 2


class TaskError(InputError):
    """The user's task file cannot be used."""


class DataError(InputError):
    """A data source is missing, unreadable, or holds values that cannot be trained on."""


class CheckpointError(InputError):
    """A checkpoint is missing, incomplete or damaged."""


class ClusterLost(VerbundError):
    """Processes were lost beyond the job's budget."""

    exit_status = 3


class Interrupted(VerbundError):
    """Ended by Ctrl-C or SIGTERM, after a checkpoint."""

    exit_status = 130


@dataclass(frozen=True)
class Problem:
    """One thing wrong with an input: `where` is a file and key, `what` says what, `fix` what to do."""

    where: str
    what: str
    fix: str | None = None

    def __str__(self) -> str:
        return _paragraph(self.where, self.what, self.fix)


class JobError(InputError):
    """All problems of a job at once, so that nobody has to find them one run at a time."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        many = f"{len(problems)} problems" if len(problems) != 1 else "1 problem"
        super().__init__(many)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{self.what}:\n{lines}"

    def record(self) -> dict[str, Any]:
        problems = [{"where": p.where, "what": p.what, "fix": p.fix} for p in self.problems]
        first = problems[0] if len(problems) == 1 else {"where": None, "what": self.what, "fix": None}
        return {"kind": "JobError", **first, "problems": problems}


_KINDS: dict[str, type[VerbundError]] = {
    kind.__name__: kind
    for kind in (
        VerbundError,
        RunFailed,
        InputError,
        TaskError,
        DataError,
        CheckpointError,
        ClusterLost,
        Interrupted,
    )
}


def from_record(record: dict[str, Any]) -> VerbundError:
    """The error that `VerbundError.record` described; an unknown kind becomes `RunFailed`."""
    if record.get("kind") == "JobError":
        return JobError([Problem(p["where"], p["what"], p.get("fix")) for p in record.get("problems", [])])
    kind = _KINDS.get(str(record.get("kind")), RunFailed)
    return kind(str(record.get("what")), where=record.get("where"), fix=record.get("fix"))


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """A hint for a misspelt word: the nearest known one, else all of them."""
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean `{close[0]}`?"
    return "Known: " + ", ".join(sorted(known))
