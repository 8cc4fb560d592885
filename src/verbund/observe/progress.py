"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere, nothing when quiet. No
torch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_LINE_SECONDS = 5.0
_REDRAW_SECONDS = 0.1
_VALIDATION_SECONDS = 0.5


class Progress:
    """Shows how far a training is. A stream that breaks (a closed pipe) silences it; it never raises.

    Args:
        total_steps: steps until the end; None if only time or a metric ends it.
        total_seconds: seconds until the end, counted from now; the bar follows what ends first.
        quiet: show nothing.
        stream: where to; default standard error.
    """

    def __init__(
        self,
        total_steps: int | None,
        total_seconds: float | None = None,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._steps = total_steps
        self._seconds = total_seconds
        self._stream = stream if stream is not None else sys.stderr
        self._silent = quiet
        self._begin = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._said = -math.inf
        self._drawn = -math.inf
        self._latest: tuple[int, float, float] | None = None
        self._shown: int | None = None
        self._validated = -math.inf
        self._kept_back: str | None = None
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        if not quiet and _is_terminal(self._stream):
            self._open()

    def update(self, step: int, loss: float, samples_per_second: float) -> None:
        """Says that `step` steps are done. Cheap: what is shown is rate-limited."""
        if self._silent:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (now, step)
        if samples_per_second <= 0 and self._latest is not None:
            samples_per_second = self._latest[2]  # the last report of a run carries no rate
        self._latest = (step, loss, samples_per_second)
        if self._bar is not None:
            if now - self._drawn >= _REDRAW_SECONDS:
                self._draw(now)
        elif now - self._said >= _LINE_SECONDS:
            self._say_step(now)

    def message(self, text: str) -> None:
        """Shows a line that stays."""
        if self._silent:
            return
        if self._bar is not None:
            self._guarded_print(text)
        else:
            self._line(text)

    def validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the numbers among `metrics`; anything else (a confusion matrix) is for the report. Where validations
        follow each other fast some are left out, but never the last."""
        numbers = [f"{n} {_number(v)}" for n, v in metrics.items() if _is_number(v)]
        text = f"step {_of(step, self._steps)}: validation: " + (", ".join(numbers) or "no numbers")
        now = time.monotonic()
        # The longer it takes, the fewer of them: some dozens in a minute, and at most twelve in each one after.
        pause = min(max(_VALIDATION_SECONDS, (now - self._begin) / 50), _LINE_SECONDS)
        if now - self._validated < pause:
            self._kept_back = text
            return
        self._validated, self._kept_back = now, None
        self.message(text)

    def close(self) -> None:
        """Shows the last state and releases the terminal; a second call does nothing."""
        if self._silent:
            return
        if self._kept_back is not None:
            self.message(self._kept_back)
            self._kept_back = None
        now = time.monotonic()
        if self._bar is not None:
            self._draw(now)
            try:
                self._bar.stop()
            except (OSError, ValueError):
                self._silent = True
            self._bar = None
        elif self._latest is not None and self._latest[0] != self._shown:
            self._say_step(now)
        self._silent = True

    # -- plain lines -----------------------------------------------------------------------------------------

    def _say_step(self, now: float) -> None:
        assert self._latest is not None
        step, loss, speed = self._latest
        self._said, self._shown = now, step
        parts = [f"step {_of(step, self._steps)}", f"loss {_number(loss)}"]
        if speed > 0:
            parts.append(f"{_speed(speed)} samples/s")
        if (left := self._left(now)) is not None:
            parts.append(f"{duration(left)} left")
        self._line(", ".join(parts))

    def _line(self, text: str) -> None:
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._silent = True

    # -- the bar ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=self._stream)
        bar = Progress(
            TextColumn("{task.fields[step]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} samples/s"),
            TextColumn("{task.fields[left]}"),
            console=console,
            auto_refresh=False,
            transient=False,
            expand=True,
        )
        known = self._steps is not None or self._seconds is not None
        try:
            bar.start()
            self._task = bar.add_task("", total=1.0 if known else None, step="starting", loss="–", speed="–", left="")
        except (OSError, ValueError):
            self._silent = True
            return
        self._bar = bar

    def _draw(self, now: float) -> None:
        if self._bar is None or self._task is None or self._latest is None:
            return
        self._drawn = now
        step, loss, speed = self._latest
        left = self._left(now)
        try:
            self._bar.update(
                self._task,
                completed=self._share(now),
                step=f"step {_of(step, self._steps)}",
                loss=_number(loss),
                speed=_speed(speed) if speed > 0 else "–",
                left=f"{duration(left)} left" if left is not None else duration(now - self._begin),
                refresh=True,
            )
        except (OSError, ValueError):
            self._silent = True

    def _guarded_print(self, text: str) -> None:
        assert self._bar is not None
        try:
            # The text is data: brackets and paths in it are no markup.
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except (OSError, ValueError):
            self._silent = True

    # -- how far ----------------------------------------------------------------------------------------

    def _share(self, now: float) -> float:
        shares = [0.0]
        if self._steps and self._latest is not None:
            shares.append(self._latest[0] / self._steps)
        if self._seconds:
            shares.append((now - self._begin) / self._seconds)
        return min(max(shares), 1.0)

    def _left(self, now: float) -> float | None:
        """Seconds until whatever ends first, by the mean speed since the first update, which after a resume
        is not step 0."""
        left = []
        if self._steps is not None and self._latest is not None and self._first is not None:
            begin, first = self._first
            done = self._latest[0] - first
            if done > 0:
                left.append(max(self._steps - self._latest[0], 0) * (now - begin) / done)
        if self._seconds is not None:
            left.append(max(self._seconds - (now - self._begin), 0.0))
        return min(left) if left else None


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _of(step: int, total: int | None) -> str:
    return f"{step}" if total is None else f"{step}/{total}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
