"""A server's process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from verbund.cluster.worker import Worker
from verbund.comm.wire import Message
from verbund.exchange.parameter_server.custody import Custody
from verbund.exchange.parameter_server.server import Server
from verbund.job import Job
from verbund.mesh import device
from verbund.observe.network import Links
from verbund.run import Run
from verbund.stage.recording import count, journal_of
from verbund.stage.served import meeting

_TURN = 0.5


def work(worker: Worker) -> dict[str, Any]:
    """Holds its blocks until training has ended and all workers have left."""
    settings, spec = worker.settings, worker.spec
    job = Job.build(settings["job"], {}, source="job.toml", folder=settings["folder"])
    exchange = job.strategy.exchange
    device.use_threads(job.cluster.threads, spec.residents)
    coordination = meeting.coordination(worker, job.cluster.step_deadline)
    serving, finish = threading.Event(), threading.Event()

    def hear(message: Message) -> None:
        if message.kind == "finish":
            finish.set()
            if not serving.is_set():  # it has come late, and would wait for the coordinator, which has ended
                coordination.close(wait=False)

    worker.hears = hear
    worker.supervise()
    run = Run.open(Path(settings["run"]))
    journal = journal_of(worker, job)
    links = Links()
    worker.at_end.insert(0, journal.close)
    worker.doing("waiting for the model", 0)
    plan, view = coordination.plan()
    folder = run.servers / f"server-{spec.rank}" if exchange.copies == 0 and exchange.log else None
    generation = spec.life + 1
    deadline = job.cluster.step_deadline
    recovered = folder is not None and bool(view.seats[spec.rank].address)
    custody = Custody(plan, spec.rank, generation, folder, meeting.credentials(worker), deadline, coordination.joined)
    server = Server(custody, closing=links.sample)
    listening = meeting.listener(worker)
    threading.Thread(target=server.serve, args=(listening,), name="accepting", daemon=True).start()
    coordination.watch(server.see)
    coordination.seat(spec.rank, generation, listening.address, recovered)

    def totals() -> None:
        count(journal, links)
        journal.totals("server", **server.totals())

    worker.at_end.insert(0, totals)
    serving.set()
    worker.doing("serving", int(settings["begin"]))
    while not finish.wait(_TURN) and not worker.orphaned:
        if server.failure is not None:
            raise server.failure
        if journal.due:
            totals()
            journal.flush()
    coordination.close()
    server.close()
    return {}
