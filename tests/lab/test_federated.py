"""Three hospitals on hosts of their own: what leaves them, and what it is good for."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from conftest import wait_for
from lab import Lab, missing
from lab.runs import VERBUND

pytestmark = pytest.mark.skipif((why := missing()) is not None, reason=why or "")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospitals"
NAMES = ("north", "south", "village")
CAPTURE = """
import socket, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.bind(("eth0", 0))
print("ready", flush=True)
out = open(sys.argv[1], "wb", buffering=0)
while True:
    out.write(raw.recv(1 << 16))
"""


@pytest.fixture
def hospitals() -> Iterator[Lab]:
    with Lab(hosts=4) as lab:
        yield lab


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"hospitals_{name}", EXAMPLE / f"{name}.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def patients(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    table = pq.read_table(folder / "patients.parquet")
    measures = np.stack(table["measures"].to_numpy())
    return torch.from_numpy(measures), torch.from_numpy(table["malignant"].to_numpy().copy())


def accuracy(model: torch.nn.Module, folder: Path) -> float:
    measures, malignant = patients(folder)
    with torch.no_grad():
        return float((model(measures).argmax(1) == malignant).float().mean())


def alone(task: Any, folder: Path) -> torch.nn.Module:
    """What an owner gets who trains as long by itself."""
    torch.manual_seed(0)
    model = task.model()
    measures, malignant = patients(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(24):
        for rows in torch.randperm(len(measures)).split(16):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(measures[rows]), malignant[rows]).backward()
            optimizer.step()
    return model


def traces(measures: np.ndarray[Any, Any]) -> list[bytes]:
    """What would betray a row: two neighbouring values as float32 or float64, or a value's digits."""
    found: list[bytes] = []
    for row in measures:
        found += [row[:2].astype(kind).tobytes() for kind in ("<f4", "<f8", ">f4", ">f8")]
        found += [repr(float(np.float32(row[3]))).encode()[:7], repr(float(row[21])).encode()[:7]]
    return [trace for trace in found if len(trace) >= 7]


def test_no_row_leaves_a_hospital_and_all_gain(hospitals: Lab, tmp_path: Path) -> None:
    digest = hashlib.sha256((EXAMPLE / "task.py").read_bytes()).hexdigest()
    module("owners").divide(tmp_path, digest)
    for name in NAMES:
        enroll = ["federate", "enroll", "--name", name, "--out", f"{name}.token"]
        subprocess.run([*VERBUND, *enroll], cwd=tmp_path, check=True, capture_output=True)
    capture = [sys.executable, "-c", CAPTURE, str(tmp_path / "traffic")]
    sniffer = hospitals.start(0, capture, stdout=subprocess.PIPE)
    assert sniffer.stdout
    sniffer.stdout.readline()
    address = f"{hospitals.hosts[0]}:4711"
    command = ["federate", "server", str(EXAMPLE / "job.toml"), "--listen", address, "--run", "run", "--json"]
    pipes: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    server = hospitals.start(0, [*VERBUND, *command], **pipes)

    def client(name: str) -> subprocess.Popen[str]:
        more = ["--data", f"{name}/patients.parquet", "--policy", f"{name}/policy.toml", "--token", f"{name}.token"]
        command = ["federate", "client", "--server", address, *more, "--home", f"{name}/home", "--json"]
        return hospitals.start(1 + NAMES.index(name), [*VERBUND, *command], **pipes)

    clients = {name: client(name) for name in NAMES}
    # One is killed on the way, and starts again.
    log = tmp_path / "run" / "federated" / "audit.jsonl"
    wait_for(lambda: log.exists() and b'"stepped"' in log.read_bytes(), "the first round", 90.0)
    clients["south"].send_signal(signal.SIGKILL)
    clients["south"].communicate(timeout=30)
    clients["south"] = client("south")
    said = {name: process.communicate(timeout=120) for name, process in clients.items()}
    summary = json.loads(server.communicate(timeout=60)[0])
    assert summary["status"] == "done"
    assert summary["participation"] == {name: {"asked": 12, "counted": 12, "failed": 0} for name in NAMES}
    assert summary["metrics"]["accuracy"]["last"] > 0.93
    sniffer.terminate()
    sniffer.communicate(timeout=10)

    traffic = (tmp_path / "traffic").read_bytes()
    assert len(traffic) > summary["bytes"]["received"] > 0
    for name in NAMES:
        assert json.loads(said[name][0])["status"] == "done", said[name][1]
        measures = patients(tmp_path / name)[0].numpy()
        looked_for = traces(measures)
        assert len(looked_for) > 100
        raw = measures.tobytes() + repr(measures.tolist()).encode()
        assert any(trace in raw for trace in looked_for)  # it would be seen
        assert not any(trace in traffic for trace in looked_for)

    # The server's run is one as any: it has a model that can be judged by whoever has data.
    judged = hospitals.run(
        0, [*VERBUND, "validate", "run", "--data", "public/patients.parquet", "--json"], cwd=tmp_path
    )
    assert judged.returncode == 0, judged.stderr
    task = module("task")
    federated = task.model()
    federated.load_state_dict(load_file(json.loads(said["village"][0])["model"]))
    together = accuracy(federated, tmp_path / "public")
    assert together == pytest.approx(json.loads(judged.stdout)["metrics"]["accuracy"])
    assert all(together > accuracy(alone(task, tmp_path / name), tmp_path / "public") for name in NAMES)
