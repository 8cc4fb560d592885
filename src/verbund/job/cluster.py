"""The section `cluster`."""

from __future__ import annotations

import ipaddress
import re
import shlex
from typing import Annotated, Literal

from pydantic import Field, model_validator

from verbund.job.section import Positive, Section

LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):[0-9]{1,5}")
"""An address to listen at: host and port; an IPv6 host stands in brackets."""


class Cluster(Section):
    """Where processes run, and how long anything may take."""

    kind: Literal["local", "hosts", "external", "ray"] = "local"
    """`local`: this machine. `hosts`: several, over a network, which the command reaches itself. `external`: machines
    that are started from outside, each with `verbund join`. `ray`: the nodes of a Ray cluster. What follows for another
    kind does nothing."""
    hosts: Annotated[list[str], Field(examples=[["10.0.0.1", "10.0.0.2"]])] = []
    """Kind `hosts`: names or addresses. Workers fill them in the order of ranks; an island stays on one host where it
    fits. Folders that a host does not see it does not need: it gets task and data from the command."""
    slots: Annotated[Positive | list[Positive] | None, Field(examples=[4])] = None
    """Kind `hosts`: workers that a host takes, or a list with one number a host; default: an even share."""
    command: str = "ssh -o BatchMode=yes -o ConnectTimeout=20 {host}"
    """Kind `hosts`: what makes the command line that follows it run on a host. The machine of the command itself needs
    none."""
    trusted_network: Annotated[str | None, Field(examples=["10.0.0.0/24"])] = None
    """Where there are several hosts: a network that is yours alone. Workers exchange tensors there without encryption.
    Elsewhere only islands that each lie on one host and train alone (local_sgd, diloco) may have several hosts: their
    exchange is encrypted."""
    nodes: Positive | None = None
    """Kinds `external` and `ray`: hosts that take part at least; default: as few as have the slots."""
    listen: Annotated[str | None, Field(examples=["10.0.0.1:29170"])] = None
    """Kinds `external` and `ray`: where the command listens; port 0 takes a free one. Default: a free port of its
    address in `trusted_network`, else of loopback."""
    join_file: str | None = None
    """Kind `external`: the file in which the address is published; `verbund join FILE` reads it there. Default: one
    beside the converted data."""
    secret_file: str | None = None
    """Kind `external`: the file with the secret that machines must know to join; default: `VERBUND_SECRET_FILE`, else a
    new one beside the published address."""
    join_within: Annotated[float, Field(gt=0)] = 300.0
    """Kinds `external` and `ray`: seconds that the command waits until there are as many slots as the job needs."""
    address: Annotated[str | None, Field(examples=["auto", "10.0.0.1:6379"])] = None
    """Kind `ray`: of the Ray cluster, or `auto`; default: one on this machine, for the run alone."""
    resources: dict[str, Annotated[float, Field(ge=0)]] = {"CPU": 1.0}
    """Kind `ray`: what each worker asks Ray for, e.g. `{ CPU = 1, GPU = 1 }`. The workers of an island, or the share of
    one of `nodes`, get theirs on one node."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads per worker. 0: training shares the cores among the workers, and evaluation uses 1, so that its
    result is the same bit for bit for any number of workers."""
    heartbeat: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two signs of life of a worker."""
    lost_after: Annotated[float, Field(gt=0)] = 30.0
    """Seconds without a sign of life after which a worker counts as lost. On a host with too much to do, where signs of
    life come late, it is four times the longest pause of late, if that is longer, and at most four times this."""
    step_deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that any one step, batch or save may take before the run fails and names who is missing."""
    orphan_grace: Annotated[float, Field(gt=0)] = 30.0
    """Seconds after the loss of the command within which its workers have finished their step, saved it and ended."""
    replacements: Annotated[int, Field(ge=0)] = 10
    """Losses of processes that a training survives within `replacement_window`; one more ends the run, unless
    `min_workers` says otherwise. Where each worker has the whole model, with parameter servers, and where islands train
    alone, the lost ones are replaced while the others go on; where the mesh divides it, the others wait for them, and
    what they held comes from memory (`checkpoint.mirror`); else all begin again from the newest checkpoint."""
    replacement_window: Annotated[float, Field(gt=0)] = 600.0
    """Seconds; see `replacements`."""
    min_workers: Positive | None = None
    """Where each worker has the whole model: with fewer the others wait for those that are to come, and with as many
    they go on where no more losses are replaced. Default: one goes on as long as others are to come."""
    max_workers: Positive | None = None
    """The most workers that `verbund scale` takes. Default: those that the strategy names."""
    stop_grace: Annotated[float, Field(gt=0)] = 10.0
    """Seconds a process gets to end when asked, before it is killed."""

    @property
    def spread(self) -> bool:
        """Whether processes come from beyond this machine, or may."""
        return self.kind != "local"

    @model_validator(mode="after")
    def _hosts_fit(self) -> Cluster:
        problems = []
        if self.kind == "hosts" and not self.hosts:
            problems.append('kind `hosts` needs `hosts`, e.g. `hosts = ["10.0.0.1", "10.0.0.2"]`')
        if twice := sorted({host for host in self.hosts if self.hosts.count(host) > 1}):
            problems.append(f"`hosts` names {', '.join(twice)} more than once; `slots` says how many workers it takes")
        if any(not host.strip() or host.startswith("-") or any(map(str.isspace, host)) for host in self.hosts):
            problems.append("a host is a name or an address, without spaces and not beginning with `-`")
        if isinstance(self.slots, list) and len(self.slots) != len(self.hosts):
            problems.append(f"`slots` has {len(self.slots)} numbers for {len(self.hosts)} hosts")
        problems += _command_problems(self.command)
        if self.listen is not None:
            problems += _listen_problems(self.listen)
        if self.trusted_network is not None:
            try:
                network = ipaddress.ip_network(self.trusted_network)
            except ValueError as error:
                problems.append(f"`trusted_network` is no network such as 10.0.0.0/24: {error}")
            else:
                outside = [
                    host for host in self.hosts if _is_address(host) and ipaddress.ip_address(host) not in network
                ]
                if outside:
                    problems.append(f"{', '.join(outside)} does not lie in `trusted_network` {network}")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _command_problems(command: str) -> list[str]:
    try:
        words = shlex.split(command)
        [word.format(host="host") for word in words]
    except (ValueError, KeyError, IndexError) as error:
        return [f"`command` cannot be read: {error}; the host's name is `{{host}}`"]
    return [] if words else ["`command` is empty; it is what reaches a host, e.g. `ssh {host}`"]


def _listen_problems(listen: str) -> list[str]:
    if LISTEN.fullmatch(listen) and int(listen.rpartition(":")[2]) < 1 << 16:
        return []
    return [f"`listen` is an address with a port, such as 10.0.0.1:29170, not `{listen}`"]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
