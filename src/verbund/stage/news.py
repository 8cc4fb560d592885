"""What is heard of a training while it goes on: it is told in the journal, on the terminal and to TensorBoard."""

from __future__ import annotations

from typing import Any

from verbund.cluster.membership import Era
from verbund.cluster.process import Cluster, Process, ProcessSpec
from verbund.cluster.quorum import Quorum
from verbund.comm.wire import Message
from verbund.job import Job
from verbund.observe.energy import EnergyMeter
from verbund.observe.events import Journal
from verbund.observe.network import Links
from verbund.observe.progress import Progress
from verbund.run import Run
from verbund.stage.commits import Commits
from verbund.stage.slow_workers import SlowWorkers
from verbund.stage.stopping import Promises


class News:
    """The supervisor's side.

    Args:
        cluster: where the processes run.
        run: that is trained.
        job: of it.
        generation: of this start.
        journal: the supervisor's.
        progress: the terminal.
        commits: get the parts of saves.
    """

    def __init__(
        self,
        cluster: Cluster,
        run: Run,
        job: Job,
        generation: int,
        journal: Journal,
        progress: Progress,
        commits: Commits,
    ) -> None:
        self._journal, self._progress, self._commits, self._generation = journal, progress, commits, generation
        self._board = _board(run, job)
        self._meter = EnergyMeter()
        self._meter.start()
        self._links = Links() if cluster.address is not None else None
        self._slow = SlowWorkers(job.strategy)
        self.promises: Promises | None = None
        """How islands that train alone agree on the step after which they stop."""
        self.quorum: Quorum | None = None
        """Those islands, if they come and go."""
        self.lives: dict[tuple[str, int], int] = {}
        """By role and rank how many processes there were before the newest, of those that were replaced."""

    def hear(self, process: Process, message: Message) -> None:
        """A process tells something that is not about life and death."""
        fields = message.fields
        if message.kind == "progress":
            self._meter.joules()  # often enough that no counter wraps unseen
            if self._links is not None:
                self._links.sample()  # of connections that are closed at the end the last count holds
            self._progress.update(fields["step"], fields["loss"], fields["samples_per_second"])
            if self._board is not None:
                self._board.step(fields["step"], fields["loss"], samples_per_second=fields["samples_per_second"])
        elif message.kind == "validation":
            self._progress.validation(fields["step"], fields["metrics"])
            if self._board is not None:
                self._board.validation(fields["step"], fields["metrics"])
        elif message.kind == "saved":
            if warning := self._commits.saved(fields):
                self._progress.message(warning)
        elif message.kind == "regained":
            self._journal.event("recovery", **{key: fields[key] for key in ("how", "step", "again")})
            self._progress.message(_regained(**fields))
        elif message.kind == "wish" and self.promises is not None:
            self.promises.wish(fields["reason"])
            if self.quorum is not None:
                self.quorum.closing = True
        elif message.kind == "promise" and self.promises is not None:
            self.promises.promise(process.spec.rank, fields["step"])
        elif message.kind == "paces":
            for text in self._slow.record(fields["rows"]):
                self.mention(text)
        elif message.kind == "note":
            self.mention(fields["text"])

    def mention(self, text: str, **more: Any) -> None:
        """Something that the user should know; `more` are fields of the journal's event."""
        self._journal.event("note", text=text, **more)
        self._progress.message(text)

    def replacement(self, fresh: list[ProcessSpec], why: str) -> None:
        """Processes take the places of others."""
        self.lives.update({(spec.role, spec.rank): spec.life for spec in fresh})
        self._journal.event("replacement", processes=", ".join(spec.name for spec in fresh), why=why)
        self._progress.message(f"{why}: another process takes its place")

    def members(self, text: str, replaced: str) -> None:
        """Who takes part changes; `replaced` names a process whose place another takes, if that is why."""
        if replaced:
            self._journal.event("replacement", processes=replaced, why=text)
            self._progress.message(text)
        else:
            self.mention(text)

    def era(self, era: Era) -> None:
        """These workers go on together."""
        members = list(era.members)
        self._membership(workers=len(members), era=era.number, members=members)

    def islands(self, ranks: list[int]) -> None:
        """The islands of these workers are there."""
        self._membership(workers=len(ranks), era=0, members=ranks)

    def left(self, era: Era, broken: bool) -> None:
        """Islands that train alone go on in another era; `broken`: as one is left out."""
        assert self.quorum is not None
        self.era(Era(era.number, tuple(self.quorum.ranks())))
        if broken and self.promises is not None:
            self.promises.settle()

    def close(self, warnings: list[str]) -> None:
        """Nothing more will be heard; the last are the supervisor's warnings. What was measured all along is told."""
        if self._links is not None:
            self._journal.totals("links", links=self._links.sample(), wire=self._links.wire())
        for warning in warnings:
            self.mention(warning)
        self._progress.close()
        if self._board is not None:
            self._board.close()
        if (joules := self._meter.joules()) is not None:
            self._journal.totals("energy", joules=joules, how=self._meter.how)

    def _membership(self, **fields: Any) -> None:
        self._journal.event("membership", generation=self._generation, **fields)


def _regained(how: str, step: int, again: int) -> str:
    whose = "peers'" if how == "peers" else "mirrors in"
    many = {0: "no step is", 1: "one step is"}.get(again, f"{again} steps are")
    return f"training goes on after step {step} from {whose} memory; {many} done again"


def _board(run: Run, job: Job) -> Any:
    """What writes TensorBoard's event files while the run goes on, if the job wants them."""
    if not job.observe.tensorboard:
        return None
    from verbund.observe.tensorboard import Board

    return Board(run.path)
