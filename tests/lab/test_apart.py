"""Hosts that have no files in common: each sees an empty folder where the command has its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from conftest import MLP, MakeJob, losses, wait_for
from lab import Lab, missing
from lab.runs import VERBUND
from processes import MARKED
from trained import close
from verbund.run import Run
from verbund.stage import launch

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")
TASK = MARKED.replace("HERE = pathlib.Path(__file__).parent", "HERE = pathlib.Path(os.environ['HOME'])")


def on(lab: Lab, host: int, folder: Path, own: Path, *words: str) -> subprocess.Popen[str]:
    """A command on a host where an empty file system hides the command's folder, all of it."""
    hide = shlex.join(["mount", "-t", "tmpfs", "none", str(folder)])
    inside = f"{hide} && cd {own} && exec {shlex.join(words)}"
    environment = {**os.environ, "HOME": str(own), "XDG_CACHE_HOME": str(own / "cache"), "SLOW": "0.03"}
    return lab.start(
        host,
        ["unshare", "-m", "--propagation", "private", "sh", "-c", inside],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_two_hosts_without_a_common_folder(
    make_job: MakeJob, tmp_path: Path, temporary: Path, shared_cluster: object
) -> None:
    assert shutil.which("unshare")
    changes = {"data.validation_fraction": 0.2, "checkpoint.every": 10, "validate.every": "end"}
    joint = {
        "cluster.kind": "external",
        "cluster.join_file": "here",
        "cluster.heartbeat": 0.2,
        "cluster.replacements": 3,
        "cluster.nodes": 2,
        "strategy.mesh": {"data": 2},
        "train.steps": 10**6,
    }
    owns = [temporary / f"host-{number}" for number in range(2)]
    for own in owns:
        own.mkdir()
    with Lab(hosts=3) as lab:
        joint |= {"cluster.trusted_network": lab.network, "cluster.listen": f"{lab.hosts[2]}:0"}
        (tmp_path / "job.toml").write_text(make_job(TASK, {**changes, **joint}).toml())

        def begin(*words: str) -> tuple[subprocess.Popen[str], list[subprocess.Popen[str]]]:
            (tmp_path / "here").unlink(missing_ok=True)
            command = lab.start(2, [*VERBUND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            wait_for((tmp_path / "here").exists, "the address", 60)
            secret = temporary / "secret"
            shutil.copyfile(tmp_path / "here.secret", secret)
            secret.chmod(0o600)
            address = (tmp_path / "here").read_text().strip()
            join = [*VERBUND, "join", address, "--secret-file", str(secret)]
            return command, [on(lab, host, tmp_path, own, *join) for host, own in enumerate(owns)]

        command, joiners = begin("train", "job.toml", "--run", "run")
        wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), "a checkpoint", 90)

        def computing() -> list[int]:
            return [pid for pid in lab.pids(1) if (owns[1] / f"pid-{pid}").exists()]

        (victim,) = computing()
        os.kill(victim, signal.SIGKILL)
        journals = (tmp_path / "run" / "journal").glob
        wait_for(lambda: len([*journals("worker-*")]) == 3, "another worker's journal", 60)
        wait_for(lambda: computing() not in ([], [victim]), "another worker", 60)
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=60)
        assert command.returncode == 130, errors
        assert "another process takes its place" in errors
        for joiner in joiners:
            assert joiner.wait(30) == 0, joiner.communicate()
        run = Run.open(tmp_path / "run")
        steps = run.summary["steps"]
        command, joiners = begin(
            "resume", "run", "--strategy", "shard=2", "--set", f"train.steps={steps + 10}", "--json"
        )
        out, errors = command.communicate(timeout=90)
        assert command.returncode == 0, errors
        for joiner in joiners:
            assert joiner.wait(30) == 0, joiner.communicate()
        assert not [pid for host in range(3) for pid in lab.pids(host)]
    for own in owns:
        assert {path.name for path in (own / "cache" / "verbund").iterdir()} == {"code", "data"}
    summary = json.loads(out)
    assert summary["steps"] == steps + 10
    assert summary["world"] == 2
    alone = launch.train(make_job(MLP, {**changes, "train.steps": steps + 10}), tmp_path / "alone")
    run = Run.open(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=2e-4)
    close(run, alone, 2e-4)
    assert summary["metrics"]["accuracy"]["last"] == pytest.approx(alone.summary["metrics"]["accuracy"]["last"])
    sent = sum(link["sent"] for link in summary["network"]["links"])
    assert sent > 0
