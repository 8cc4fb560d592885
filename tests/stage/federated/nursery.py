"""Servers and clients for tests: processes that a process without threads forks, which has imported torch once.

They are the product's own but for the processes that a command would start besides: these compute in here.
Each can be told to kill itself at the n-th of its operations that others see: what goes to disk, and to the wire.

Run as `python nursery.py`; each line of standard input is a process to start, each line of standard output its pid.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verbund import task as tasks
from verbund.comm.wire import Connection, Enrolled, Identity, Pinned, listen
from verbund.data.prepare import Prepared
from verbund.data.sets import open_sets
from verbund.exchange.federated.content import Content
from verbund.exchange.federated.enrolment import Enrolment
from verbund.exchange.federated.policy import Policy
from verbund.job import Job, Strategy
from verbund.mesh.axes import Mesh
from verbund.mesh.groups import Groups
from verbund.mesh.replica import Replica
from verbund.stage.federated.aggregate import Aggregator
from verbund.stage.federated.conversation import Conversation
from verbund.stage.federated.home import Home
from verbund.stage.federated.island import Training
from verbund.stage.federated.line import Line
from verbund.stage.federated.local import LocalTraining
from verbund.stage.federated.serve import terms_of
from verbund.stage.federated.server import Server
from verbund.stage.island import Island


class Direct:
    """Does orders in this process."""

    def __init__(self, do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._do, self._turn = do, threading.Lock()

    def do(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        with self._turn:
            return {**self._do(order), "seconds": 0.0}

    def end(self) -> None:
        pass


def strike(at: int | None, before: bool) -> None:
    """From now on the n-th operation that others see is this process's last one, done or not."""
    count = 0
    lock = threading.Lock()

    def wrapped(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                mine = count
            if mine == at and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*arguments, **more)
            if mine == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    for name in ("replace", "fsync", "fdatasync"):
        setattr(os, name, wrapped(getattr(os, name)))
    Connection.send = wrapped(Connection.send)  # type: ignore[method-assign]


def keep_all(folder: Path) -> None:
    """From now on files that are removed can be found in a folder."""
    folder.mkdir(exist_ok=True)
    keep = Content.keep

    def linked(self: Content, digests: set[str]) -> None:
        link_all(self.folder, folder)
        keep(self, digests)

    Content.keep = linked  # type: ignore[method-assign]


def link_all(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        if not path.name.startswith(".") and not (folder / path.name).exists():
            os.link(path, folder / path.name)


def replica_of(job: Job, task: tasks.Task) -> Replica:
    alone = job.model_copy(update={"strategy": Strategy(exchange=job.strategy.exchange)})
    return Replica(task, alone, Mesh(), Groups.alone(torch.device("cpu")))


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def serve(given: dict[str, Any]) -> dict[str, Any]:
    job = Job.build(given["job"], {}, source="job.toml", folder=Path(given["folder"]))
    folder = Path(given["run"])
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    enrolment = Enrolment(Path(given["federation"]))
    terms = terms_of(job)
    aggregator = Aggregator(job, replica_of(job, tasks.load(job)), folder / "federated", terms.cohort)
    listener = listen(given["address"], Enrolled(enrolment.identity, enrolment.known))
    strike(given["at"], given["before"])
    arguments = (terms, enrolment, Direct(aggregator.do), say)
    if given.get("kept"):
        keep_all(Path(given["kept"]))
    server = Server(job, folder / "federated", folder / "checkpoints", *arguments)
    server.hold(listener, lambda: 0)
    server.close()
    if given.get("kept"):
        link_all(folder / "federated" / "versions", Path(given["kept"]))
    return {"current": server.journal.current, "phase": server.journal.rounds.phase}


def take_part(given: dict[str, Any]) -> dict[str, Any]:
    home = Home(Path(given["home"]))
    name, fingerprint = given["name"], given["fingerprint"]
    line = Line(given["address"].removeprefix("tcp:"), Pinned(fingerprint, Identity(Path(given["identity"]))), 30.0)
    strike(given["at"], given["before"])
    offer = line.join().offer
    folder = home.job(offer.digest)
    offer.write(folder)
    job = offer.job_at(folder, given["data"], 1)
    task = tasks.load(job)
    train_set, validation_set = open_sets(Prepared(given["prepared"], None), job, task)
    island = Island(job, task, Mesh(), Groups.alone(torch.device("cpu")), train_set, validation_set, None, 1)
    local = LocalTraining(replica_of(job, task), job, train_set, None, job.train.steps)
    policy = Policy(**given.get("policy", {}))
    conversation = Conversation(line, home, folder, name, policy, job, say)
    conversation.begin(Direct(Training(island, local, folder / "content").do))  # type: ignore[arg-type]
    conversation.hold(lambda: False)
    line.close()
    return {"counted": conversation.counted, "model": str(conversation.model)}


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for text in sys.stdin:
        given = json.loads(text)
        if (pid := os.fork()) == 0:
            try:
                result = serve(given) if given["role"] == "server" else take_part(given)
                Path(given["result"]).write_text(json.dumps(result))
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
