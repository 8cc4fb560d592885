"""Agents on the nodes of a Ray cluster: each does there what `verbund join` does.

Runs as a process of its own, `python -m verbund.cluster.ray_agents`, so that neither Ray's threads nor its signal
handlers are the command's. It is asked by one line of JSON on standard input, tells what happens by lines of JSON on
standard output, and ends, with the Ray cluster if that is its own, when standard input does. Only strings and numbers
pass through Ray.
"""

from __future__ import annotations

import ipaddress
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

_PAUSE = 1.0
_TURN = 0.5
_HEAD_TURN = 2.0
"""How often, in seconds, and for how long the head is looked for."""
_OUT = 1
_OBJECTS = 100 << 20  # bytes of Ray's store for objects, of which nothing is needed


class Agent:
    """On one node, with the resources of one bundle."""

    def join(self, address: str, secret: str, slots: int, rank: int, within: float) -> str:
        """Takes part until the run is over; why not, if something goes wrong."""
        from verbund.cluster.joining import join
        from verbund.comm.wire import Secret
        from verbund.errors import VerbundError

        try:
            join(address, Secret(bytes.fromhex(secret)), slots, rank=rank, within=within)
        except VerbundError as error:
            return str(error)
        return ""


def drive(asked: dict[str, Any]) -> None:
    """Starts the agents, and another one in the place of each that is lost, until standard input ends."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if asked["address"] is None:
        ray.init(
            address="local",  # whatever cluster Ray may have been told of on this machine
            num_cpus=asked["cpus"],
            include_dashboard=False,
            object_store_memory=_OBJECTS,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
    else:
        _tell(waiting=f"Ray does not answer at {asked['address']}")
        ray.init(address=asked["address"], **quiet)
        _check_closed(ray.get_runtime_context().gcs_address)
    bundles = asked["bundles"]
    group = placement_group(bundles, strategy=asked["strategy"])
    ready = group.ready()
    while not ray.wait([ready], timeout=_TURN)[0]:
        if _over(0.0):
            return
        _tell(waiting=f"Ray has {_resources(ray.available_resources())} free on {len(ray.nodes())} nodes")

    def start(number: int) -> Any:
        bundle = bundles[number]
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
        given = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        actor = ray.remote(Agent).options(scheduling_strategy=place, resources=custom, **given).remote()
        ref = actor.join.remote(asked["join"], asked["secret"], asked["slots"][number], number, asked["within"])
        return ref, actor

    agents = {number: start(number) for number in range(len(bundles))}
    again: dict[int, float] = {}
    _tell(started=len(agents))
    head = _Head(ray.get_runtime_context().gcs_address)
    while not _over(_TURN):
        if head.lost():
            continue  # whatever is asked of Ray now would wait for it
        done, _ = ray.wait([ref for ref, _ in agents.values()], timeout=0) if agents else ([], [])
        for number in [number for number, (ref, _) in agents.items() if ref in done]:
            try:
                why = ray.get(agents[number][0])
            except ray.exceptions.RayError as error:
                why = f"its Ray actor is lost: {str(error).strip().splitlines()[0]}"
            del agents[number]
            if why:
                _tell(lost=why)
                again[number] = time.monotonic() + _PAUSE
        for number in [number for number, at in again.items() if at < time.monotonic()]:
            del again[number]
            agents[number] = start(number)  # the bundle is placed anew where its node is lost
    if not head.away:
        for _, actor in agents.values():
            ray.kill(actor)
        remove_placement_group(group)
    if not head.away or asked["address"] is None:
        ray.shutdown()


class _Head:
    """Whether Ray's head (its global control service) is there. Actors live on without it; Ray itself says nothing of
    that until a limit of its own is over, a minute by default."""

    def __init__(self, address: str) -> None:
        self._address, self._due = address, 0.0
        self.away = False

    def lost(self) -> bool:
        """Tells when that changes."""
        if time.monotonic() < self._due:
            return self.away
        host, _, port = self._address.rpartition(":")
        why = ""
        try:
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_TURN).close()
        except OSError as error:
            why = f"its head at {self._address} is lost: {error.strerror or error}"
        if self.away != bool(why):
            self.away = bool(why)
            _tell(headless=why)
        self._due = time.monotonic() + _HEAD_TURN
        return self.away


def _check_closed(address: str) -> None:
    """Whether only those who may can use a Ray cluster that others reach."""
    host = address.rpartition(":")[0].strip("[]")
    local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    if not local and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise PermissionError(f"the Ray cluster at {address} is open: whoever reaches it can run code there")


def _resources(found: dict[str, float]) -> str:
    named = {name: amount for name, amount in found.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(named.items())) or "nothing"


def _over(timeout: float) -> bool:
    """Whether standard input has ended."""
    return bool(select.select([0], [], [], timeout)[0]) and not os.read(0, 1)


def _tell(**what: Any) -> None:
    os.write(_OUT, json.dumps(what).encode() + b"\n")


def main() -> None:
    """Reads what is asked, and does it."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 65536)):
            sys.exit(1)
        line += more
    asked = json.loads(line)
    try:
        drive(asked)
    except Exception as error:
        _tell(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        sys.exit(1)
    finally:
        if asked["token"] is not None:  # also where the command was killed
            Path(asked["token"]).unlink(missing_ok=True)


if __name__ == "__main__":
    # Under its own name, so that other nodes import the class rather than get its code.
    from verbund.cluster import ray_agents

    ray_agents._OUT = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no answer
    ray_agents.main()
    os._exit(0)  # at its exit Ray would wait for a head that is lost
