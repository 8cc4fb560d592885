"""The batch script, run with an `srun` that starts a task on each host of the lab: preempted, queued again, done."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.joiners import VERBUND
from conftest import MakeJob, wait_for
from lab import Lab, missing
from processes import MARKED
from verbund.run import Run

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
for host in $HOSTS; do
    SLURM_NODEID=${#pids[@]} SLURM_PROCID=${#pids[@]} SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=1 \\
        ip netns exec "$host" "$@" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
    wait "$pid" 2>/dev/null || true
done
exit $status
"""


def test_preempted_and_queued_again(lab: Lab, make_job: MakeJob, tmp_path: Path) -> None:
    changes = {"cluster.trusted_network": lab.network, "train.steps": 10**6, "cluster.heartbeat": 0.2}
    (tmp_path / "job.toml").write_text(make_job(MARKED, {**changes, "cluster.replacements": 1}).toml())
    (tools := tmp_path / "bin").mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n')
    for tool in tools.iterdir():
        tool.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "HOSTS": " ".join(lab.hosts)}
    environment["SLURM_JOB_ID"] = "7"
    write = ["launch", "slurm", "job.toml", "--nodes", "2", "--workers", "2", "--listen", f"{lab.hosts[0]}:0"]
    written = lab.run(0, [*VERBUND, *write, "--out", "job.sh"], cwd=tmp_path)
    assert written.returncode == 0, written.stderr

    def started() -> bool:
        return all(any((tmp_path / f"pid-{pid}").exists() for pid in lab.pids(host)) for host in range(2))

    with (tmp_path / "said").open("w") as said:
        batch = lab.start(0, ["bash", "job.sh"], cwd=tmp_path, env=environment, stdout=said, stderr=said)
        wait_for(lambda: batch.poll() is not None or started(), "all workers", 60)
        batch.send_signal(signal.SIGTERM)  # what `--signal=B:TERM@…` sends to the batch shell alone
        assert batch.wait(60) == 130, (tmp_path / "said").read_text()
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    assert not [pid for host in range(2) for pid in lab.pids(host)]
    run = Run.open(tmp_path / "runs" / "test-7")
    steps = run.summary["steps"]
    more = [*write, "--set", f"train.steps={steps + 2}", "--out", "job.sh"]
    assert lab.run(0, [*VERBUND, *more], cwd=tmp_path).returncode == 0
    again = lab.run(0, ["bash", "job.sh"], cwd=tmp_path, env={**environment, "SLURM_RESTART_COUNT": "1"}, timeout=120)
    assert again.returncode == 0, again.stderr
    assert run.summary["steps"] == steps + 2
    assert run.summary["status"] == "done"
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    assert not [path for path in (tmp_path / "runs").iterdir() if path.suffix in (".join", ".secret")]
