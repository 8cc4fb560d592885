"""Processes of a stage, watched until they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.errors import Interrupted, VerbundError
from verbund.interrupts import Interrupt
from verbund.job import Job
from verbund.stage.elastic import leaves_out


def supervised(cluster: Cluster, job: Job, specs: list[ProcessSpec]) -> list[dict[str, Any]]:
    """The results of processes that are watched until they end."""
    supervisor = Supervisor(cluster, job.cluster, lambda *_: None)
    try:
        results = supervisor.run(specs)
    except Failed as failed:
        raise with_trace(failed) from None
    except (Interrupt, KeyboardInterrupt):
        raise Interrupted("interrupted: nothing was written") from None
    return results


def workers(job: Job, entry: str, settings: dict[str, Any], generation: int = 1) -> list[ProcessSpec]:
    return [ProcessSpec("worker", rank, job.world, entry, generation, settings) for rank in range(job.world)]


def with_servers(cluster: Cluster, job: Job, settings: dict[str, Any], generation: int) -> list[ProcessSpec]:
    """The workers of a training with parameter servers, the servers, and their coordinator, each on its host: servers
    go round the hosts, the coordinator is where the first is."""
    hosts = cluster.placed(job.world)
    specs = [
        replace(spec, host=host)
        for spec, host in zip(workers(job, "verbund.stage.served.train:work", settings, generation), hosts, strict=True)
    ]
    servers = job.strategy.exchange.servers
    among = sorted(set(hosts))
    for rank in range(servers):
        host = among[rank % len(among)]
        entry = "verbund.stage.served.serve:work"
        specs.append(ProcessSpec("server", rank, servers, entry, generation, settings, host=host, serves=True))
    entry = "verbund.stage.served.coordinate:work"
    specs.append(ProcessSpec("coordinator", 0, 1, entry, generation, settings, host=among[0], serves=True))
    return specs


def units(job: Job, specs: list[ProcessSpec]) -> list[list[ProcessSpec]]:
    """What can only be replaced together while others go on: the workers of an island, of a training with servers each
    other process by itself."""
    if not job.strategy.exchange.served and not leaves_out(job):
        return []
    size = job.world // job.strategy.islands
    islands: dict[int, list[ProcessSpec]] = {}
    for spec in specs:
        if spec.role == "worker":
            islands.setdefault(spec.rank // size, []).append(spec)
    return [*islands.values(), *([spec] for spec in specs if spec.role != "worker")]


def with_trace(failed: Failed) -> VerbundError:
    error = failed.error
    error.trace = failed.failures[0].trace
    return error
