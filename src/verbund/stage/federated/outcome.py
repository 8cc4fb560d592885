"""What a federated run comes to: its rounds as the journal has them, its summary and report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verbund.errors import Interrupted, VerbundError
from verbund.exchange.federated.round import Event
from verbund.job import Job
from verbund.observe.events import Journal
from verbund.run import Run
from verbund.stage.federated.desk import Client


class Recorder:
    """Writes rounds to the journal of a run. Each life of a server records those of the lives before it, too: the
    audit log has them, and the newest file of the journal is whole.

    Args:
        run: whose journal it is.
        job: how long it may be.
        generation: the number of this life.
        history: events of the lives before.
    """

    def __init__(self, run: Run, job: Job, generation: int, history: Iterable[Event]) -> None:
        self._journal = Journal(run.journal, "server", 0, generation, limit_mb=job.observe.journal_mb)
        self.ended_by = "steps"
        """What the training ended by, if it has."""
        self._cohort: list[str] = []
        self._updates: dict[str, Event] = {}
        self._closed: list[str] = []
        self._refused: dict[str, str] = {}
        self._clients: list[str] = []
        self._asked: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._exchanged = 0
        """Bytes of messages of secure aggregation in the round under way, from clients."""
        for event in history:
            self.add(event)

    def add(self, event: Event) -> None:
        """Takes an event of the rounds."""
        match event["event"]:
            case "round":
                self._cohort, self._updates, self._refused, self._exchanged = event["cohort"], {}, {}, 0
                for name in self._cohort:
                    self._asked[name] = self._asked.get(name, 0) + 1
            case "started":
                self._cohort.append(event["client"])
                self._asked[event["client"]] = self._asked.get(event["client"], 0) + 1
            case "closed":
                self._closed = event["clients"]
            case "update":
                self._updates[event["client"]] = event
                self._refused.pop(event["client"], None)  # it was lost, and is back
            case "failed":
                self._refused[event["client"]] = f"{event['state']}: {event['reason']}"
            case "answered":
                self._exchanged += event["bytes"]
            case "summed":
                for name in event["dropped"]:
                    self._updates.pop(name, None)
                    self._refused[name] = event["cheated"].get(name) or "dropped out of secure aggregation"
            case "skipped":
                for name in self._cohort:
                    self._failed[name] = self._failed.get(name, 0) + 1
            case "unusable":
                self._updates.pop(event["client"], None)
                self._refused[event["client"]] = event["reason"]
            case "stepped":
                self._stepped(event)
            case "ended":
                self.ended_by = event["why"]
            case "evaluated":
                self._journal.event("validation", step=event["version"], metrics=event["metrics"])

    def participation(self) -> dict[str, dict[str, int]]:
        """By client: how often it was asked, how often its update counted, and in how many rounds it failed."""
        return {
            name: {"asked": times, "counted": self._counted.get(name, 0), "failed": self._failed.get(name, 0)}
            for name, times in sorted(self._asked.items())
        }

    def close(self) -> None:
        """Writes what is there."""
        self._journal.close()

    def _stepped(self, event: Event) -> None:
        number = event["round"] - 1
        used = {name: self._updates[name] for name in self._closed if name in self._updates}
        for counts, names in ((self._counted, used), (self._failed, self._refused)):
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        if event["metrics"]:
            self._journal.event("validation", step=number, metrics=event["metrics"])
        if event.get("privacy"):
            self._journal.event("privacy", **event["privacy"]["spent"])
        weights = [update["weight"] for update in used.values()]
        loss = float("nan") if event["loss"] is None else event["loss"]
        self._journal.step(number, loss, event["weight"], int(event["weight"]), 0.0)
        self._journal.event(
            "round",
            round=number,
            clients=len(used),
            cohort=list(used),
            asked=len(self._cohort),
            weights=weights,
            refused=self._refused,
            loss=event["loss"],
            local_steps=sum(update["local_steps"] for update in used.values()),
            norm=event["norm"],
            agreement=event["agreement"],
            staleness=max((number - update["base_version"] for update in used.values()), default=0),
            bytes={
                "down": event["size"] * len(self._cohort),
                "up": sum(update["bytes"] for update in used.values()) + self._exchanged,
            },
        )
        # Where nobody is waited for, others are under way or in the buffer already.
        self._updates = {name: update for name, update in self._updates.items() if name not in used}
        self._cohort, self._refused = [], {}


def close_run(
    run: Run, job: Job, recorder: Recorder, clients: Mapping[str, Client], error: VerbundError | None, seconds: float
) -> Run:
    """Writes summary and report; raises what ended the run, if it did not come to its end.

    Args:
        run: that has ended.
        job: that was trained.
        recorder: of its rounds.
        clients: what the desk knows of them.
        error: that ended the run.
        seconds: of this life of the server.
    """
    from verbund.observe.report import write_report
    from verbund.observe.summary import summarise

    recorder.close()
    status = "done" if error is None else "interrupted" if isinstance(error, Interrupted) else "failed"
    try:
        summary = summarise(
            run.path,
            status=status,
            cause=error.record() if error else None,
            strategy=job.strategy.model_dump(),
            world=len(recorder.participation()),
            ended_by=recorder.ended_by if error is None else None,
        )
        summary["seconds"] |= {"total": round(seconds, 3)}
        summary["bytes"] |= {
            "received": sum(client.bytes[0] for client in clients.values()),
            "sent": sum(client.bytes[1] for client in clients.values()),
            "how": "whole messages from and to clients in this life of the server",
        }
        summary |= {"participation": recorder.participation(), "attempt": run.attempt}
        run.write_summary(summary)
        write_report(run.path, summary)
    except VerbundError as another:
        error = error or another
    if error is not None:
        error.run = run.path
        raise error
    return run
