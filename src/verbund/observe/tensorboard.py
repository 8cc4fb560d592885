"""Scalars for TensorBoard (extra `tensorboard`). Needs no torch.

`Board` writes while the run goes on, from what the supervising process hears; `write_events` writes the same from a
run's journal, with every step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbund.errors import InputError, RunFailed
from verbund.observe.journal import ProcessJournal, read
from verbund.observe.summary import valid_steps, validations

_FOLDER = "tensorboard"


def require() -> None:
    """Checks that event files can be written.

    Raises:
        InputError: if the package is missing.
    """
    try:
        from tensorboard.summary.writer import event_file_writer  # noqa: F401
    except ImportError:
        raise InputError(
            "the package `tensorboard` is not installed",
            where="observe.tensorboard",
            fix='`pip install "verbund[tensorboard]"`, or set it to false',
        ) from None


class Board:
    """Appends scalars to an event file in `run_dir/tensorboard`.

    Raises:
        InputError: if the package is missing.
        RunFailed: if the folder cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        require()
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = run_dir / _FOLDER
        try:
            self._writer = EventFileWriter(str(self.folder))
        except OSError as error:
            raise RunFailed(f"cannot be written: {error.strerror or error}", where=str(self.folder)) from None

    def step(self, step: int, loss: float, *, wall: float | None = None, **others: float) -> None:
        """Writes `train/loss` and other scalars of training (`rate`, `samples_per_second`)."""
        self._scalars(step, {"train/loss": loss, **{f"train/{name}": value for name, value in others.items()}}, wall)

    def validation(self, step: int, metrics: Mapping[str, Any], *, wall: float | None = None) -> None:
        """Writes the numbers among `metrics` as `validation/NAME`."""
        numbers = {
            f"validation/{name}": float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self._scalars(step, numbers, wall)

    def close(self) -> None:
        self._writer.close()

    def _scalars(self, step: int, values: Mapping[str, float], wall: float | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        kept = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if not math.isnan(value)]
        if kept:
            now = time.time() if wall is None else wall
            self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=kept)))


def write_events(run_dir: Path) -> Path:
    """Writes the event file of a whole run from its journal, in the place of those there are.

    Returns:
        the folder to give to `tensorboard --logdir`.

    Raises:
        InputError: if the package is missing, or the run has no journal.
    """
    require()
    journals = read(run_dir / "journal")
    if not journals:
        raise InputError("has no journal", where=str(run_dir), fix="Name the directory of a run")
    former = list((run_dir / _FOLDER).glob("events.out.tfevents.*"))
    board = Board(run_dir)
    # Steps carry no time of their own: they are spread evenly over the time from the first to the last sign of life.
    rows = valid_steps(journals)
    begin, end = _walls(journals)
    for number, (step, loss, _, _, rate) in enumerate(rows.tolist()):
        wall = begin + (end - begin) * (number + 1) / len(rows)
        board.step(int(step), loss, wall=wall, rate=rate)
    for step, metrics, wall in validations(journals):
        board.validation(step, metrics, wall=wall)
    board.close()
    for path in former:
        path.unlink(missing_ok=True)
    return board.folder


def _walls(journals: list[ProcessJournal]) -> tuple[float, float]:
    begins = [j.wall[0] + (j.begin - j.wall[1]) / 1e9 for j in journals]
    ends = [j.last_heard for j in journals]
    return min(begins), max(ends)
