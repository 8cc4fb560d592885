"""A summary that is damaged is made anew from the journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MLP
from verbund.errors import InputError, RunFailed
from verbund.run import Run
from verbund.stage import launch


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff\xfe"])
def test_of_a_run_that_is_done(content: bytes, run_job: Callable[..., Run]) -> None:
    run = run_job()
    before = run.summary
    (run.path / "summary.json").write_bytes(content)
    with pytest.raises(InputError, match=r"`verbund report .*` writes it anew") as caught:
        _ = run.summary
    assert caught.value.exit_status == 2
    summary, path = launch.report(run.path)
    assert path.is_file()
    assert run.summary == summary
    assert summary == {key: value for key, value in before.items() if key != "warnings"}


def test_of_a_run_that_failed(run_job: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(RunFailed):
        run_job(MLP, {"train.optimizer": {"name": "sgd", "lr": 1e30}, "train.steps": 20})
    run = Run.open(tmp_path / "run-1")
    before = run.summary
    (run.path / "summary.json").write_bytes(b"{")
    summary, _ = launch.report(run.path)
    assert (summary["status"], summary["cause"]) == ("failed", before["cause"])
