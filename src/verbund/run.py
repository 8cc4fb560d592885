"""A run: the directory that training a job leaves.

    job.toml          the job as resolved, all defaults
    origin.json       where the job's paths start from; hash of the task file as it was
    task/             a copy of the task file
    journal/          what was measured, a file a process
    checkpoints/      see `verbund.checkpoint`
    summary.json      the result in numbers
    report.html       the result to look at
    attempts.json     how many times training was started on it
    lock              held while somebody trains it
    workers           held by its workers, which may outlive who trains it

Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from verbund import plain_json
from verbund.checkpoint import durable
from verbund.checkpoint.store import sweep
from verbund.errors import ClusterLost, InputError, RunFailed, VerbundError
from verbund.job import Job

JOURNAL, CHECKPOINTS = "journal", "checkpoints"
"""Folders of a run's directory."""
_VERSION = 1
_LATEST = "latest"
_WORKERS = "workers"
_LOOK_SECONDS = 0.1


class Run:
    """A run's directory. `Run.create` makes one, `Run.open` opens one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create(directory: Path | None, job: Job, *, parent: Path = Path("runs")) -> Run:
        """Makes the directory of a new run.

        Args:
            directory: the run's directory, which must not exist or be empty. None:
                `parent/NAME-YYYYmmdd-HHMMSS`, and the link `parent/latest` is moved to it.
            job: what will be trained.
            parent: where runs without a directory of their own lie.

        Raises:
            InputError: if `directory` is in use or cannot be made. Nothing in it is touched.
            RunFailed: if the disk is full.
        """
        try:
            path = _numbered(parent, job) if directory is None else _given(directory)
        except OSError as error:
            raise _unwritten(directory or parent, error) from None
        run = Run(path)
        try:
            run.journal.mkdir()
            run.checkpoints.mkdir()
            run._write_origin(job)
            durable.replace(path / "job.toml", job.toml().encode())  # last: only now is it a run
            if directory is None:
                _point(parent / _LATEST, path)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)  # it was empty or not there
            raise _unwritten(path, error) from None
        return run

    @staticmethod
    def open(path: Path) -> Run:
        """Opens a run, e.g. `runs/latest`.

        Raises:
            InputError: if `path` is no run.
        """
        if not path.exists():
            raise InputError("no such run", where=str(path), fix="`runs/latest` is the newest one of this folder")
        if not path.is_dir():
            raise InputError("is a file, not a run's directory", where=str(path), fix="`train` takes job files")
        if not (path / "job.toml").is_file() or not (path / "origin.json").is_file():
            fix = f"The newest run is {path / _LATEST}" if (path / _LATEST).exists() else None
            raise InputError("is not a run's directory: it has no job.toml and origin.json", where=str(path), fix=fix)
        return Run(path.resolve())

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @cached_property
    def job(self) -> Job:
        """The job as the run last trained it, its paths starting from the original job file's folder.

        Raises:
            InputError: if job.toml or origin.json is damaged.
        """
        where = self.path / "job.toml"
        try:
            raw = tomllib.loads(where.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"the run's job cannot be read: {error}", where=str(where)) from None
        folder = self._origin.get("folder")
        if not isinstance(folder, str) or not os.path.isabs(folder):
            raise InputError("names no folder of the job", where=str(self.path / "origin.json"))
        return Job.build(raw, {}, source=str(where), folder=Path(folder))

    def rewrite_job(self, job: Job) -> None:
        """Replaces the run's job, e.g. by one with another number of workers.

        Raises:
            RunFailed: if it cannot be written; the former is intact.
        """
        self._replace("job.toml", job.toml().encode())
        self.__dict__["job"] = job

    def changed_files(self) -> list[str]:
        """A warning if the task file is not what it was when the run began."""
        task = self._origin.get("task")
        if not isinstance(task, dict):
            return []
        path = self.job.path(self.job.task)
        copy = self.path / "task" / str(task.get("copy"))
        found = _sha256(path)
        if found == task.get("sha256"):
            return []
        what = "is gone" if found is None else "has changed since the run began"
        return [f"{path} {what}; a copy of what it was lies in {copy}"]

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds; empty while there is none.

        Raises:
            InputError: if it is damaged.
        """
        return self._read("summary.json", {}, f"`verbund report {self.path}` writes it anew")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replaces `summary.json` in one step.

        Raises:
            RunFailed: if it cannot be written; the former is intact.
        """
        self._replace("summary.json", _json(summary))

    @property
    def servers(self) -> Path:
        """What parameter servers and their coordinator remember while a training goes on."""
        return self.path / "servers"

    @property
    def requests(self) -> Path:
        """Where a training takes requests while it goes on."""
        return self.path / "requests"

    @property
    def attempt(self) -> int:
        """How many times training was started on this run."""
        count = self._read("attempts.json", {"attempts": 0}).get("attempts")
        if type(count) is not int or count < 0:
            raise InputError("has no valid `attempts`", where=str(self.path / "attempts.json"))
        return count

    def begin_attempt(self) -> int:
        """Counts a start of training and removes what a crashed one left. The caller holds `lock`.

        Returns:
            The attempt's number, from 1.

        Raises:
            RunFailed: if it cannot be written.
        """
        attempt = self.attempt + 1
        self._replace("attempts.json", _json({"attempts": attempt}))
        sweep(self.checkpoints)
        return attempt

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps everybody else from training this run.

        Processes forked inside (without exec) hold the lock too: after a kill of this one nobody starts until
        they have ended.

        Raises:
            InputError: if it is being trained; the error names the process.
        """
        path = self.path / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(durable.reason(error), where=str(path), fix=durable.remedy(error)) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._locked(descriptor) from None
            except OSError as error:
                raise InputError(
                    f"cannot be locked: {error.strerror}",
                    where=str(path),
                    fix="The run's folder must be on a file system with locks",
                ) from None
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                pass  # on a full disk the lock holds all the same; only the number is missing from an error
            try:
                yield
            finally:
                # Closing alone does not unlock it while a child that was forked inside has the descriptor.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def wait_for_workers(self, seconds: float, tell: Callable[[str], None]) -> None:
        """Waits for the workers of a command that was killed: they finish their step, save it and end. For who has
        `lock`.

        Args:
            seconds: how long they may take.
            tell: is told for whom this waits, if it does.

        Raises:
            ClusterLost: if they do not end in that time.
        """
        try:
            descriptor = os.open(self.path / _WORKERS, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            until, told = time.monotonic() + seconds, False
            while not _locks(descriptor):
                if not told:
                    tell("waiting for workers of the former command, which save the step that they have come to")
                    told = True
                if time.monotonic() > until:
                    raise ClusterLost(
                        f"workers of the former command have not ended within {seconds:.0f} s",
                        where=str(self.path),
                        fix="`pgrep -af 'verbund: worker'` names them, on each of the run's hosts",
                    )
                time.sleep(_LOOK_SECONDS)
        finally:
            os.close(descriptor)

    def check_there(self, *journals: str) -> None:
        """Checks that the directory was not taken away while the run was trained.

        Args:
            journals: names of files that must be in `journal/`.

        Raises:
            RunFailed: naming what is gone.
        """
        for path in (self.path, self.path / "job.toml", self.journal, *(self.journal / name for name in journals)):
            if not path.exists():
                raise RunFailed(
                    "was removed or renamed while the run was trained",
                    where=str(path),
                    fix="Leave a run's directory as it is until the run has ended",
                )

    @property
    def being_trained(self) -> bool:
        """Whether somebody holds `lock`."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def headline(self) -> list[str]:
        """The result in a few lines, for a terminal."""
        summary = self.summary
        loss = summary.get("loss") or {}
        seconds = summary.get("seconds") or {}
        facts = [f"{summary['steps']} steps"] if summary.get("steps") is not None else []
        if (samples := summary.get("samples")) or (samples == 0 and not summary.get("steps")):
            facts.append(f"{samples} samples")  # 0 after steps: owners that train have not said how many
        if lost := summary.get("samples_lost"):
            facts.append(f"of them {lost} lost with islands that were left out")
        if (last := loss.get("last")) is not None:
            facts.append(f"training loss {last:.6g}")
        if (total := seconds.get("total")) is not None:
            facts.append(f"{total:.1f} s")
        if (rate := summary.get("samples_per_second")) is not None:
            facts.append(f"{rate:.0f} samples/s")
        lines = [f"{summary.get('status', 'unfinished')}: {', '.join(facts)}" if facts else "no summary was written"]
        for name, metric in (summary.get("metrics") or {}).items():
            if isinstance(metric, dict) and isinstance(value := metric.get("last"), int | float):
                best = metric.get("best")
                tail = f" (best {best:.6g})" if isinstance(best, int | float) and best != value else ""
                lines.append(f"validation {name}: {value:.6g}{tail}")
        if isinstance(privacy := summary.get("privacy"), dict):
            lines.append(f"privacy: {privacy.get('statement')}")
        lines.append(f"run: {_from_here(self.path)}")
        if self.report.is_file():
            lines.append(f"report: {_from_here(self.report)}")
        return lines

    # -- files ---------------------------------------------------------------------------------------------

    @cached_property
    def _origin(self) -> dict[str, Any]:
        return self._read("origin.json", None)

    def _write_origin(self, job: Job) -> None:
        origin: dict[str, Any] = {
            "version": _VERSION,
            "folder": str(Path(job.folder).resolve()),
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        source = job.path(job.task)
        if (sha256 := _sha256(source)) is not None:
            (self.path / "task").mkdir(exist_ok=True)
            shutil.copyfile(source, self.path / "task" / source.name)
            origin["task"] = {"path": str(source.resolve()), "sha256": sha256, "copy": source.name}
        durable.replace(self.path / "origin.json", _json(origin))

    def _read(self, name: str, default: dict[str, Any] | None, fix: str = "The file is damaged") -> dict[str, Any]:
        path = self.path / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if default is None:
                raise InputError("is missing", where=str(path), fix="The run's directory is damaged") from None
            return default
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot be read: {error}", where=str(path), fix=fix) from None
        if not isinstance(value, dict):
            raise InputError("is not a JSON object", where=str(path), fix=fix)
        return value

    def _replace(self, name: str, content: bytes) -> None:
        try:
            durable.replace(self.path / name, content)
        except OSError as error:
            raise RunFailed(durable.reason(error), where=str(self.path / name), fix=durable.remedy(error)) from None

    def _locked(self, descriptor: int) -> InputError:
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        if pid.isdigit() and not Path("/proc", pid).exists():
            return InputError(
                f"process {pid}, which trained this run, is gone; its workers are still ending",
                where=str(self.path),
                fix="Try again in half a minute",
            )
        return InputError(
            f"process {pid or 'unknown'} is training this run",
            where=str(self.path),
            fix="Wait for it, or stop it with Ctrl-C; it saves a checkpoint first",
        )


def attend(run: Path) -> None:
    """Has `Run.wait_for_workers` wait until this process has ended.

    Args:
        run: the run's directory.
    """
    with suppress(OSError):  # of a file system without locks, or a full disk: then nobody waits
        descriptor = os.open(run / _WORKERS, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # and stays open


def _locks(descriptor: int) -> bool:
    """Whether nobody has a shared lock on this file any more; True where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _from_here(path: Path) -> Path:
    """The path as one would type it: relative if it is below the current directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _json(value: dict[str, Any]) -> bytes:
    return plain_json.text(value).encode()


def _unwritten(path: Path, error: OSError) -> VerbundError:
    kind = RunFailed if durable.full(error) else InputError
    return kind(durable.reason(error), where=str(error.filename or path), fix=durable.remedy(error))


def _given(directory: Path) -> Path:
    if directory.exists() and not directory.is_dir():
        raise InputError("is a file, not a directory", where=str(directory), fix="Choose another directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise InputError(
            "exists and is not empty",
            where=str(directory),
            fix=f"Choose another directory, or continue that run with `verbund resume {directory}`",
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


def _numbered(parent: Path, job: Job) -> Path:
    """A new directory by name and time; a number follows where two runs start in one second."""
    name = re.sub(r"[^\w.-]+", "-", job.name or Path(job.task).stem).strip(".-")[:80] or "run"
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path.resolve()


def _point(link: Path, target: Path) -> None:
    """Moves the link in one step. What somebody else put there under this name is left alone."""
    if link.exists() and not link.is_symlink():
        return
    beside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")  # another host has the same process numbers
    beside.symlink_to(target.name, target_is_directory=True)
    os.replace(beside, link)


def _sha256(path: Path) -> str | None:
    """None if there is no such file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
