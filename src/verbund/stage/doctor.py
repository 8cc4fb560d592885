"""`verbund doctor`: is this machine, this installation, this job fit to run?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verbund.cluster.local import LocalCluster
from verbund.cluster.process import ProcessSpec
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.errors import InputError, VerbundError
from verbund.job import Cluster as Limits
from verbund.job import Job

Verdict = Literal["ok", "warning", "failed"]
_PACKAGES = ("torch", "numpy", "pyarrow", "pydantic", "typer", "rich", "safetensors")
_SMALL_SHM = 256 << 20
_SMALL_DISK = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `what`, what was `found`, and whether that will do."""

    what: str
    verdict: Verdict
    found: str
    cause: VerbundError | None = None
    """The error that was found, if it was one."""

    def record(self) -> dict[str, Any]:
        """The finding as plain JSON values."""
        cause = self.cause or (InputError(self.found, where=self.what) if self.verdict == "failed" else None)
        known = {"what": self.what, "verdict": self.verdict, "found": self.found}
        return {**known, "cause": cause.record() if cause else None}


def examine(job: Job | None = None, *, network: bool = False) -> list[Finding]:
    """Looks at everything a run needs; with a job, checks that too, as training would before it starts.

    Args:
        job: the job.
        network: measure the links between its hosts.

    Raises:
        InputError: if the links are to be measured, but there are none.
    """
    several = job is not None and job.cluster.spread and (job.cluster.kind != "hosts" or len(job.cluster.hosts) > 1)
    if network and not several:
        fix = 'Give a job with `cluster.kind = "hosts"` and two `cluster.hosts` or more, or another kind over hosts'
        raise InputError("there is no network to measure", where="--network", fix=fix)
    findings = [_versions(), _cores(), _memory(), _shared_memory(), _disk(), _ports(), _clock(), _processes()]
    if job is not None:
        findings += _job(job)
    if job is not None and network:
        findings += _network(job)
    return findings


def _versions() -> Finding:
    found = [f"python {sys.version.split()[0]}"]
    missing = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("versions", "failed", f"not installed: {', '.join(missing)}")
    return Finding("versions", "ok", ", ".join(found))


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cores", "ok", f"{usable} usable")


def _memory() -> Finding:
    values = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                values[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        return Finding("memory", "warning", "not measured: no /proc/meminfo")
    free, total = values.get("MemAvailable", 0), values.get("MemTotal", 0)
    verdict: Verdict = "warning" if free < 1 << 30 else "ok"
    return Finding("memory", verdict, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("shared memory", "warning", "no /dev/shm")
    if free < _SMALL_SHM:
        return Finding("shared memory", "warning", f"{free / 1e6:.0f} MB free in /dev/shm (containers: --shm-size)")
    return Finding("shared memory", "ok", f"{free / 1e9:.1f} GB free in /dev/shm")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    return Finding("disk", "warning" if free < _SMALL_DISK else "ok", f"{free / 1e9:.1f} GB free in {Path.cwd()}")


def _ports() -> Finding:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=2.0):
                return Finding("ports", "ok", "loopback accepts connections")
    except OSError as error:
        return Finding("ports", "failed", f"no connection over loopback: {error}")


def _clock() -> Finding:
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.05)
    drift = abs((time.time() - wall) - (time.monotonic() - steady))
    if drift > 0.01:
        return Finding("clock", "warning", f"the wall clock moved by {drift * 1e3:.0f} ms within 50 ms")
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _processes() -> Finding:
    """Starts two workers that meet and add a number up: the whole path that a run takes."""
    start = time.monotonic()
    cluster = LocalCluster()
    try:
        specs = [ProcessSpec("worker", rank, 2, "verbund.stage.doctor:work") for rank in range(2)]
        results = Supervisor(cluster, Limits(), lambda *_: None).run(specs)
    except Failed as failed:
        return Finding("two workers", "failed", str(failed.error), failed.error)
    except VerbundError as error:
        return Finding("two workers", "failed", str(error), error)
    finally:
        cluster.close()
    seconds = time.monotonic() - start
    ended = all(result["sum"] == 3.0 for result in results)
    milliseconds = max(result["seconds"] for result in results) * 1e3
    return Finding(
        "two workers",
        "ok" if ended else "failed",
        f"started, met and ended in {seconds:.1f} s; an all-reduce of 1 MB takes {milliseconds:.1f} ms",
    )


def work(worker: object) -> dict[str, float]:
    """The workers' side of the check."""
    import torch

    from verbund.cluster.worker import Worker
    from verbund.comm.collectives import Group
    from verbund.comm.store import Store

    assert isinstance(worker, Worker)
    worker.supervise()
    spec = worker.spec
    store = Store(worker.ask, "the check", 30.0)
    group = Group(store, spec.rank, spec.world, torch.device("cpu"), 30.0, worker.address)
    numbers = torch.full((1 << 18,), float(spec.rank + 1))
    group.all_reduce(numbers, "the check")
    result = float(numbers[0])
    start = time.monotonic()
    for _ in range(10):
        group.all_reduce(numbers, "the check")
    return {"sum": result, "seconds": (time.monotonic() - start) / 10}


def _network(job: Job) -> list[Finding]:
    """The links between the hosts of a job, as a run would measure them."""
    from verbund.stage import before
    from verbund.stage.network import measure

    try:
        with before.cluster_of(job) as cluster:
            found = measure(cluster, cluster.settled(job))
    except Failed as failed:
        return [Finding("network", "failed", str(failed.error), failed.error)]
    except VerbundError as error:
        return [Finding("network", "failed", str(error), error)]
    return [
        Finding(
            f"link {found['hosts'][link['from']]} → {found['hosts'][link['to']]}",
            "ok",
            f"{1e3 * link['latency']:.3g} ms, {8e-6 * link['bandwidth']:.3g} Mbit/s",
        )
        for link in found["links"]
    ]


def _job(job: Job) -> list[Finding]:
    from verbund.stage import launch

    try:
        facts = launch.check(job)
    except VerbundError as error:
        return [Finding("job", "failed", str(error), error)]
    samples = f"{facts.train_samples} samples to train on, {facts.validation_samples} to validate"
    steps = f"{facts.total_steps} steps" if facts.total_steps else "no bound on the steps"
    findings = [Finding("job", "ok", f"{samples}; {steps}; {facts.parameters:,} parameters")]
    need = facts.worker_bytes * job.world
    workers = f"{job.world} worker{'s' if job.world != 1 else ''}"
    findings.append(Finding("job memory", "ok", f"about {need / 1e6:.0f} MB for {workers} besides torch"))
    findings += [Finding("job note", "warning", note) for note in facts.notes]
    return findings
