"""Blocks in memory that is shared."""

from __future__ import annotations

import time

import pytest
import torch

from exchange.parameter_server.holding import blocks_of, spec
from verbund.comm.wire import Closed
from verbund.errors import RunFailed
from verbund.exchange.parameter_server.exposed import Exposed, Window
from verbund.exchange.parameter_server.plan import Plan, Rule

PLAN = Plan(tuple(blocks_of({"a": (6,)}, 6)), spec("sgd"), Rule("asynchronous"))


def test_a_reader_waits_until_a_version_is_settled_or_its_server_replaced() -> None:
    exposed = Exposed.make(PLAN)
    if exposed is None:
        pytest.skip("this machine shares no memory")
    own = exposed.adopt(0, torch.zeros(6))
    assert own is not None
    place = exposed.place(0, own)
    assert place is not None
    window = Window(exposed.record(), 1)
    into = torch.ones(6)
    assert window.copy(0, place, into, time.monotonic() + 5, lambda: False) == 0
    assert not into.any()
    with exposed.changing([0]):
        own.fill_(3.0)
        exposed.has(0, 1, 7)
    with pytest.raises(RunFailed, match="does not come to rest"):
        window.copy(0, place, into, time.monotonic() + 0.05, lambda: False)
    begun = time.monotonic()
    with pytest.raises(Closed, match="another server has the block now"):
        window.copy(0, place, into, begun + 10, lambda: time.monotonic() > begun + 0.1)
    assert time.monotonic() - begun < 5
    exposed.settled({0: 7})
    assert window.copy(0, place, into, time.monotonic() + 5, lambda: True) == 1
    assert into.tolist() == [3.0] * 6
    window.close()
