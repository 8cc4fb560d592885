"""Saving while servers hold the parameters: they write what is theirs, and the island that leads what is not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from verbund import checkpoint
from verbund.checkpoint.piece import Piece
from verbund.checkpoint.snapshot import Snapshot
from verbund.checkpoint.write import write_part
from verbund.cluster.worker import Worker
from verbund.comm.files import Location
from verbund.comm.wire import Message
from verbund.errors import CheckpointError, RunFailed
from verbund.exchange.parameter_server.client import Client
from verbund.exchange.parameter_server.plan import Plan
from verbund.mesh.replica import Replica
from verbund.stage.background import Background

_KINDS = ("parameters", "buffers")
_AGAIN_SECONDS = 0.5


class Saver:
    """A worker's share of a checkpoint while its island leads; its first worker asks the servers for theirs.

    Args:
        worker: the line to the supervisor, which commits when all parts are there.
        checkpoints: the folder of the run's.
        replica: of which what the servers do not have is saved.
        plan: what they have.
        client: the line to them.
        deadline: seconds that writing may take.
    """

    def __init__(
        self,
        worker: Worker,
        checkpoints: Location,
        replica: Replica,
        plan: Plan,
        client: Client,
        deadline: float,
    ) -> None:
        self._worker, self._checkpoints, self._replica = worker, checkpoints, replica
        self._client, self._deadline = client, deadline
        self._served = {block.name for block in plan.blocks}
        self._snapshot = Snapshot()
        self._background = Background(checkpoints, deadline)
        self._asked: list[Message | Exception] = []
        self._tries = 0

    def save(
        self,
        step: int,
        state: dict[str, Any],
        last: bool = False,
        kept: Iterable[Piece] = (),
        others: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Copies all that is saved, here and on the servers, and lets it be written in the background.

        Args:
            step: after which.
            state: of the training.
            last: nobody trains until it is written, so that it can be done once more if a server is lost.
            kept: what this worker keeps between steps.
            others: what `keep` has given to workers of other islands.
        """
        self.wait()
        mesh = self._replica.mesh
        own = [piece for kind in _KINDS for piece in self._replica.pieces(kind) if piece.name not in self._served]
        if mesh.place("data"):
            own = [replace(piece, owner=False) for piece in own]
        copied = self._snapshot.take([*own, *kept])
        if mesh.leads:
            self._ask(step)
        self._background.start(step, lambda: self._write(step, copied, state, last, others))

    def keep(self, step: int, place: int, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Writes what this worker keeps between steps, for a checkpoint that another island leads; nobody trains.

        Args:
            step: after which.
            place: of its island among all that keep something.
            pieces: what it keeps.

        Returns:
            for `save`: what was written, or the `failure`.
        """
        mesh = self._replica.mesh
        part = mesh.world * (1 + place) + len(self._client.view.seats) + mesh.rank
        try:
            return write_part(checkpoint.partial_folder(self._checkpoints, step), part, pieces)
        except CheckpointError as error:
            return {"failure": str(error)}

    def wait(self) -> None:
        """Waits until the save under way is written; see `Background.wait`."""
        self._background.wait()

    def _ask(self, step: int) -> None:
        """Has all servers copy what is theirs."""
        self._tries += 1
        folder = checkpoint.partial_folder(self._checkpoints, step)
        told = {"step": step, "folder": str(folder), "by": self._by}
        self._asked = self._client.ask_all("save", lambda rank: {**told, "part": self._replica.mesh.world + rank})

    @property
    def _by(self) -> str:
        spec = self._worker.spec
        return f"{spec.name}, {spec.life}, {self._tries}"

    def _write(
        self, step: int, pieces: list[Piece], state: dict[str, Any], last: bool, others: Sequence[dict[str, Any]]
    ) -> None:
        rank, leads = self._replica.mesh.rank, self._replica.mesh.leads
        start = time.monotonic()
        record: dict[str, Any] = {}
        failure = None
        try:
            record = write_part(checkpoint.partial_folder(self._checkpoints, step), rank, pieces)
        except Exception as error:  # whatever it is, the run goes on and the user is told
            failure = f"{error}" or type(error).__name__
        if leads and failure is None:
            failure = next((str(other["failure"]) for other in others if "failure" in other), None)
            for other in others if failure is None else ():
                record["files"] += other["files"]
                record["tensors"] += other["tensors"]
        self._tell(step, rank, record, state if leads else None, failure, start, self._worker.spec.name)
        if not leads:
            return
        found = self._saved(step)
        while last and self._lost(found) and time.monotonic() - start < self._deadline / 2:
            time.sleep(_AGAIN_SECONDS)
            self._ask(step)
            found = self._saved(step)
        for rank, answer in enumerate(found):
            failure = str(answer) if isinstance(answer, Exception) else None
            given = {} if isinstance(answer, Exception) else answer
            self._tell(step, self._replica.mesh.world + rank, given, None, failure, start, f"server {rank}")

    def _saved(self, step: int) -> list[dict[str, Any] | Exception]:
        """By server what it has written, or why it has not."""
        found: list[dict[str, Any] | Exception] = []
        answers = self._client.ask_all("saved", lambda _: {"step": step, "by": self._by})
        for asked, answer in zip(self._asked, answers, strict=True):
            if isinstance(asked, Exception):
                found.append(asked)
            elif isinstance(answer, Exception):
                found.append(answer)
            elif "record" in answer.fields:
                found.append(answer.fields["record"])
            else:
                found.append(RunFailed("it has been replaced in the meantime"))
        return found

    def _lost(self, found: list[dict[str, Any] | Exception]) -> bool:
        """Whether servers have not saved because one was lost, and not for want of a place to write to."""
        troubles = [answer for answer in found if isinstance(answer, Exception)]
        return bool(troubles) and not any(isinstance(trouble, CheckpointError) for trouble in troubles)

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
