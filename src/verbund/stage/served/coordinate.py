"""The coordinator's process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from verbund.cluster.worker import Worker
from verbund.comm.wire import Message, Replies
from verbund.errors import VerbundError
from verbund.exchange.parameter_server.coordinator import Coordinator
from verbund.exchange.parameter_server.leases import Leases, stops
from verbund.exchange.parameter_server.placement import place
from verbund.exchange.parameter_server.plan import Plan
from verbund.job import Job
from verbund.run import Run
from verbund.stage.recording import journal_of
from verbund.stage.served import live, meeting

_TURN = 0.1


def work(worker: Worker) -> dict[str, Any]:
    """Hands out tickets until training has ended and all workers have left."""
    settings = worker.settings
    job = Job.build(settings["job"], {}, source="job.toml", folder=settings["folder"])
    exchange, strategy = job.strategy.exchange, job.strategy
    begin = int(settings["begin"])
    due = [job.checkpoint.every]
    due += [job.validate_.every] if settings["validates"] else []
    leases = Leases(
        strategy.islands,
        strategy.world // strategy.islands,
        exchange.divided,
        begin,
        stops(settings["total_steps"], due, settings["tickets_per_epoch"]),
    )
    trouble: list[VerbundError] = []

    def places(plan: Plan) -> list[tuple[int, ...]]:
        return place(plan, exchange.servers, exchange.copies)

    run = Run.open(Path(settings["run"]))
    coordinator = Coordinator(run.servers, leases, exchange.servers, places, settings["judged"], trouble.append)
    journal = journal_of(worker, job)
    worker.at_end.insert(0, journal.close)
    finish = threading.Event()

    def hear(message: Message) -> None:
        if message.kind == "stop":
            # Its own thread has to answer the store too: it may not wait for what others do.
            threading.Thread(target=coordinator.end_soon, args=("interrupt",), daemon=True).start()
        elif message.kind == "finish":
            finish.set()
        elif message.kind == "islands":
            count = int(message.fields["count"])
            threading.Thread(target=coordinator.want, args=(count,), daemon=True).start()

    worker.hears = hear
    worker.supervise()
    listening = meeting.listener(worker)
    replies = Replies(coordinator.handle)
    meeting.accept(listening, replies.serve)
    meeting.publish(worker, listening.address, job.cluster.step_deadline)
    live.announce(run, listening.address, meeting.credentials(worker))
    worker.at_end.append(lambda: live.withdraw(run))
    worker.doing("coordinating", begin)
    if worker.stopping:
        coordinator.end_soon("interrupt")
    until = settings["until"]
    while not finish.wait(_TURN) and not trouble and not worker.orphaned:
        if until is not None and time.monotonic() >= until:
            coordinator.end_soon("seconds")
            until = None
    if trouble:
        raise trouble[0]
    return {}
