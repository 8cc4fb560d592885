"""A server in threads of this process, and clients whose processes are a stub."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conftest import MakeJob
from verbund import task as tasks
from verbund.comm.wire import Enrolled, Identity, Pinned, listen
from verbund.errors import VerbundError
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.policy import Policy
from verbund.job import Job, Strategy
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.stage.federated.aggregate import Aggregator
from verbund.stage.federated.conversation import Conversation
from verbund.stage.federated.files import SHARED, TOLD, packed, unpacked
from verbund.stage.federated.home import Home
from verbund.stage.federated.line import Line
from verbund.stage.federated.serve import terms_of
from verbund.stage.federated.server import Server


def written(path: Path) -> list[str]:
    """The whole lines of a file that somebody may be writing."""
    whole, _, _ = path.read_text().rpartition("\n")
    return whole.splitlines()


class Direct:
    def __init__(self, do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._do, self._turn = do, threading.Lock()

    def do(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        with self._turn:
            return {"seconds": 0.0, **self._do(order)}


@dataclass
class Held:
    """A server in threads of this process."""

    job: Job
    folder: Path
    address: str
    enrolment: Enrolment
    server: Server
    failures: list[VerbundError]

    def client(self, name: str) -> Line:
        home = self.folder / name
        identity = Identity.kept(home / "identity.pem")
        if name not in self.enrolment.enrolled():
            secret = self.enrolment.invite(name, {}, 60.0).secret
            self.enrolment.enrol(name, secret, identity.certificate)
        return Line(self.address, Pinned(self.enrolment.identity.fingerprint, identity), 20.0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in written(self.server.journal.path)]
        return [line for line in lines if line["event"] == kind]


Hold = Callable[..., Held]


@contextmanager
def holding(tmp_path: Path, make_job: MakeJob) -> Iterator[Hold]:
    """Starts a server for two clients."""
    started: list[tuple[Held, threading.Thread, Any, list[int]]] = []

    def start(rounds: int = 2, **exchange: Any) -> Held:
        settings = {"name": "federated", "clients": 2, "round": {"quorum": 1, "lost_after": 5.0, "gather": 20.0}}
        changes = {
            "train.steps": rounds,
            "train.optimizer": {"name": "sgd", "lr": 0.1},
            "strategy.exchange": {**settings, **exchange},
        }
        job = make_job(changes=changes)
        enrolment = Enrolment(tmp_path / "federation")
        alone = job.model_copy(update={"strategy": Strategy(exchange=job.strategy.exchange)})
        replica = Replica(tasks.load(job), alone, Mesh(), Groups.alone(torch.device("cpu")))
        aggregator = Aggregator(job, replica, tmp_path / "run" / "federated", job.strategy.exchange.clients or 2)
        listener = listen("tcp:127.0.0.1:0", Enrolled(enrolment.identity, enrolment.known))
        (tmp_path / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
        run = tmp_path / "run"
        arguments = (terms_of(job), enrolment, Direct(aggregator.do), lambda text: None)
        server = Server(job, run / "federated", run / "checkpoints", *arguments)
        address = listener.address.removeprefix("tcp:")
        held = Held(job, tmp_path, address, enrolment, server, [])
        stopped = [0]

        def work() -> None:
            try:
                server.hold(listener, lambda: stopped[0])
            except VerbundError as error:
                held.failures.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        started.append((held, thread, listener, stopped))
        return held

    yield start
    for held, thread, listener, stopped in started:
        stopped[0] = 2
        thread.join(20.0)
        held.server.close()
        listener.close()


class Stub:
    """What does a client's orders: fails as it is told, then sends ones."""

    def __init__(self, folder: Path, failures: list[VerbundError]) -> None:
        self._folder, self.failures = folder, failures

    def do(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        content = Content(self._folder / "content")
        if self.failures:
            error = self.failures.pop(0)
            error.trace = "a traceback with row 17"
            raise error
        if order["order"] != "train":
            return {"state": None}
        shared, _ = unpacked(content.path(order["sha256"]), SHARED, TOLD)
        change = packed(difference={name: torch.ones_like(values) for name, values in shared.items()}, aux={})
        facts = {"sha256": content.put(change), "bytes": len(change), "version": order["version"], "weight": 1.0}
        return {"facts": {**facts, "local_steps": 1, "sums": {}}, "kept": False, "seconds": 0.1}

    def end(self) -> None:
        pass


def part(held: Held, name: str, failures: list[VerbundError], policy: Policy) -> tuple[Conversation, Home]:
    """Takes part as a client whose processes are a stub."""
    line, home = held.client(name), Home(held.folder / name)
    offer = line.join().offer
    folder = home.job(offer.digest)
    offer.write(folder)
    job = offer.job_at(folder, str(held.folder / "data.npz"), 1)
    conversation = Conversation(line, home, folder, name, policy, job, lambda text: None)
    conversation.begin(Stub(folder, failures))  # type: ignore[arg-type]
    return conversation, home
