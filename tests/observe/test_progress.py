"""Progress on a pipe, on a terminal, and when quiet."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from verbund.observe import progress
from verbund.observe.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_are_rare_and_whole(clock: list[float]) -> None:
    stream = io.StringIO()
    shown = Progress(200, None, stream=stream)
    for step in range(1, 101):
        shown.update(step, 1 / step, 1234.5)
        clock[0] += 0.1
    shown.validation(100, {"accuracy": 0.97531, "loss": 0.1, "confusion_matrix": [[1]], "flag": True})
    shown.message("a note [bold]with brackets[/bold]")
    shown.close()
    shown.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 1/200, loss 1, 1,234 samples/s")
    assert "step 51/200, loss 0.01961, 1,234 samples/s, 15 s left" in lines
    assert "step 100/200: validation: accuracy 0.9753, loss 0.1" in lines
    assert "a note [bold]with brackets[/bold]" in lines
    assert lines[-1].startswith("step 100/200, loss 0.01")
    assert len(lines) == 5


def test_time_left_is_that_of_what_ends_first(clock: list[float]) -> None:
    stream = io.StringIO()
    shown = Progress(1000, 60.0, stream=stream)
    shown.update(500, 1.0, 1.0)  # a run that was resumed
    clock[0] += 10
    shown.update(510, 1.0, 1.0)
    shown.close()
    assert stream.getvalue().splitlines()[-1].endswith("50 s left")  # by steps it would be 490 s


def test_a_terminal_gets_a_bar_and_lines_above_it(clock: list[float]) -> None:
    stream = Terminal()
    shown = Progress(10, None, stream=stream)
    for step in range(1, 11):
        clock[0] += 1
        shown.update(step, 0.5, 2000.0)
    shown.validation(10, {"accuracy": 0.5})
    shown.message("a note [bold]with brackets[/bold]")
    shown.close()
    text = stream.getvalue()
    assert "step 10/10" in text
    assert "100%" in text
    assert "2,000 samples/s" in text
    assert "[bold]with brackets[/bold]" in text
    assert "validation: accuracy 0.5" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


def test_validations_that_follow_each_other_fast_are_few_and_the_last_is_there(clock: list[float]) -> None:
    stream = io.StringIO()
    shown = Progress(1000, None, stream=stream)
    for step in range(1, 1001):
        clock[0] += 0.01
        shown.validation(step, {"accuracy": step / 1000})
    shown.close()
    lines = stream.getvalue().splitlines()
    assert 15 <= len(lines) <= 22
    assert lines[-1] == "step 1000/1000: validation: accuracy 1"


def test_slow_validations_are_all_shown(clock: list[float]) -> None:
    stream = io.StringIO()
    shown = Progress(20, None, stream=stream)
    for step in range(1, 21):
        clock[0] += 60
        shown.validation(step, {"accuracy": 0.5})
    assert len(stream.getvalue().splitlines()) == 20


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quiet_is_silent(stream: io.StringIO) -> None:
    shown = Progress(10, None, True, stream)
    shown.update(1, 1.0, 1.0)
    shown.message("x")
    shown.validation(1, {"a": 1.0})
    shown.close()
    assert stream.getvalue() == ""


def test_no_total_and_odd_numbers(clock: list[float]) -> None:
    stream = io.StringIO()
    shown = Progress(None, None, stream=stream)
    shown.update(3, float("nan"), 0.0)
    shown.close()
    assert stream.getvalue() == "step 3, loss nan\n"


def test_a_broken_pipe_ends_the_progress_not_the_run() -> None:
    shown = Progress(10, None, stream=Broken())
    shown.update(1, 1.0, 1.0)
    shown.message("x")
    shown.close()


def test_rich_is_imported_for_a_terminal_only() -> None:
    code = (
        "import sys, io; from verbund.observe.progress import Progress; p = Progress(2, None, stream=io.StringIO());"
        "p.update(1, 1.0, 1.0); p.close(); print('rich.progress' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_durations() -> None:
    assert [duration(s) for s in (0.2, 42, 200, 7500)] == ["0 s", "42 s", "3 min 20 s", "2 h 05 min"]
