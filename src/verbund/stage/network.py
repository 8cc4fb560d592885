"""The network between the hosts of a cluster, measured: latency and bytes per second of each directed pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.supervisor import Supervisor
from verbund.interrupts import Interrupts
from verbund.job import Job

if TYPE_CHECKING:
    from verbund.cluster.worker import Worker

_SECONDS = 1.5
"""For all pairs together."""
_LONGEST, _SHORTEST = 0.7, 0.1
_ROUNDS = 15
"""Of many hosts each is measured with so many others."""
_TIMEOUT = 20.0


def measure(cluster: Cluster, job: Job, interrupts: Interrupts | None = None) -> dict[str, Any]:
    """The links between all hosts, as plain values: `links` of `from`, `to`, `latency`, `bandwidth`; `bytes` that each
    host has sent and received for it, and `wire`, the same with headers.

    Raises:
        Failed: if two hosts do not reach each other; it names them.
    """
    hosts = job.cluster.hosts
    settings = {"hosts": hosts}
    specs = [
        ProcessSpec("probe", number, len(hosts), "verbund.stage.network:work", settings=settings, host=number)
        for number in range(len(hosts))
    ]
    results = Supervisor(cluster, job.cluster, lambda *_: None, interrupts).run(specs)
    return {
        "hosts": [result["address"] for result in results],
        "links": [link for result in results for link in result["links"]],
        "bytes": [result["bytes"] for result in results],
        "wire": [result["wire"] for result in results],
    }


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """All pairs of hosts in rounds, in each of which a host is in one pair at most."""
    places = hosts + hosts % 2
    ring = list(range(1, places))
    found = []
    for turn in range(places - 1):
        line = [0, *ring[turn:], *ring[:turn]]
        pairs = [(line[i], line[-1 - i]) for i in range(places // 2)]
        found.append(sorted((min(p), max(p)) for p in pairs if max(p) < hosts))
    return found


def work(worker: Worker) -> dict[str, Any]:
    """A host's part: it measures with one other host after the other."""
    from verbund.comm import speed
    from verbund.comm.store import Store
    from verbund.comm.wire import Connection, WireError, dial, listen
    from verbund.errors import RunFailed
    from verbund.observe.network import Links

    worker.supervise()
    worker.doing("measuring the network", 0)
    links = Links()
    rank, hosts = worker.spec.rank, worker.settings["hosts"]
    secret = worker.meeting.secret
    store = Store(worker.ask, "network", _TIMEOUT)
    written = f"[{worker.address}]" if ":" in worker.address else worker.address
    listener = listen(f"tcp:{written}:0", secret)
    store.set(str(rank), listener.address)
    plan = rounds(len(hosts))[:_ROUNDS]
    seconds = min(_LONGEST, max(_SHORTEST, _SECONDS / (2 * len(plan))))
    ready: dict[int, Connection] = {}
    found = []
    for pair in (pair for turn in plan for pair in turn if rank in pair):
        other = pair[1] if rank == pair[0] else pair[0]
        try:
            if rank == pair[0]:
                with_peer = dial(store.get(str(other)).decode(), secret, _TIMEOUT)
                with_peer.send("hello", {"rank": rank})
                with_peer.receive(_TIMEOUT)
                measured = speed.measure(with_peer, seconds, _TIMEOUT)
                found += [
                    {"from": rank, "to": other, "latency": measured.latency, "bandwidth": measured.forth},
                    {"from": other, "to": rank, "latency": measured.latency, "bandwidth": measured.back},
                ]
            else:
                while other not in ready:
                    accepted = listener.accept(_TIMEOUT)
                    ready[int(accepted.receive(_TIMEOUT).fields["rank"])] = accepted
                with_peer = ready[other]
                with_peer.send("hello")
                speed.serve(with_peer, seconds, _TIMEOUT)
        except (WireError, RuntimeError) as error:
            raise RunFailed(
                f"host {hosts[rank]} and host {hosts[other]} do not reach each other: {error}",
                where="cluster.hosts",
                fix="Hosts dial each other at any port: does a firewall stand between them?",
            ) from None
        ready[other] = with_peer
    sampled = links.sample() or {}
    counts = [[sum(pair[way] for pair in counted.values()) for way in (0, 1)] for counted in (sampled, links.wire())]
    for connection in ready.values():
        connection.close()
    listener.close()
    return {"address": worker.address, "links": found, "bytes": counts[0], "wire": counts[1]}
