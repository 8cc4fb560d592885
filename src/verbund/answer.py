"""What a command answers: lines for people, or one JSON document; and its exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from verbund import plain_json
from verbund.errors import InputError, Interrupted, RunFailed, VerbundError, remedy, text_of
from verbund.interrupts import Interrupt


@dataclass(frozen=True)
class Answer:
    """The result of a command that came to its end."""

    document: Mapping[str, Any]
    """What `--json` prints."""
    lines: Sequence[str]
    """What people read."""
    essential: Sequence[str] = ()
    """What of it `--quiet` leaves."""
    exit_status: int = 0


class Output:
    """Standard output and standard error of one command, as its options want them.

    With `--json`, whatever else is printed (by the user's task, say) goes to standard error, also in the processes
    that are started; so standard output holds one document, whatever happens.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        options = arguments[: arguments.index("--")] if "--" in arguments else arguments
        self.as_json = "--json" in options
        self.quiet = "--quiet" in options or "-q" in options
        self.debug = "--debug" in options
        self._stream: TextIO = sys.stdout
        if self.as_json:
            sys.stdout.flush()
            self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
            os.dup2(2, 1)

    def answer(self, answer: Answer) -> int:
        """Prints the result; its exit status."""
        if self.as_json:
            return self._write(plain_json.text(answer.document), answer.exit_status)
        lines = answer.essential if self.quiet else answer.lines
        return self._write("".join(f"{line}\n" for line in lines), answer.exit_status)

    def error(self, error: BaseException) -> int:
        """Prints what ended the command, one short paragraph on standard error; its exit status."""
        known = _named(error)
        if self.debug:
            _say(known.trace or "".join(traceback.format_exception(error)))
        _say(f"verbund: {known}")
        if not self.as_json:
            return known.exit_status
        ended = {
            "status": "interrupted" if isinstance(known, Interrupted) else "failed",
            "run": str(known.run) if known.run else None,
            "cause": known.record(),
        }
        # The summary of a failed run says more than the error: which step, since when, at whom.
        return self._write(plain_json.text({**_summary(known), **ended}), known.exit_status)

    def _write(self, text: str, exit_status: int) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            _say(f"verbund: standard output: cannot be written: {error.strerror}.")
            exit_status = exit_status or 1
        if self.as_json:
            os.dup2(self._stream.fileno(), 1)
        return exit_status


def _named(error: BaseException) -> VerbundError:
    """The error as one of ours. An exception that nobody foresaw is a defect of this program."""
    if isinstance(error, VerbundError):
        return error
    if isinstance(error, (KeyboardInterrupt, Interrupt)):
        return Interrupted("interrupted")
    if (usage := _usage(error)) is not None:
        return usage
    if remedy(text_of(error)) is not None:
        return RunFailed(text_of(error))
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{os.path.basename(frame[0].filename)}, line {frame[0].lineno}" if frame else None
    what = f"unexpected {type(error).__name__}: {error}"
    return VerbundError(what, where=where, fix="This is a defect of Verbund; `--debug` prints the traceback")


def _usage(error: BaseException) -> InputError | None:
    """An error of the command line's own parser, which has no stable import path."""
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    what = str(getattr(error, "message", "") if (similar := getattr(error, "possibilities", None)) else message())
    path = getattr(getattr(error, "ctx", None), "command_path", "verbund")
    hint = f"Did you mean `{similar[0]}`? " if similar else ""
    return InputError(what.rstrip("."), where="arguments", fix=f"{hint}`{path} --help` shows what there is")


def _summary(error: VerbundError) -> Mapping[str, Any]:
    from verbund.run import Run

    try:
        return Run(error.run).summary if error.run is not None else {}
    except VerbundError:  # it could not be written, which another error has told already
        return {}


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        pass
