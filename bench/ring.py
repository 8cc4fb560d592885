"""Sums between hosts over TLS against gloo, which has none: how much of a capped link each uses.

    python bench/ring.py [--hosts 4] [--rate 100] [--rounds 7] [--busy]

Needs root: hosts are network namespaces of this machine, each behind a link of `--rate` Mbit/s (`tests/lab`). In each
round both do an all-reduce of 1, 2, 4 and 8 MB in turn. Prints one JSON line: by size, the medians of the share of the
link's rate that the values take up which each host sends (2 (n - 1) / n of the size), ours and gloo's, and their ratio.
The headers of Ethernet, IP and TCP take 5 % of a link; `cpu` has one host's seconds of a processor for 8 MB. All run
with real-time priority, as if hosts had cores of their own; `--busy` leaves that out, so that a machine that does
other things shows what late wake-ups cost.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEGABYTES = (1, 2, 4, 8)


def member(rank: int, addresses: list[str], rounds: int, folder: Path, busy: bool) -> None:
    """One host's part; the first prints seconds by size."""
    import torch

    from verbund.comm.collectives import Group, c10d
    from verbund.comm.ring import WireGroup
    from verbund.comm.wire import Secret

    torch.set_num_threads(1)
    world, address = len(addresses), addresses[rank]
    store = c10d.FileStore(str(folder / "store"), world)
    secret = Secret.read(folder / "secret")
    ring = WireGroup(store, rank, world, f"tcp:{address}:0", secret)
    gloo = Group(store, rank, world, torch.device("cpu"), 60.0, address)
    if not busy:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    seconds: dict[str, dict[int, list[float]]] = {"ours": {}, "gloo": {}}
    cpu: dict[str, list[float]] = {"ours": [], "gloo": []}
    for turn in range(rounds + 1):  # the first warms up
        for megabytes in MEGABYTES:
            values = torch.ones(megabytes * 250_000)
            for name, group in (("ours", ring), ("gloo", gloo)):
                group.barrier("a start")
                begun, used = time.monotonic(), time.process_time()
                group.all_reduce(values, "a sum")
                taken, used = torch.tensor([time.monotonic() - begun]), time.process_time() - used
                group.all_reduce(taken, "the longest", maximum=True)
                assert float(values[-1]) == world ** (1 if name == "ours" else 2)
                if turn:
                    seconds[name].setdefault(megabytes, []).append(float(taken))
                    if megabytes == MEGABYTES[-1]:
                        cpu[name].append(used)
    ring.close()
    if rank == 0:
        print(json.dumps({"seconds": seconds, "cpu": cpu}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--member", nargs=3, metavar=("RANK", "ADDRESSES", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        rank, addresses, folder = given.member
        member(int(rank), addresses.split(","), given.rounds, Path(folder), given.busy)
        return
    print(json.dumps(measured(given.hosts, given.rate, given.rounds, given.busy)))


def measured(hosts: int, rate: int, rounds: int, busy: bool) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    lab_of = importlib.import_module("lab")
    from verbund.comm.wire import Secret

    if (why := lab_of.missing()) is not None:
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as folder, lab_of.Lab(hosts, f"{rate}mbit") as lab:
        Secret.create().write(Path(folder) / "secret")
        command = [sys.executable, __file__, "--rounds", str(rounds), *["--busy"] * busy, "--member"]
        members = [
            lab.start(rank, [*command, str(rank), ",".join(lab.hosts), folder], stdout=-1) for rank in range(hosts)
        ]
        out = [each.communicate(timeout=300)[0] for each in members]
    told = json.loads(out[0])
    seconds = told["seconds"]
    around = 2 * (hosts - 1) / hosts * 1e6 / (rate * 125_000)
    found: dict[str, Any] = {"hosts": hosts, "rate_mbit": rate, "rounds": rounds, "busy": busy}
    for megabytes in MEGABYTES:
        ours, gloo = (
            megabytes * around / statistics.median(seconds[name][str(megabytes)]) for name in ("ours", "gloo")
        )
        found[f"{megabytes}_MB"] = {"ours": round(ours, 3), "gloo": round(gloo, 3), "ratio": round(ours / gloo, 2)}
    found["cpu"] = {name: round(statistics.median(used), 3) for name, used in told["cpu"].items()}
    return {**found, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


if __name__ == "__main__":
    main()
