"""What a user sees of a run with parameter servers, besides its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import MakeJob
from verbund.cluster.local import LocalCluster
from verbund.job import parse_strategy
from verbund.stage import launch

TWO = "islands=2,exchange=parameter_server"


@pytest.mark.parametrize("consistency", ["bulk_synchronous", "asynchronous"])
def test_progress_goes_forward_and_tells_the_speed(
    consistency: str,
    shared_cluster: LocalCluster,
    make_job: MakeJob,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verbund.observe.progress._LINE_SECONDS", 0.0)
    strategy = parse_strategy(f"{TWO},exchange.consistency={consistency}")
    run = launch.train(make_job(changes={**strategy, "train.steps": 300}), tmp_path / "run", quiet=False)
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if re.match(r"step \d+/300, loss", line)]
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert steps == sorted(set(steps)), said
    assert steps[-1] == 300, said
    assert any("samples/s" in line for line in lines), said
    page = (run.path / "report.html").read_text()
    assert "Parameter servers" in page
    assert "pulling from the servers" in page
    assert "that came too late" not in page  # a column of zeros
