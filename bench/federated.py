"""A simulated federation against Flower's simulation, on the same data with the same model and clients.

    python bench/federated.py [--rounds 40] [--flower PYTHON] [--peer-rounds 8]
    python bench/federated.py --clients 10000 --cohort 100

Scikit-learn's digits are divided evenly among the clients, of which so many train in each round: FedAvg, one local
epoch of SGD with batches of 10, and a network of 64-200-200-10. Seconds a round are the time between the journal's
first and last round, divided by their number, without the start; of Flower (whose Python, with `flwr[simulation]` and
torch, is given) those between the server's first and last aggregation, without evaluation on either side. With more
clients than digits have samples, samples are drawn at random as 784 numbers, and the figure is memory.

Prints one JSON line: both figures and their ratio, the CPU seconds of our worker a round, and its most memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from verbund.job import Job
from verbund.observe.journal import read
from verbund.stage import launch

TASK = """
from torch import nn

def model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(INPUTS, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )
"""

FLOWER = """
import json, sys, time
import numpy as np, torch
from sklearn.datasets import load_digits
from torch import nn
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

CLIENTS, COHORT, ROUNDS, TARGET = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def model():
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    own = np.arange(int(context.node_config["partition-id"]), len(x), CLIENTS)
    x, y = torch.from_numpy(x[own] / 16).float(), torch.from_numpy(y[own])
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    order = torch.randperm(len(x))
    for low in range(0, len(x), 10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[order[low : low + 10]]), y[order[low : low + 10]]).backward()
        optimizer.step()
    content = RecordDict(
        {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    )
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        times.append(time.monotonic())
        return result


times = []


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(
        fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=CLIENTS
    )
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=ROUNDS)
    with open(TARGET, "w") as file:
        json.dump(times, file)


run_simulation(
    server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
)
"""


def ours(clients: int, cohort: int, rounds: int) -> dict[str, Any]:
    """A simulation's figures."""
    with tempfile.TemporaryDirectory(prefix="federated-") as folder:
        place = Path(folder)
        data: dict[str, Any] = {"train": "sklearn:digits", "input": "image", "target": "label", "cache": folder}
        inputs = 64
        if clients > 1000:
            random, inputs = np.random.default_rng(0), 784
            x, y = random.normal(size=(6 * clients, inputs)).astype(np.float32), random.integers(0, 10, 6 * clients)
            np.savez(place / "data.npz", x=x, y=y)
            data |= {"train": "data.npz", "input": "x", "target": "y"}
        else:
            data["scale"] = {"image": 16.0}
        (place / "task.py").write_text(TASK.replace("INPUTS", str(inputs)))
        raw = {
            "task": "task.py",
            "data": data,
            "train": {
                "objective": "cross_entropy",
                "global_batch": 10,
                "steps": rounds,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            "checkpoint": {"every": "end"},
            "cluster": {"threads": 1},
            "strategy": {"exchange": {"name": "federated", "clients": clients, "cohort": cohort}},
        }
        run = launch.train(Job.build(raw, {}, source="bench", folder=place), place / "run")
        events = [e for j in read(run.journal) for e in j.events if e["name"] == "round"]
        first, *_, last = [e["wall"] for e in events]
        summary = run.summary
        return {
            "seconds_a_round": round((last - first) / (rounds - 1), 5),
            "cpu_seconds_a_round": round((events[-1]["cpu"] - events[0]["cpu"]) / (rounds - 1), 5),
            "peak_memory_gib": round(max(summary["peak_memory_bytes"].values()) / 2**30, 3),
            "loss": summary["loss"]["last"],
            "notes": summary["notes"],
        }


def flower(python: str, clients: int, cohort: int, rounds: int) -> dict[str, Any]:
    """Flower's figures."""
    with tempfile.TemporaryDirectory(prefix="flower-") as folder:
        script, target = Path(folder) / "peer.py", Path(folder) / "times.json"
        script.write_text(FLOWER)
        command = [python, str(script), str(clients), str(cohort), str(rounds), str(target)]
        environment = {**os.environ, "PYTHONPATH": "", "RAY_DISABLE_IMPORT_WARNING": "1", "FLWR_TELEMETRY_ENABLED": "0"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=folder)
        if not target.is_file():
            return {"failed": done.stderr[-600:]}
        times = json.loads(target.read_text())
        return {"seconds_a_round": round((times[-1] - times[0]) / (len(times) - 1), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--flower", help="a Python that has flwr[simulation] and torch")
    parser.add_argument("--peer-rounds", type=int, default=8)
    arguments = parser.parse_args()
    mine = ours(arguments.clients, arguments.cohort, arguments.rounds)
    peer = None
    if arguments.flower:
        peer = flower(arguments.flower, arguments.clients, arguments.cohort, arguments.peer_rounds)
    ratio = None
    if peer is not None and "seconds_a_round" in peer:
        ratio = round(mine["seconds_a_round"] / peer["seconds_a_round"], 5)
    report = {
        "benchmark": "federated",
        "clients": arguments.clients,
        "cohort": arguments.cohort,
        "ours": mine,
        "flower": peer,
        "ratio": ratio,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
