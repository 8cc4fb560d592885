"""Every rule against an independent formula in float64, with numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbund.errors import RunFailed
from verbund.exchange.federated import rules
from verbund.exchange.federated.fedbuff import FedBuff
from verbund.exchange.federated.fednova import NORMALISER, normaliser
from verbund.exchange.federated.rule import Rule, SumRule, Sums
from verbund.exchange.federated.scaffold import CONTROL, new_control
from verbund.exchange.federated.update import Update
from verbund.job import Rule as Settings

Array = NDArray[np.float64]
SHAPES = {"a": (3, 4), "b": (5,), "running": (2,)}
PLAIN = ["running"]
ROUNDS = 4


def draw(seed: int, clients: int) -> tuple[dict[str, Array], list[list[dict[str, Array]]], Array]:
    """First parameters, differences of each round's clients, and weights [clients]."""
    random = np.random.default_rng(seed)
    first = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    rounds = [
        [{name: random.normal(size=shape) * 0.1 for name, shape in SHAPES.items()} for _ in range(clients)]
        for _ in range(ROUNDS)
    ]
    return first, rounds, random.integers(1, 50, clients).astype(np.float64)


def tensors(arrays: dict[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values.copy()) for name, values in arrays.items()}


def played(settings: Settings, seed: int = 1, clients: int = 9, halfway: bool = False) -> dict[str, Array]:
    """The parameters after some rounds; `halfway`: the rule is replaced by one that takes up its state."""
    first, rounds, weights = draw(seed, clients)
    parameters = tensors(first)
    rule = rules.build(settings, 20, parameters, PLAIN)
    for number, differences in enumerate(rounds):
        if halfway and number == 2:
            state = {name: values.clone() for name, values in rule.state().items()}
            rule = rules.build(settings, 20, parameters, PLAIN)
            rule.load(state)
        updates = [Update(tensors(d), float(w), number, 3) for d, w in zip(differences, weights, strict=True)]
        before = {name: values.clone() for name, values in parameters.items()}
        after = rule.step(parameters, updates)
        assert all(torch.equal(before[name], parameters[name]) for name in before)
        parameters = after
    return {name: values.numpy() for name, values in parameters.items()}


def reference(step: Callable[[str, Array, list[Array], Array, dict[str, Any]], Array]) -> dict[str, Array]:
    """The same rounds by a formula for one tensor: step(name, x, differences, weights, memory)."""
    first, rounds, weights = draw(1, 9)
    found = {}
    for name, x in first.items():
        memory: dict[str, Any] = {}
        for differences in rounds:
            x = step(name, x, [d[name] for d in differences], weights, memory)
        found[name] = x
    return found


def weighted(differences: Sequence[Array], weights: Array) -> Array:
    return sum((w * d for w, d in zip(weights, differences, strict=True)), np.zeros_like(differences[0])) / sum(weights)


def fedavgm(name: str, x: Array, ds: list[Array], ws: Array, memory: dict[str, Any]) -> Array:
    mean = weighted(ds, ws)
    if name in PLAIN:
        return x + mean
    memory["m"] = 0.7 * memory.get("m", 0.0) + mean
    return np.asarray(x + 0.5 * memory["m"])


def adaptive(kind: str) -> Callable[[str, Array, list[Array], Array, dict[str, Any]], Array]:
    def step(name: str, x: Array, ds: list[Array], ws: Array, memory: dict[str, Any]) -> Array:
        d = weighted(ds, ws)
        if name in PLAIN:
            return x + d
        m = memory["m"] = 0.9 * memory.get("m", np.zeros_like(x)) + 0.1 * d
        v = memory.get("v", np.full_like(x, 0.001**2))
        if kind == "fedadagrad":
            v = v + d**2
        elif kind == "fedadam":
            v = 0.98 * v + 0.02 * d**2
        else:
            v = v - 0.02 * d**2 * np.sign(v - d**2)
        memory["v"] = v
        return np.asarray(x + 0.05 * m / (np.sqrt(v) + 0.001))

    return step


def same(found: dict[str, Array], wanted: dict[str, Array], limit: float = 1e-12) -> None:
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=limit, atol=limit, err_msg=name)


def test_fedavg() -> None:
    plain = {"name": "fedavg"}
    same(played(Settings(**plain)), reference(lambda _n, x, ds, ws, _m: x + weighted(ds, ws)))
    rated = reference(lambda n, x, ds, ws, _m: x + (1.0 if n in PLAIN else 0.3) * weighted(ds, ws))
    same(played(Settings(name="fedavg", server_lr=0.3)), rated)


def test_fedavgm() -> None:
    settings = Settings(name="fedavgm", server_lr=0.5, momentum=0.7)
    same(played(settings), reference(fedavgm))
    same(played(settings, halfway=True), reference(fedavgm))


@pytest.mark.parametrize("kind", ["fedadagrad", "fedadam", "fedyogi"])
def test_adaptive(kind: str) -> None:
    more = {} if kind == "fedadagrad" else {"second_momentum": 0.98}
    settings = Settings.model_validate({"name": kind, "server_lr": 0.05, **more})
    same(played(settings), reference(adaptive(kind)))
    same(played(settings, halfway=True), reference(adaptive(kind)))


def test_median_and_trimmed_mean() -> None:
    same(played(Settings(name="median")), reference(lambda _n, x, ds, _w, _m: x + np.median(ds, axis=0)))
    trimmed = reference(lambda _n, x, ds, _w, _m: x + np.sort(ds, axis=0)[2:-2].mean(0))
    same(played(Settings(name="trimmed_mean", faulty=2)), trimmed)
    same(played(Settings(name="trimmed_mean", faulty=0.23)), trimmed)


def flat(differences: list[dict[str, Array]]) -> Array:
    return np.stack([np.concatenate([d[name].ravel() for name in SHAPES]) for d in differences])


def krum_scores(rows: Array, faulty: int) -> list[float]:
    """Blanchard et al. 2017, written out."""
    scores = []
    for i in range(len(rows)):
        far = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(len(rows)) if j != i)
        scores.append(sum(far[: max(len(rows) - faulty - 2, 1)]))
    return scores


def by_rows(aggregate: Callable[[Array], Array]) -> dict[str, Array]:
    """Rounds of a rule that is a function of the clients' rows, [clients, all values]."""
    first, rounds, _ = draw(1, 9)
    x = np.concatenate([first[name].ravel() for name in SHAPES])
    for differences in rounds:
        x = x + aggregate(flat(differences))
    cuts = np.cumsum([math.prod(shape) for shape in SHAPES.values()])[:-1]
    return {n: part.reshape(s) for (n, s), part in zip(SHAPES.items(), np.split(x, cuts), strict=True)}


def test_krum() -> None:
    same(played(Settings(name="krum", faulty=2)), by_rows(lambda rows: rows[int(np.argmin(krum_scores(rows, 2)))]))

    def several(rows: Array) -> Array:
        return np.asarray(rows[np.argsort(krum_scores(rows, 2), kind="stable")[:5]].mean(0))

    same(played(Settings(name="multi_krum", faulty=2, kept=5)), by_rows(several))


def test_bulyan() -> None:
    def bulyan(rows: Array) -> Array:
        left, chosen = list(range(len(rows))), []
        while len(chosen) < len(rows) - 2:
            best = left[int(np.argmin(krum_scores(rows[left], 1)))]
            left.remove(best)
            chosen.append(best)
        picked, keep = rows[chosen], len(chosen) - 2
        mean = np.empty(rows.shape[1])
        for column in range(rows.shape[1]):
            values = picked[:, column]
            nearest = np.argsort(np.abs(values - np.median(values)), kind="stable")[:keep]
            mean[column] = values[nearest].mean()
        return mean

    same(played(Settings(name="bulyan", faulty=1)), by_rows(bulyan))


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    _, rounds, _ = draw(3, 9)
    rule = rules.build(Settings(name="geometric_median"), 9, tensors(rounds[0][0]), PLAIN)
    zero = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    middle = rule.step(zero, [Update(tensors(d), 1.0, 0, 1) for d in rounds[0]])
    rows = flat(rounds[0])
    found = np.concatenate([middle[name].numpy().ravel() for name in SHAPES])
    # At the minimum the unit vectors towards all points cancel.
    towards = rows - found
    pull = (towards / np.linalg.norm(towards, axis=1, keepdims=True)).sum(0)
    assert np.linalg.norm(pull) < 1e-6


def test_the_geometric_median_stays_with_the_majority() -> None:
    zero = {"a": torch.zeros(2, dtype=torch.float64)}
    rule = rules.build(Settings(name="geometric_median"), 5, zero, [])
    honest = [Update({"a": torch.tensor([1.0, 1.0], dtype=torch.float64)}, 1.0, 0, 1)] * 3
    wild = [Update({"a": torch.tensor([1e6, -1e6], dtype=torch.float64)}, 1.0, 0, 1)] * 2
    np.testing.assert_allclose(rule.step(zero, [*honest, *wild])["a"], [1.0, 1.0], atol=1e-3)


def test_fednova_against_the_formula() -> None:
    first, rounds, weights = draw(5, 4)
    steps, momentum = [1, 4, 2, 7], 0.9
    parameters = tensors(first)
    rule = rules.build(Settings(name="fednova"), 4, parameters, PLAIN)
    # a_i of heavy-ball SGD: what the gradient of step j counts in the sum of all moves (Wang et al. 2020).
    lengths = [sum(sum(momentum**k for k in range(count - j)) for j in range(count)) for count in steps]
    for count, length in zip(steps, lengths, strict=True):
        assert normaliser(count, momentum) == pytest.approx(length, rel=1e-12)
        assert normaliser(count) == count
    updates = [
        Update(tensors(d), float(w), 0, s, {NORMALISER: torch.tensor([a], dtype=torch.float64)})
        for d, w, s, a in zip(rounds[0], weights, steps, lengths, strict=True)
    ]
    after = rule.step(parameters, updates)
    p = weights / weights.sum()
    effective = sum(pi * a for pi, a in zip(p, lengths, strict=True))
    for name in SHAPES:
        ds = [d[name] for d in rounds[0]]
        if name in PLAIN:
            wanted = first[name] + weighted(ds, weights)
        else:
            wanted = first[name] + effective * sum(pi * d / a for pi, d, a in zip(p, ds, lengths, strict=True))
        np.testing.assert_allclose(after[name], wanted, rtol=1e-12)


def test_scaffold_against_the_formula() -> None:
    first, rounds, _ = draw(6, 3)
    trained = {name: values for name, values in first.items() if name not in PLAIN}
    parameters = tensors(first)
    rule = rules.build(Settings(name="scaffold", server_lr=0.5), 10, parameters, PLAIN)
    random = np.random.default_rng(0)
    c = {name: np.zeros(SHAPES[name]) for name in trained}
    x = {name: values.copy() for name, values in first.items()}
    for differences in rounds:
        deltas = [{name: random.normal(size=SHAPES[name]) for name in trained} for _ in differences]
        updates = [
            Update(tensors(d), 1.0, 0, 3, {f"{CONTROL}{n}": torch.from_numpy(v) for n, v in e.items()})
            for d, e in zip(differences, deltas, strict=True)
        ]
        parameters = rule.step(parameters, updates)
        for name in x:
            mean = sum(d[name] for d in differences) / 3
            x[name] = x[name] + (1.0 if name in PLAIN else 0.5) * mean
        for name in c:
            c[name] = c[name] + sum(e[name] for e in deltas) / 10
    for name in x:
        np.testing.assert_allclose(parameters[name], x[name], rtol=1e-12)
    for name in c:
        np.testing.assert_allclose(rule.told()[f"{CONTROL}{name}"], c[name], rtol=1e-12, atol=1e-15)


def test_a_control_variate_is_the_mean_gradient_of_plain_sgd() -> None:
    """Option II: what remains of c_i − c + (x − y) / (K η) is the mean of the gradients used."""
    random = np.random.default_rng(2)
    gradients = random.normal(size=(5, 4))
    own, common, rate = random.normal(size=4), random.normal(size=4), 0.03
    difference = -rate * (gradients - own + common).sum(0)
    found = new_control(*map(torch.from_numpy, (own, common, difference)), 5, rate)
    np.testing.assert_allclose(found, gradients.mean(0), rtol=1e-12)


def test_fedbuff_counts_old_updates_less_and_is_fedavg_where_all_are_fresh() -> None:
    same(played(Settings(name="fedbuff")), played(Settings(name="fedavg")), 0.0)
    x = {"a": torch.zeros(2, dtype=torch.float64)}
    rule = FedBuff(rate=0.5, power=0.5)
    rule.load({"version": torch.tensor([8])})
    ones = torch.ones(2, dtype=torch.float64)
    after = rule.step(x, [Update({"a": ones}, 2.0, 8, 1), Update({"a": ones}, 1.0, 5, 1)])
    np.testing.assert_allclose(after["a"], [0.5 * (2.0 + 1.0 / math.sqrt(4.0)) / 3.0] * 2, rtol=1e-12)
    assert int(rule.state()["version"]) == 9


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedprox"])
def test_sums_are_enough_for_rules_that_say_so(name: str) -> None:
    """Whoever adds up contributions in parts, as processes or masks do, gets the step of the whole."""
    first, rounds, weights = draw(4, 6)
    settings = Settings.model_validate({"name": name})
    one, other = (rules.build(settings, 6, tensors(first), PLAIN) for _ in range(2))
    assert isinstance(other, SumRule)
    assert not other.sees_each
    updates = [Update(tensors(d), float(w), 0, 3) for d, w in zip(rounds[0], weights, strict=True)]
    sums = Sums()
    for update in updates:
        sums.add(other.contribution(update), update.weight)
    whole, summed = one.step(tensors(first), updates), other.apply(tensors(first), sums)
    assert all(torch.equal(whole[key], summed[key]) for key in whole)


@pytest.mark.parametrize(
    ("name", "faulty", "updates"), [("trimmed_mean", 3, 6), ("krum", 2, 6), ("multi_krum", 2, 6), ("bulyan", 1, 6)]
)
def test_too_few_updates_for_what_a_rule_promises(name: str, faulty: int, updates: int) -> None:
    x = {"a": torch.zeros(2)}
    rule: Rule = rules.build(Settings.model_validate({"name": name, "faulty": faulty}), 20, x, [])
    rule.step(x, [Update({"a": torch.ones(2)}, 1.0, 0, 1)] * (updates + 1))
    with pytest.raises(RunFailed, match=f"{name}.*{updates + 1} updates"):
        rule.step(x, [Update({"a": torch.ones(2)}, 1.0, 0, 1)] * updates)
