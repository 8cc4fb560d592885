"""The command `verbund federate client`: takes part in a server's rounds with data that stay here.

The client alone dials. What the server asks is held against the owner's policy before any code of it runs; the work is
done in processes of an island; what is under way is on disk, so that the whole can be killed and started again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from verbund import task
from verbund.cluster.process import Cluster
from verbund.cluster.replacements import Budget
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.watched import Failed
from verbund.data.manifest import Manifest
from verbund.data.prepare import Prepared, needed
from verbund.errors import DataError, Interrupted, JobError, RunFailed, VerbundError
from verbund.exchange.federated.policy import Policy
from verbund.interrupts import Interrupts
from verbund.job import Job
from verbund.stage import before
from verbund.stage.federated import packages
from verbund.stage.federated.conversation import Conversation
from verbund.stage.federated.desk import failure_of
from verbund.stage.federated.home import Home
from verbund.stage.federated.line import Line
from verbund.stage.federated.orders import Orders
from verbund.stage.processes import with_trace
from verbund.stage.processes import workers as processes


@dataclass(frozen=True)
class Taken:
    """How a client's part ended.

    Args:
        rounds: in which its update counted.
        model: the final parameters, if the training was done.
        home: the client's folder.
    """

    rounds: int
    model: Path | None
    home: Path


def take_part(line: Line, home: Home, data: str, policy: Policy, workers: int = 1, *, quiet: bool = True) -> Taken:
    """Takes part in a server's rounds until they are done.

    Args:
        line: to the server.
        home: the client's folder.
        data: the owner's samples.
        policy: what the owner permits.
        workers: of the island.
        quiet: no progress on standard error.

    Raises:
        InputError: if the policy does not permit the job, or the data do not fit it.
        ClusterLost: if the server is gone for too long.
        RunFailed: if training fails again and again, or the server gives up.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    notify = before.notifier(quiet)
    with home.lock(), Interrupts() as interrupts:
        line.stopped = lambda: bool(interrupts.count)  # nobody may listen there yet
        joined = line.join()
        offer = joined.offer
        folder = home.job(offer.digest)
        task_at = offer.write(folder)
        job = offer.job_at(folder, data, workers)
        home.note("joined", offer=offer.digest, task=offer.task_digest, server=line.head)
        if found := policy.job_problems(offer.facts(job, task_at)):
            line.refuse([problem.where.removeprefix("policy, ") for problem in found])
            home.note("refused", keys=[problem.where for problem in found])
            raise JobError(found)
        notify(f"joined as {joined.name}: {job.train.steps} rounds; task {offer.task_digest[:16]}…")
        with before.cluster_of(job) as cluster:
            try:
                packages.check(job)
                prepared = before.prepared_data(job, notify)
                _check_words(prepared, job)
                before.dry_run(cluster, job, prepared)
            except VerbundError as error:
                line.refuse([], failure_of(error))
                home.note("refused", error=error.record())
                raise
            conversation = Conversation(line, home, folder, joined.name, policy, job, notify)
            conversation.table = Path(prepared.train) if prepared.train is not None else None
            return _Client(job, prepared, home, folder, conversation, notify).run(cluster, interrupts)


def _check_words(prepared: Prepared, job: Job) -> None:
    """Refuses columns whose numbers would differ between owners.

    Raises:
        DataError: naming the column.
    """
    if prepared.train is None:
        return
    columns = needed(job.data, task.functions(job))
    for column in Manifest.read(Path(prepared.train)).columns:
        if column.vocabulary is not None and (columns is None or column.name in columns):
            raise DataError(
                f"`{column.name}` holds words, which every owner's data would number differently",
                where=f"--data, {job.data.train}",
                fix="Give whole numbers that all owners have agreed on. If the model does not need the column, "
                "leave it out of the file; a job with `data.input` instead of a function `inputs` reads no others",
            )


class _Client:
    """The processes of a client, and the thread that talks to the server.

    Args:
        job, prepared: what is trained on what.
        home, folder: of the client, and of this job in it.
        conversation: with the server.
        notify: tells the owner.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        home: Home,
        folder: Path,
        conversation: Conversation,
        notify: before.Notify,
    ) -> None:
        self._job, self._prepared, self._home, self._folder = job, prepared, home, folder
        self._conversation, self._notify = conversation, notify
        self._error: VerbundError | None = None
        self._done = threading.Event()

    def run(self, cluster: Cluster, interrupts: Interrupts) -> Taken:
        """Takes part until the end."""
        settings = before.settings_of(self._job, self._prepared, content=str(self._folder / "content"))
        limits = self._job.cluster
        budget = Budget(limits.replacements, limits.replacement_window)
        talking = threading.Thread(target=self._talk, args=(interrupts,), name="conversation", daemon=True)
        life = 0
        orders = Orders()
        self._conversation.begin(orders)
        talking.start()
        while not self._done.is_set() and not interrupts.count:
            life += 1
            specs = processes(self._job, "verbund.stage.federated.island:work", settings, life)
            try:
                Supervisor(cluster, limits, orders.handle, interrupts).run(specs)
            except Failed as failed:
                error = with_trace(failed)
                self._home.note("failed", error=error.record(), trace=error.trace)
                if not budget.take():
                    self._error = self._error or error
                    self._conversation.give_up(error)
                    break
                former, orders = orders, Orders()
                self._conversation.begin(orders)  # before it hears of the failure: the next round is for the new ones
                former.close(error)
            else:
                orders.close(None)
        self._conversation.stop()
        talking.join(30.0)
        if self._error is not None:
            raise self._error
        if self._conversation.outcome is None:
            raise Interrupted("interrupted", where=str(self._home.folder), fix="The same command goes on")
        return Taken(self._conversation.counted, self._conversation.model, self._home.folder)

    def _talk(self, interrupts: Interrupts) -> None:
        try:
            self._conversation.hold(lambda: bool(interrupts.count))
        except VerbundError as error:
            self._error = self._error or error
        except Exception as error:
            self._error = self._error or RunFailed(f"the client failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._done.set()
            self._conversation.end_processes()
