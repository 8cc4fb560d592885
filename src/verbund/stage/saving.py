"""Saving from a worker: the state is copied at a step's border, and written while the training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from verbund import checkpoint
from verbund.checkpoint.piece import Piece
from verbund.checkpoint.snapshot import Snapshot
from verbund.checkpoint.write import write_part
from verbund.cluster.worker import Worker
from verbund.comm.files import Location
from verbund.exchange.local_steps import LocalSteps
from verbund.job import Job
from verbund.mesh.axes import Mesh
from verbund.mesh.replica import Replica
from verbund.stage.background import Background
from verbund.stage.judge import Judge

KINDS = ("parameters", "buffers", "optimizer", "ema")
_PART_BYTES = 16 << 20


class Saver:
    """One worker's share of every checkpoint.

    Args:
        worker: the line to the supervisor, which commits when all parts are there.
        checkpoints: the folder of the run's.
        replica: what is saved.
        deadline: seconds that writing one part may take.
        exchange: between islands that train alone.
        mesh: the workers that share a save, where they are not those of the replica.
        more: what is saved besides.
    """

    def __init__(
        self,
        worker: Worker,
        checkpoints: Location,
        replica: Replica,
        deadline: float,
        exchange: LocalSteps | None = None,
        mesh: Mesh | None = None,
        more: Callable[[], Iterable[Piece]] = tuple,
    ) -> None:
        self._given, self._more = mesh, more
        self._worker = worker
        self.checkpoints = checkpoints
        self.replica = replica
        self._exchange = exchange
        self._snapshot = Snapshot()
        self._background = Background(checkpoints, deadline)
        self.written: dict[str, Any] = {}
        """What the supervisor was told of the last part that was written, JSON values."""

    def save(self, step: int, state: dict[str, Any], era: int = 0) -> None:
        """Copies this worker's share and writes it in the background; waits only if the former save still runs.

        Args:
            step: how many are done.
            state: the training's own, JSON values.
            era: of those who save.
        """
        self.wait()
        pieces = self._copied()
        self._background.start(step, lambda: self._write(step, pieces, state, era))

    @property
    def last(self) -> int | None:
        """The step of the newest save that was begun."""
        return self._background.last

    def wait(self) -> None:
        """Waits until the save under way is written; see `Background.wait`."""
        self._background.wait()

    @property
    def _mesh(self) -> Mesh:
        return self._given or self.replica.mesh  # which changes as workers come and go

    def _copied(self) -> list[Piece]:
        """A copy of what this worker saves; the rest is only noted."""
        replica, mesh = self.replica, self._mesh
        own = [*replica.pieces("exchange"), *self._more()]
        if self._exchange is None:
            pieces = [piece for kind in KINDS for piece in replica.pieces(kind)]
            return self._snapshot.take(shared(pieces, mesh.place("islands", "data"), mesh.islands * mesh.data) + own)
        self._exchange.drain()
        with self._exchange.swapped():
            # The first island speaks for all; of its own optimiser alone, which knows what that island has trained.
            kinds = [kind for kind in KINDS if not mesh.island or kind != "optimizer"]
            pieces = [piece for kind in kinds for piece in replica.pieces(kind)]
            if mesh.island:
                pieces = [replace(piece, owner=False) for piece in pieces]
            pieces += self._exchange.state.pieces()
            return self._snapshot.take(shared(pieces, mesh.place("data"), mesh.data) + own)

    def _write(self, step: int, pieces: list[Piece], state: dict[str, Any], era: int) -> None:
        rank = self._mesh.rank
        start = time.monotonic()
        record: dict[str, Any] = {}
        failure = None
        try:
            folder = checkpoint.partial_folder(self.checkpoints, step)
            record = write_part(folder, rank, pieces)
        except Exception as error:  # whatever it is, the run goes on and the user is told
            failure = f"{error}" or type(error).__name__
        self.written = {
            "step": step,
            "part": rank,
            "parts": self._mesh.world,
            "era": era,
            "record": record,
            "state": state if rank == 0 else None,
            "failure": failure,
            "seconds": time.monotonic() - start,
        }
        self._worker.send("saved", **self.written)


def shared(pieces: list[Piece], rank: int, world: int) -> list[Piece]:
    """Marks which pieces data replica `rank` of `world` owns, of those that its worker speaks for: a run of about equal
    bytes, and few files where there is little.

    The same in every replica, so that each piece has exactly one owner.
    """
    total = sum(piece.values.numel() * piece.values.element_size() for piece in pieces)
    writers = min(world, max(1, total // _PART_BYTES))
    marked = []
    place = 0
    for piece in pieces:
        marked.append(replace(piece, owner=piece.owner and min(place * writers // max(total, 1), writers - 1) == rank))
        place += piece.values.numel() * piece.values.element_size()
    return marked


def state_of(
    job: Job, data: dict[str, Any], step: int, samples: int, seconds: float, judge: Judge, **more: Any
) -> dict[str, Any]:
    """A training's own state at the border of a step, JSON values: what resuming it needs besides tensors.

    Args:
        job: what is trained.
        data: which data these are; a resumed run compares.
        step: how many are done.
        samples: of them.
        seconds: they took.
        judge: what was best so far.
        more: of the exchange, and the loss scale, where there are such.
    """
    return {
        "step": step,
        "samples": samples,
        "tickets": {"low_water": step, "outstanding": []},
        "seed": job.seed,
        "global_batch": job.train.global_batch,
        "data": data,
        **judge.state(),
        "seconds": seconds,
        "exchange": None,
        "loss_scale": None,
        **more,
    }
