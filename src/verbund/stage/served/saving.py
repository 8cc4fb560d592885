"""Saving while servers hold the parameters: they write what is theirs, and the island that leads what is not."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from verbund import checkpoint
from verbund.checkpoint.piece import Piece
from verbund.checkpoint.snapshot import Snapshot
from verbund.checkpoint.write import write_part
from verbund.cluster.worker import Worker
from verbund.comm.wire import Message
from verbund.errors import RunFailed
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.plan import Plan
from verbund.mesh.replica import Replica
from verbund.run import Run

_KINDS = ("parameters", "buffers")


class Saver:
    """A worker's share of a checkpoint while its island leads; its first worker asks the servers for theirs.

    Args:
        worker: the line to the supervisor, which commits when all parts are there.
        run: where checkpoints lie.
        replica: of which what the servers do not have is saved.
        plan: what they have.
        client: the line to them.
        deadline: seconds that writing may take.
    """

    def __init__(self, worker: Worker, run: Run, replica: Replica, plan: Plan, client: Client, deadline: float) -> None:
        self._worker, self._run, self._replica = worker, run, replica
        self._client, self._deadline = client, deadline
        self._served = {block.name for block in plan.blocks}
        self._snapshot = Snapshot()
        self._writing: threading.Thread | None = None
        self._step = 0
        self._asked: list[Message | Exception] = []

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copies all that is saved, here and on the servers, and lets it be written in the background."""
        self.wait()
        mesh = self._replica.mesh
        own = [piece for kind in _KINDS for piece in self._replica.pieces(kind) if piece.name not in self._served]
        if mesh.place("data"):
            own = [replace(piece, owner=False) for piece in own]
        copied = self._snapshot.take(own)
        folder = checkpoint.partial_folder(self._run.checkpoints, step)
        if mesh.leads:
            self._asked = self._client.ask_all(
                "save", lambda rank: {"step": step, "folder": str(folder), "part": mesh.world + rank}
            )
        self._step = step
        self._writing = threading.Thread(target=self._write, args=(step, copied, state), name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Waits until the save under way is written.

        Raises:
            RunFailed: if that takes longer than the deadline.
        """
        if self._writing is not None:
            self._writing.join(self._deadline)
            if self._writing.is_alive():
                raise RunFailed(
                    f"the checkpoint of step {self._step} is not written after {self._deadline:.0f} s",
                    where=str(self._run.checkpoints),
                    fix="The disk is too slow or hangs; `cluster.step_deadline` is the limit",
                )
            self._writing = None

    def _write(self, step: int, pieces: list[Piece], state: dict[str, Any]) -> None:
        rank, leads = self._replica.mesh.rank, self._replica.mesh.leads
        start = time.monotonic()
        record: dict[str, Any] = {}
        failure = None
        try:
            record = write_part(checkpoint.partial_folder(self._run.checkpoints, step), rank, pieces)
        except Exception as error:  # whatever it is, the run goes on and the user is told
            failure = f"{error}" or type(error).__name__
        self._tell(step, rank, record, state if leads else None, failure, start, self._worker.spec.name)
        if not leads:
            return
        answers = self._client.ask_all("saved", lambda _: {"step": step})
        for rank, (asked, answer) in enumerate(zip(self._asked, answers, strict=True)):
            trouble = next((each for each in (asked, answer) if isinstance(each, Exception)), None)
            given = {} if isinstance(answer, Exception) else answer.fields["record"]
            failure = None if trouble is None else str(trouble)
            self._tell(step, self._replica.mesh.world + rank, given, None, failure, start, f"server {rank}")

    def _tell(
        self,
        step: int,
        part: int,
        record: dict[str, Any],
        state: dict[str, Any] | None,
        failure: str | None,
        start: float,
        process: str,
    ) -> None:
        told = {"process": process, "seconds": time.monotonic() - start}
        self._worker.send("saved", step=step, part=part, record=record, state=state, failure=failure, **told)
