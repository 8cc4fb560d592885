"""A federation of processes that are forked in `nursery.py`, and can be killed and started again."""

from __future__ import annotations

import json
import random
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import wait_for
from processes import alive
from verbund.comm.wire import Identity
from verbund.data.prepare import prepare
from verbund.exchange.federated.audit import heads_told, verify
from verbund.exchange.federated.enrolment import Enrolment
from verbund.job import Job


class Federation:
    """A server and its clients, each in a process that can be started again."""

    def __init__(self, folder: Path, job: Job, nursery: subprocess.Popen[str], names: Sequence[str]) -> None:
        self.folder, self.job, self._nursery, self.names = folder, job, nursery, names
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{free.getsockname()[1]}"
        self.enrolment = Enrolment(folder / "federation")
        self.prepared = prepare(job.data, folder=Path(job.folder)).train
        self.identities = {}
        for name in names:
            identity = Identity.kept(folder / name / "identity.pem")
            self.enrolment.enrol(name, self.enrolment.invite(name, {}, 60.0).secret, identity.certificate)
            self.identities[name] = identity
        self.pids: dict[str, int] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        """Of clients that permit more than any task."""
        self.keep = False
        """Whether all that the server ever had as files is linked in `kept`."""

    def start(self, who: str, at: int | None = None, before: bool = False) -> None:
        common = {"address": self.address, "result": str(self.folder / f"{who}.json"), "at": at, "before": before}
        if who == "server":
            more: dict[str, Any] = {
                "role": "server",
                "job": self.job.resolved(),
                "folder": self.job.folder,
                "run": str(self.folder / "run"),
                "federation": str(self.enrolment.folder),
                "kept": str(self.folder / "kept") if self.keep else None,
            }
        else:
            more = {
                "role": "client",
                "name": who,
                "home": str(self.folder / who),
                "identity": str(self.identities[who].path),
                "fingerprint": self.enrolment.identity.fingerprint,
                "prepared": self.prepared,
                "data": self.job.data.train,
                "policy": self.policies.get(who, {"tasks": ["*"]}),
            }
        assert self._nursery.stdin
        assert self._nursery.stdout
        self._nursery.stdin.write(json.dumps({**common, **more}) + "\n")
        self._nursery.stdin.flush()
        self.pids[who] = int(self._nursery.stdout.readline())

    def result(self, who: str) -> dict[str, Any] | None:
        path = self.folder / f"{who}.json"
        return json.loads(path.read_text() or "null") if path.exists() else None

    def ended(self, who: str) -> bool:
        return self.result(who) is not None or not alive(self.pids[who])

    def strike(self, who: str, source: random.Random, low: int, high: int, most: int, harmed: int | None = None) -> int:
        """Starts a process again and again, each time to be killed at or before one of its operations, until it comes
        to its end; how many lives that took.

        Args:
            who: the server, or a client.
            source: of the operations, `low` to `high`, at which it is killed.
            most: lives, fewer than which it must take.
            harmed: from that life on nothing kills it; None: something always may.
        """
        lives = 0
        while self.result(who) is None:
            lives += 1
            assert lives < most, "it does not get on"
            at = source.randint(low, high) if harmed is None or lives < harmed else None
            self.start(who, at, source.random() < 0.5)
            wait_for(lambda: self.ended(who), f"the end of {who}", 60.0)
        return lives

    def finish(self) -> dict[str, Any]:
        """Waits for all to end; the server's result."""
        for who in ("server", *self.names):
            wait_for(lambda who=who: self.ended(who), f"the end of {who}", 60.0)
            assert self.result(who) is not None, f"{who} ended without a result"
        found = self.result("server")
        assert found is not None
        return found

    def events(self) -> list[dict[str, Any]]:
        """The lines of the server's audit log, which is what clients were told."""
        log = self.folder / "run" / "federated" / "audit.jsonl"
        for name in self.names:
            verify(log, heads_told(self.folder / name / "audit.jsonl", verify(log).log))
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        """The same while they run."""
        log = self.folder / "run" / "federated" / "audit.jsonl"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
