"""Asynchronous training with a parameter server against TensorFlow's ParameterServerStrategy: 1 server, 2 workers.

    python bench/parameter_server_training.py --tensorflow /path/to/python [--hidden 256,1024] [--rounds 3]

Both sides train an MLP 784-H-H-10 by SGD with 64 samples a step, in turn. Prints one JSON line: per H the steps per
second that all workers take together after a warm-up, ours and the peer's, and their ratio; medians over the rounds.
TensorFlow keeps the parameters in the server's memory alone, so `ours` is with `log = false`, which does too;
`ours_with_log` writes every push to disk before it counts, so that nothing is lost with the server.

`--tensorflow` names the Python of an environment that has `tensorflow-cpu`: it is large, and no dependency of this
project.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

WORKERS, BATCH, ROWS = 2, 64, 10_000
STEPS = {256: 3000, 1024: 600}
WARM_UP = 0.2

PEER = """
import json, os, sys, time
import numpy as np

role, index, ports = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
hidden, steps, batch = map(int, sys.argv[4:7])
hosts = [f"127.0.0.1:{port}" for port in ports]
spec = {"ps": hosts[:1], "worker": hosts[1:-1], "chief": hosts[-1:]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": {"type": role, "index": index}})
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["GRPC_FAIL_FAST"] = "use_caller"
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if role != "chief":
    server = tf.distribute.Server(resolver.cluster_spec(), job_name=role, task_index=index, protocol="grpc", start=True)
    server.join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
random = np.random.default_rng(0)
X = random.standard_normal((10000, 784), dtype=np.float32)
Y = random.integers(0, 10, 10000)
with strategy.scope():
    sizes = [784, hidden, hidden, 10]
    first = tf.random_normal_initializer(0.0, 0.03)
    weights = [tf.Variable(first((a, b))) for a, b in zip(sizes, sizes[1:])]
    biases = [tf.Variable(tf.zeros((b,))) for b in sizes[1:]]
    optimizer = tf.keras.optimizers.SGD(0.01)
    optimizer.build(weights + biases)


def samples(_):
    made = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(10000).repeat()
    return made.batch(batch, drop_remainder=True).prefetch(2)


@tf.function
def per_worker():
    return strategy.distribute_datasets_from_function(samples)


@tf.function
def step(iterator):
    def replica(values):
        x, y = values
        with tf.GradientTape() as tape:
            for number, (weight, bias) in enumerate(zip(weights, biases)):
                x = tf.matmul(x, weight) + bias
                x = tf.nn.relu(x) if number < 2 else x
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x))
        gradients = tape.gradient(loss, weights + biases)
        optimizer.apply_gradients(zip(gradients, weights + biases))
        return loss

    return strategy.run(replica, args=(next(iterator),))


iterator = iter(coordinator.create_per_worker_dataset(per_worker))


def run(count):
    for _ in range(count):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()


run(steps // 5)
start = time.monotonic()
run(steps)
print(json.dumps(steps / (time.monotonic() - start)), flush=True)
os._exit(0)
"""

TASK = """
from torch import nn

def model():
    return nn.Sequential(
        nn.Linear(784, {hidden}), nn.ReLU(), nn.Linear({hidden}, {hidden}), nn.ReLU(), nn.Linear({hidden}, 10)
    )
"""

JOB = """
task = "task.py"
[data]
train = "data.npz"
input = "x"
target = "y"
cache = "cache"
[train]
objective = "cross_entropy"
global_batch = {batch}
steps = {steps}
optimizer = {{ name = "sgd", lr = 0.01 }}
[checkpoint]
every = "end"
[strategy]
islands = {workers}
exchange = {{ name = "parameter_server", consistency = "asynchronous", log = {log} }}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", type=Path, help="the Python of an environment with TensorFlow")
    parser.add_argument("--hidden", default="256,1024")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for hidden in map(int, arguments.hidden.split(",")):
            results[str(hidden)] = compare(hidden, arguments.rounds, arguments.tensorflow, Path(folder) / str(hidden))
    print(json.dumps({"bench": "parameter_server_training", "machine": machine(), "hidden": results}))


def compare(hidden: int, rounds: int, tensorflow: Path | None, folder: Path) -> dict[str, Any]:
    """Runs both sides in turn; medians of steps per second."""
    folder.mkdir()
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, 784), dtype=np.float32)
    np.savez(folder / "data.npz", x=x, y=random.integers(0, 10, ROWS))
    (folder / "peer.py").write_text(PEER)
    (folder / "task.py").write_text(TASK.format(hidden=hidden))
    steps = STEPS[hidden]
    for name, log in (("job", "false"), ("logged", "true")):
        text = JOB.format(batch=BATCH, steps=steps, workers=WORKERS, log=log)
        (folder / f"{name}.toml").write_text(text)
    found: dict[str, list[float]] = {"ours": [], "ours_with_log": [], "peer": []}
    for number in range(rounds):
        found["ours"].append(run_ours(folder, "job", number))
        found["ours_with_log"].append(run_ours(folder, "logged", number))
        if tensorflow is not None:
            found["peer"].append(run_peer(folder, tensorflow, hidden, steps))
    medians = {name: round(statistics.median(speeds), 1) for name, speeds in found.items() if speeds}
    if "peer" in medians:
        medians["ratio"] = round(medians["ours"] / medians["peer"], 2)
        medians["ratio_with_log"] = round(medians["ours_with_log"] / medians["peer"], 2)
    return medians


def run_ours(folder: Path, job: str, number: int) -> float:
    """Steps per second of all workers after the warm-up."""
    run = f"{job}-{number}"
    command = [sys.executable, "-m", "verbund", "train", f"{job}.toml", "--quiet", "--run", run]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    ends: list[int] = []
    for path in (folder / run / "journal").glob("worker-*.jsonl"):
        done: dict[int, int] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["t"] == "spans":
                for _, step, begun, length in np.array(record["rows"]).reshape(-1, 4).tolist():
                    done[step] = max(done.get(step, 0), begun + length)
        ends += done.values()
    ends.sort()
    first, last = int(len(ends) * WARM_UP), len(ends) - 1
    return (last - first) / ((ends[last] - ends[first]) / 1e9)


def run_peer(folder: Path, python: Path, hidden: int, steps: int) -> float:
    ports = json.dumps(free_ports(WORKERS + 2))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    def command(role: str, index: int) -> list[str]:
        return [str(python), "peer.py", role, str(index), ports, str(hidden), str(steps), str(BATCH)]

    helpers = [
        subprocess.Popen(command(*who), cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        for who in [("ps", 0), *(("worker", n) for n in range(WORKERS))]
    ]
    try:
        done = subprocess.run(
            command("chief", 0), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
    finally:
        for process in helpers:
            process.kill()
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"


if __name__ == "__main__":
    main()
