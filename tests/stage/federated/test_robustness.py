"""What rules are for: clients that poison, clients that drift, clients that do part of their work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from federation import Federation, federation
from verbund.errors import RunFailed
from verbund.exchange.federated.client_side import Memory
from verbund.exchange.federated.partition import Parts
from verbund.stage.federated.clients import Trained
from verbund.stage.federated.local import Assignment, LocalTraining
from verbund.stage.federated.vectorised import Vectorised

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR = "from torch import nn\n\ndef model():\n    return nn.Linear(64, 10)\n"


class Poisoned:
    """Clients of which some send what is far off."""

    def __init__(self, local: LocalTraining, parts: Parts, liars: Sequence[int], factor: float) -> None:
        self._honest, self._liars, self._factor = Vectorised(local, parts), liars, factor

    def train(self, assignments: Sequence[Assignment], memories: Mapping[int, Memory]) -> Iterator[Trained]:
        trained = self._honest.train(assignments, memories)
        for assignment, (update, memory) in zip(assignments, trained, strict=True):
            if assignment.client not in self._liars:
                yield update, memory
                continue
            yield replace(update, difference={n: v * self._factor for n, v in update.difference.items()}), memory


def digits() -> tuple[dict[str, np.ndarray[Any, Any]], Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    return {"x": x[:1400], "y": y[:1400]}, torch.from_numpy(x[1400:]), torch.from_numpy(y[1400:])


def accuracy(found: Federation, x: Tensor, y: Tensor) -> float:
    weight, bias = (found.server.parameters[name] for name in ("weight", "bias"))
    return float(((x @ weight.T + bias).argmax(1) == y).double().mean())


def trained_digits(folder: Path, rule: Any, liars: Sequence[int], factor: float = -10.0) -> float:
    data, x, y = digits()
    found = federation(
        folder,
        LINEAR,
        {"clients": 12, "rule": rule},
        {"global_batch": 20, "optimizer": {"name": "sgd", "lr": 0.3}},
        lambda local, parts: Poisoned(local, parts, liars, factor),
        **data,
    )
    try:
        found.play(30)
    except RunFailed:
        return 0.0  # it blew up
    return accuracy(found, x, y)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> float:
    return trained_digits(tmp_path_factory.mktemp("clean"), "fedavg", [])


@pytest.mark.parametrize(
    "rule",
    [
        "median",
        {"name": "trimmed_mean", "faulty": 2},
        {"name": "krum", "faulty": 2},
        {"name": "multi_krum", "faulty": 2},
        {"name": "bulyan", "faulty": 2},
        "geometric_median",
        {"name": "fedavg", "refuse_beyond": 3.0},
    ],
    ids=str,
)
def test_two_of_twelve_clients_that_poison(rule: Any, clean: float, tmp_path: Path) -> None:
    """They send −10 times their difference. The mean is lost; what withstands them stays within two points."""
    assert clean > 0.85
    assert trained_digits(tmp_path, rule, [3, 8]) > clean - 0.02
    if rule == "median":
        assert trained_digits(tmp_path, "fedavg", [3, 8]) < clean - 0.3


def test_clients_whose_update_is_no_number_are_refused_and_named(clean: float, tmp_path: Path) -> None:
    data, x, y = digits()
    found = federation(
        tmp_path,
        LINEAR,
        {"clients": 12},
        {"global_batch": 20, "optimizer": {"name": "sgd", "lr": 0.3}},
        lambda local, parts: Poisoned(local, parts, [3, 8], float("nan")),
        **data,
    )
    rounds = found.play(30)
    assert all(set(r.refused) == {3, 8} and "no finite numbers" in r.refused[3] for r in rounds)
    assert accuracy(found, x, y) > clean - 0.02


def test_a_round_without_any_usable_update_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    data, _, _ = digits()
    found = federation(
        tmp_path,
        LINEAR,
        {"clients": 3},
        {},
        lambda local, parts: Poisoned(local, parts, [0, 1, 2], float("nan")),
        **data,
    )
    with pytest.raises(RunFailed, match=r"no update of 3 could be used; that of client 0: .*no finite numbers"):
        found.play(1)


def test_fedprox_gains_where_clients_do_part_of_their_work(tmp_path: Path) -> None:
    """Least squares in float64 with clients that take between one and twelve steps: the proximal term keeps those that
    do more from drawing the model to themselves (Li et al., "Federated Optimization in Heterogeneous Networks")."""
    a = np.repeat(np.array([0.5, 1.0, 2.0, 0.8]), 5)
    b = np.repeat(np.array([3.0, -1.0, 0.5, 2.0]), 5)
    optimum = float((a * b).sum() / (a * a).sum())
    shares = [1.0, 0.1, 0.5, 0.25]
    far = {}
    for rule in ("fedavg", {"name": "fedprox", "proximal": 5.0}):
        found = federation(
            tmp_path,
            "from torch import nn\n\ndef model():\n    return nn.Linear(1, 1, bias=False)\n",
            {"rule": rule, "local_steps": 12, "partition": {"name": "column", "column": "who"}},
            {
                "objective": "mean_squared_error",
                "precision": "fp64",
                "global_batch": 5,
                "optimizer": {"name": "sgd", "lr": 0.05},
            },
            x=a[:, None],
            y=b,
            who=np.repeat(np.arange(4), 5),
        )
        for number in range(60):
            parameters = found.server.parameters
            work = [Assignment(c, number, number, parameters, share=share) for c, share in enumerate(shares)]
            trained = list(found.rounds._clients.train(work, {}))
            assert [update.local_steps for update, _ in trained] == [12, 1, 6, 3]
            found.rounds.step(number, [0, 1, 2, 3], iter([(trained, 0.0)]))
        far[str(rule)] = abs(float(found.server.parameters["weight"]) - optimum)
    plain, proximal = far.values()
    assert proximal < 0.6 * plain
