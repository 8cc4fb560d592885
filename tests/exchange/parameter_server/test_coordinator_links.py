"""Questions to the coordinator over a link that repeats, reorders, cuts, flips and holds up: each is done once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from chaos.proxy import Proxy, Rates
from exchange.parameter_server.serving import SECRET
from exchange.parameter_server.test_coordinator import _plan
from verbund.comm.wire import Replies, dial, listen
from verbund.errors import VerbundError
from verbund.exchange.parameter_server.coordination import Coordination, End, Rest
from verbund.exchange.parameter_server.coordinator import Coordinator
from verbund.exchange.parameter_server.leases import Leases, Stops
from verbund.stage.served import meeting

STEPS = 40
RATES = Rates(repeat=0.1, reorder=0.05, cut=0.04, flip=0.04, late=0.05)


class Island(threading.Thread):
    """Does tickets until training has ended; what it was given and where it has led."""

    def __init__(self, number: int, address: str) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.tickets: list[int] = []
        self.led: list[int] = []
        self.failure: VerbundError | None = None
        self._line = Coordination(lambda seconds: dial(address, SECRET, seconds), 20.0)
        self.start()

    def run(self) -> None:
        try:
            self._line.enter(self.number, 1, _plan())
            while not isinstance(item := self._line.lease(len(self.tickets), 1, 0, len(self.tickets)), End):
                if isinstance(item, Rest):
                    self.led.append(item.step)
                    self._line.settle(item.step, None, {"led": self.number})
                elif isinstance(item, list):
                    assert not any(leased.again for leased in item)
                    self.tickets += [leased.ticket for leased in item]
                    self._line.done(0, len(self.tickets))
        except VerbundError as error:
            self.failure = error
        finally:
            self._line.close(wait=False)


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_each_ticket_is_given_once_and_each_rest_led_once(seed: int, divided: bool, temporary: Path) -> None:
    fatal: list[VerbundError] = []
    leases = Leases(2, 1, divided, 0, Stops(STEPS, (10,)))
    coordinator = Coordinator(temporary, leases, 2, lambda plan: [(0, 1), (1, 0)], {}, fatal.append)
    listener = listen(f"unix:{temporary / 'c'}", SECRET)
    meeting.accept(listener, Replies(coordinator.handle).serve)
    proxy = Proxy(str(temporary / "p"), str(temporary / "c"), seed, RATES)
    islands = [Island(number, f"unix:{temporary / 'p'}") for number in range(2)]
    for island in islands:
        island.join(30.0)
        assert not island.is_alive()
        assert island.failure is None, island.failure
    listener.close()
    proxy.close()
    assert not fatal
    assert coordinator.ended == "steps"
    given = Counter(ticket for island in islands for ticket in island.tickets)
    assert given == Counter(dict.fromkeys(range(STEPS), 2 if divided else 1))
    assert sorted(islands[0].led + islands[1].led) == [10, 20, 30, 40]
    assert proxy.happened.total() >= 4, "too little happened"
