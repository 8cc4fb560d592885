"""The network between hosts as a run measures it, against what the lab's links are and what their interfaces count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import MLP, MakeJob
from lab import Lab, missing
from lab.test_hosts import VERBUND, train, write
from verbund.run import Run

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")

WIDE = MLP.replace("16", "60_000")  # 4 MB of gradients: the link is what takes time


def test_bytes_are_those_of_the_interfaces_and_the_link_is_named(make_job: MakeJob, tmp_path: Path) -> None:
    with Lab(hosts=2, rate="100mbit") as lab:
        before = [lab.bytes(host) for host in range(2)]
        write(lab, make_job, tmp_path, {"train.steps": 12, "train.global_batch": 8}, WIDE)
        done = train(lab, tmp_path)
        assert done.returncode == 0, done.stderr
        after = [lab.bytes(host) for host in range(2)]
    summary = Run.open(tmp_path / "run").summary
    found = summary["network"]
    assert [(link["from"], link["to"]) for link in found["links"]] == [tuple(lab.hosts), tuple(lab.hosts[::-1])]
    for link in found["links"]:
        assert 40e6 < 8 * link["bandwidth"] < 100e6
        assert link["latency"] < 0.01
        assert link["rate"] <= 1.15 * link["bandwidth"]  # on a busy machine the link looks a little slower than it is
    for number, host in enumerate(lab.hosts):
        sent, received = (now - then for now, then in zip(after[number], before[number], strict=True))
        assert found["hosts"][host]["wire_sent"] == pytest.approx(sent, rel=0.02)
        assert found["hosts"][host]["wire_received"] == pytest.approx(received, rel=0.02)
        assert found["hosts"][host]["sent"] < found["hosts"][host]["wire_sent"]
    (sentence,) = (line for line in summary["held_back"] if "the link from" in line)
    assert 'Mbit/s); `exchange = "diloco"` with an island on each host' in sentence
    assert "Links</caption>" in (tmp_path / "run" / "report.html").read_text()


def test_doctor_measures_links(make_job: MakeJob, tmp_path: Path) -> None:
    with Lab(hosts=2, rate="20mbit") as lab:
        write(lab, make_job, tmp_path, {})
        done = lab.run(0, [*VERBUND, "doctor", "job.toml", "--network", "--json"], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout
    found = {finding["what"]: finding["found"] for finding in json.loads(done.stdout)["findings"]}
    for source, target in (lab.hosts, lab.hosts[::-1]):
        said = re.fullmatch(r"(\S+) ms, (\S+) Mbit/s", found[f"link {source} → {target}"])
        assert said is not None, found
        latency, rate = said.groups()
        assert float(latency) < 10
        assert 8 < float(rate) < 21


def test_hosts_that_do_not_reach_each_other_are_named(make_job: MakeJob, tmp_path: Path) -> None:
    with Lab(hosts=3) as lab:
        write(lab, make_job, tmp_path, {"train.steps": 2})
        for one, other in ((1, 2), (2, 1)):
            lab.run(one, ["ip", "route", "add", "prohibit", lab.hosts[other]])
        done = train(lab, tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"host {lab.hosts[1]} and host {lab.hosts[2]} do not reach each other" in done.stderr


def test_a_fast_network_is_not_blamed(make_job: MakeJob, tmp_path: Path) -> None:
    with Lab(hosts=2) as lab:
        write(lab, make_job, tmp_path, {"train.steps": 12})
        done = train(lab, tmp_path)
        assert done.returncode == 0, done.stderr
    summary = Run.open(tmp_path / "run").summary
    assert not [line for line in summary["held_back"] if "the link from" in line]
