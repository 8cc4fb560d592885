"""Buffered asynchronous rounds: who arrives when, how old updates are, and that nobody is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation import Federation, federation
from verbund.stage.federated.asynchronous import AsynchronousRounds
from verbund.stage.federated.local import Assignment
from verbund.stage.federated.vectorised import Vectorised

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR = "from torch import nn\n\ndef model():\n    return nn.Linear(6, 4)\n"


def made(folder: Path, exchange: dict[str, Any]) -> Federation:
    random = np.random.default_rng(3)
    x = random.normal(size=(300, 6)).astype(np.float32)
    y = (x @ random.normal(size=(6, 4))).argmax(1)
    return federation(folder, LINEAR, exchange, {"global_batch": 10}, Vectorised, x=x, y=y)


def test_a_step_has_as_many_updates_as_the_buffer_and_they_are_old(tmp_path: Path) -> None:
    found = made(tmp_path, {"clients": 20, "cohort": 8, "rule": {"name": "fedbuff", "buffer": 3}})
    assert isinstance(found.rounds, AsynchronousRounds)
    rounds = found.play(40)
    assert all(len(played.cohort) == len(played.staleness) == 3 for played in rounds)
    ages = Counter(age for played in rounds for age in played.staleness)
    assert min(ages) == 0
    assert max(ages) >= 3  # the slow ones
    # With 8 under way and steps of 3, by Little's law an update is on average 8 / 3 steps under way, less the first.
    mean = sum(age * count for age, count in ages.items()) / ages.total()
    assert 1.0 < mean < 3.0
    flight = found.rounds._flight
    assert len({start.client for start in flight}) == len(flight) == 7
    assert found.rounds._starts == 40 * 3 + 7
    assert rounds[-1].loss / rounds[-1].weight < 0.5 * rounds[0].loss / rounds[0].weight


def test_each_update_is_that_of_the_parameters_its_client_got(tmp_path: Path) -> None:
    """Every start is trained again from the parameters of its version, one by one, and the steps are done by hand."""
    found = made(
        tmp_path, {"clients": 9, "cohort": 5, "rule": {"name": "fedbuff", "buffer": 2, "staleness_power": 1.0}}
    )
    assert isinstance(found.rounds, AsynchronousRounds)
    seen: list[Any] = []
    send = found.rounds._send

    def watched(version: int, fresh: list[Any], arrived: list[Any]) -> None:
        send(version, fresh, arrived)
        seen.append(fresh[-1])

    found.rounds._send = watched  # type: ignore[method-assign]
    versions = [{name: values.clone() for name, values in found.server.parameters.items()}]
    for number in range(6):
        played = found.rounds.play(number, 0.0)
        starts = sorted((s for s in seen if s not in found.rounds._flight), key=lambda s: (s.arrives, s.number))[-2:]
        assert [s.client for s in starts] == played.cohort
        assert [number - s.version for s in starts] == played.staleness
        total = {name: torch.zeros_like(values, dtype=torch.float64) for name, values in versions[0].items()}
        weight = 0.0
        for start in starts:
            update, _ = start.trained
            assert update.base_version == start.version
            work = Assignment(start.client, start.version, start.version, versions[start.version])
            again, _ = found.local.train(work, found.parts.of(start.client), {})
            for name, values in again.difference.items():
                torch.testing.assert_close(update.difference[name], values, rtol=1e-5, atol=1e-6)
            size = float(found.parts.sizes[start.client])
            weight += size
            for name in total:
                total[name] += size / (1.0 + number - start.version) * update.difference[name].double()
        wanted = {name: (versions[-1][name].double() + total[name] / weight).float() for name in total}
        for name, values in found.server.parameters.items():
            torch.testing.assert_close(values, wanted[name], rtol=1e-6, atol=1e-7)
        versions.append({name: values.clone() for name, values in found.server.parameters.items()})


def test_a_buffer_of_the_whole_cohort_is_synchronous(tmp_path: Path) -> None:
    whole = {"clients": 9, "cohort": 5, "rule": {"name": "fedbuff", "buffer": 5}}
    one, other = made(tmp_path, whole), made(tmp_path, {**whole, "rule": "fedavg"})
    assert not isinstance(one.rounds, AsynchronousRounds)
    one.play(3)
    other.play(3)
    for name, values in one.server.parameters.items():
        assert torch.equal(values, other.server.parameters[name])
