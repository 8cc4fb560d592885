"""A cluster of the nodes that Ray has: an actor on each joins the run, as a machine does that is started from outside.

Ray places and restarts the agents; tensors, supervision and failures go over our own connections.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbund.cluster import host as hosts_
from verbund.cluster.external import ExternalCluster, Tell
from verbund.cluster.invitation import written
from verbund.cluster.joined import JoinedServer
from verbund.comm.rendezvous import Meeting
from verbund.errors import ClusterLost, InputError, shortened
from verbund.job import Job

_END_SECONDS = 20.0
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class RayCluster(ExternalCluster):
    """Starts agents on Ray's nodes at once, and Ray itself on this machine where no address is given.

    Args: as of `ExternalCluster`.

    Raises:
        InputError: if Ray is not installed, or its cluster could be used by anybody.
    """

    def __init__(
        self,
        job: Job,
        scratch: Path,
        preload: Sequence[str],
        environment: Mapping[str, str],
        tell: Tell,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise InputError("Ray is not installed", where="cluster.kind", fix="`pip install 'verbund[ray]'`")
        self._ray: subprocess.Popen[bytes] | None = None
        self._words = ""
        self._told = b""
        self._said: dict[str, str] = {}
        self._warned = ""
        variables, self._token = _authentication(job.cluster.address)
        try:
            super().__init__(_listening(job), scratch, preload, environment, tell)
        except BaseException:
            self._forget_token()
            raise
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._ray = subprocess.Popen(
            [sys.executable, "-P", "-m", "verbund.cluster.ray_agents"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        assert self._ray.stdin is not None
        try:
            self._ray.stdin.write(json.dumps(self._wanted(job, self.meeting)).encode() + b"\n")
            self._ray.stdin.flush()
        except OSError:
            pass  # how it ended says more

    def _wanted(self, job: Job, meeting: Meeting) -> dict[str, Any]:
        """What the agents' process is asked: bundles of resources, each of which lies on one node."""
        assert meeting.secret is not None
        slots = shares(job)
        each = job.cluster.resources
        return {
            "address": job.cluster.address,
            "cpus": max(1.0, each.get("CPU", 0.0) * sum(slots)),
            "bundles": [{name: amount * count for name, amount in each.items() if amount} for count in slots],
            "strategy": "STRICT_SPREAD" if job.cluster.nodes else "PACK",
            "slots": slots,
            "join": self.joins_at,
            "secret": meeting.secret.value.hex(),
            "within": job.cluster.join_within,
            "token": str(self._token) if self._token else None,
        }

    def close(self) -> None:
        super().close()
        if self._ray is None:
            return
        assert self._ray.stdin is not None
        assert self._ray.stdout is not None
        try:
            self._ray.stdin.close()
        except OSError:
            pass
        try:
            self._ray.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._ray.pid, 9)
            self._ray.wait()
        self._ray.stdout.close()
        self._log.close()
        self._forget_token()

    def _forget_token(self) -> None:
        if self._token is not None:
            self._token.unlink(missing_ok=True)

    def _check(self) -> None:
        if why := self._out_of_use():
            self._stuck = self._unusable(why)
            raise self._stuck

    def _hear(self) -> None:
        """Besides that says when Ray has gone: nothing of what goes on needs it."""
        super()._hear()
        if (why := self._out_of_use()) != self._warned and self._connected:
            self._warned = why
            self._tell(
                f"Ray cannot be used any more: {shortened(why, 300)}. The run goes on with the hosts that it has; "
                "nobody takes the place of one that is lost"
                if why
                else "Ray's head is there again"
            )

    def _out_of_use(self) -> str:
        """Why nothing can be asked of Ray; empty if it can."""
        ray = self._ray
        if ray is None:
            return ""
        assert ray.stdout is not None
        while select.select([ray.stdout], [], [], 0)[0] and (more := os.read(ray.stdout.fileno(), 65536)):
            *lines, self._told = (self._told + more).split(b"\n")
            for line in lines:
                self._said |= {str(key): str(value) for key, value in json.loads(line).items()}
        # What was told first is why it has ended.
        if why := self._said.get("headless") or self._said.get("error"):
            return why
        if (status := ray.poll()) is None:
            return ""
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"what speaks with it ended with status {status}{': ' + last[0] if last else ''}"

    def _unusable(self, why: str) -> ClusterLost:
        where = self._job.cluster.address or "a Ray cluster on this machine"
        fix = "`ray status` shows whether the cluster is there"
        if "is open" in why:
            fix = "Start it with RAY_AUTH_MODE=token, and set that and RAY_AUTH_TOKEN_PATH here too"
        return ClusterLost(f"Ray cannot be used: {shortened(why, 500)}", where=where, fix=fix)

    def _invite(self) -> str:
        return f"waiting for {self._job.world} slots on Ray's nodes"

    def _missing(self, limit: float, former: ClusterLost | None, members: Sequence[JoinedServer]) -> ClusterLost:
        error = super()._missing(limit, former, members)
        if what := self._said.get("lost") or self._said.get("waiting"):
            error.what += f"; {shortened(what, 500)}"
        return error

    def _advice(self) -> str:
        return (
            "Ask for less: `cluster.resources` is what each worker takes, and those of a host take it on one node "
            "(`cluster.nodes`)"
        )


def shares(job: Job) -> list[int]:
    """How many workers each bundle has: an even share of the nodes that are asked for; else an island, or all."""
    world, islands = job.world, job.strategy.islands
    count = min(job.cluster.nodes or islands, world)
    return [world * (number + 1) // count - world * number // count for number in range(count)]


def _listening(job: Job) -> Job:
    """The job with where it listens: towards the Ray cluster, if nothing else is said."""
    address = job.cluster.address
    if job.cluster.listen is not None or job.cluster.trusted_network is not None or address in (None, "auto"):
        return job
    host = str(address).removeprefix("ray://").rpartition(":")[0].strip("[]")
    own = "127.0.0.1" if _is_loopback(host) else hosts_.source_of("of Ray", host)
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"listen": written(own, 0)})})


def _authentication(address: str | None) -> tuple[dict[str, str], Path | None]:
    """Variables by which Ray asks for a token, and the file with it if it is new.

    Raises:
        InputError: if a cluster that others reach is to be used without one.
    """
    variables = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    if address is None:
        descriptor, name = tempfile.mkstemp(prefix="verbund-ray-")
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        return {**variables, "RAY_AUTH_TOKEN_PATH": name}, Path(name)
    host = address.rpartition(":")[0].strip("[]")
    known = any(os.environ.get(name) for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").exists()
    if os.environ.get("RAY_AUTH_MODE", "token" if known else "").lower() == "token":
        return variables, None
    if address != "auto" and not _is_loopback(host):
        raise InputError(
            f"the Ray cluster at {address} would be used without a token: whoever reaches it could run code there",
            where="cluster.address",
            fix="Start it with RAY_AUTH_MODE=token, and set that and RAY_AUTH_TOKEN_PATH here too",
        )
    return {"RAY_USAGE_STATS_ENABLED": "0"}, None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
