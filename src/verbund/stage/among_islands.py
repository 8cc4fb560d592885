"""A worker's training as islands that train alone come and go: who shares the samples from one era to the next, what
one that comes back begins with, and what is done by all or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from verbund.cluster.worker import Worker
from verbund.comm.peer_lost import PeerLost
from verbund.exchange.local_steps import LocalSteps
from verbund.job import AXES
from verbund.mesh.replica import Replica
from verbund.stage.borders import Borders, Gathered, LeftOut
from verbund.stage.handing_over import hand_over
from verbund.stage.island import Island
from verbund.stage.step_record import StepRecord
from verbund.stage.training_state import TrainingState
from verbund.stage.validate import Across


class _BrokenOff(Exception):
    """An evaluation that was not done by all."""


class AmongIslands:
    """One worker's.

    Args:
        worker: the line to the supervisor.
        borders: where islands meet.
        island: this worker's.
        replica: of it.
        exchange: between the islands.
        record: what is recorded.
        state: how far the training is.
    """

    def __init__(
        self,
        worker: Worker,
        borders: Borders,
        island: Island,
        replica: Replica,
        exchange: LocalSteps,
        record: StepRecord,
        state: TrainingState,
    ) -> None:
        self._worker, self._borders, self._island = worker, borders, island
        self._replica, self._exchange, self._record, self._state = replica, exchange, record, state
        borders.regroup = self._meet

    def come_back(self) -> None:
        """Waits until the others take this worker's island in, and does the rest of the exchange that they are in."""
        self._borders.join()
        self._exchange.come_in(self._state.step)
        self.after_exchange()

    def after_exchange(self) -> None:
        """To be called when the exchanges of a step are done, while training goes on; see `Borders.part`."""
        self._borders.part(self._state.step)

    def check_in(self) -> None:
        """To be called between two steps.

        Raises:
            LeftOut: if this worker's island is known to have been left out. Where it has several workers all of them
                find that out at the next border.
        """
        if self._borders.left_out and self._island.mesh.size(*AXES) == 1:
            raise LeftOut

    def evaluated(self, evaluate: Callable[[Across], dict[str, Any]]) -> dict[str, Any]:
        """What an evaluation comes to that all islands share; if one is lost the others share it anew."""
        while True:
            self._borders.together("validation", self._state.step)
            self._worker.doing("validating", self._state.step)
            with suppress(_BrokenOff):
                return evaluate(self._across)

    def ready_to_save(self) -> None:
        """Returns once all that take part have come to the same save, and what is under way has arrived."""
        self._borders.together("save", self._state.step, self._drained)

    def saved(self, save: Callable[[], None]) -> None:
        """Training ends: returns once all that take part have saved; `save` does it again among those who are left."""
        while not self._borders.agree("end", self._state.step):
            self._borders.gather(self._state.step, joins=False, combines=False)
            save()

    def _meet(self, gathered: Gathered) -> None:
        """Goes on with the islands of an era, where each has a share of every ticket from now on; who comes back gets
        from another what all have in common.

        Raises:
            PeerLost: if an island is lost before all have met.
        """
        island, former = self._island, self._island.present
        members, holders = gathered.members, gathered.holders
        island.meet_islands(self._worker, gathered.era, members)
        self._replica.regroup(island.mesh, island.groups)
        stays = [number for number in members if number in holders and number in former]
        lost = self._exchange.regroup([former.index(n) if n in stays else None for n in members])
        island.present = members
        self._state.samples_lost += lost
        places = [place for place, number in enumerate(members) if number in holders]
        scale = self._replica.loss_scale
        known = self._state.known(scale.state() if scale else None, ())
        received = hand_over(island.groups.islands, places, self._replica, self._exchange, known)
        if received is None:
            seconds = round(time.monotonic() - self._record.done_at, 4)
            out, back = ([n for n in some if n not in stays] for some in (former, members))
            self._record.journal.event(
                "regrouped", era=gathered.era, step=self._state.step, seconds=seconds, lost=bool(out)
            )
            if island.mesh.place("islands") == places[0] and island.mesh.leads:
                self._record.journal.event(
                    "islands", era=gathered.era, step=self._state.step, out=out, back=back, samples_lost=lost
                )
        else:
            self._state.go_on(int(received["step"]), received, new=True)
            self._state.take_seconds(received)
        self._exchange.begin_again()

    def _across(self, arrays: dict[str, Any]) -> list[dict[str, Any]]:
        """The arrays of this worker's peers in the other islands, if all have got them."""
        found: list[dict[str, Any]] = []
        with suppress(PeerLost):
            found = self._island.groups.islands.all_gather_arrays(arrays, "the gathering of metrics")
        if not self._borders.agree("metrics", self._state.step, bool(found)):
            raise _BrokenOff
        return found

    def _drained(self) -> bool:
        """Waits for what is under way between islands; whether it is there."""
        try:
            self._exchange.drain()
        except PeerLost:
            return False
        return True
