"""Updates that cannot be used are refused with a reason; others get a bounded weight and length."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from verbund.exchange.federated.fednova import NORMALISER
from verbund.exchange.federated.screening import Refused, Screening, norm
from verbund.exchange.federated.update import Update
from verbund.job import Rule

SHAPES = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
GOOD = Update({"a": torch.ones(2, 3), "b": torch.ones(4)}, 7.0, 0, 2)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (replace(GOOD, difference={"a": torch.ones(2, 3)}), "`b` is missing"),
        (replace(GOOD, difference={**GOOD.difference, "c": torch.ones(1)}), "`c` is unknown"),
        (replace(GOOD, difference={**GOOD.difference, "a": torch.ones(3, 2)}), r"\[3, 2\], not \[2, 3\]"),
        (replace(GOOD, difference={**GOOD.difference, "b": torch.tensor([1, math.nan, 1, 1])}), "no finite"),
        (replace(GOOD, difference={**GOOD.difference, "b": torch.tensor([1, math.inf, 1, 1])}), "no finite"),
        (replace(GOOD, weight=-3.0), "weight is -3"),
        (replace(GOOD, weight=math.nan), "weight is nan"),
        (replace(GOOD, weight=0.0), "weight is 0"),
        (replace(GOOD, local_steps=0), "0 local steps"),
        (replace(GOOD, aux={"x": torch.ones(1)}), "`x` is unknown in its aux"),
    ],
)
def test_what_cannot_be_used_is_refused(update: Update, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        Screening(Rule(), SHAPES, {}).checked(update)


def test_a_normaliser_must_be_positive() -> None:
    screening = Screening(Rule(name="fednova"), SHAPES, {})
    screening.checked(replace(GOOD, aux={NORMALISER: torch.ones(1)}))
    with pytest.raises(Refused, match="not positive"):
        screening.checked(replace(GOOD, aux={NORMALISER: torch.zeros(1)}))
    with pytest.raises(Refused, match="missing"):
        screening.checked(GOOD)


def test_weights_are_samples_or_all_alike_and_bounded() -> None:
    assert Screening(Rule(), SHAPES, {}).checked(GOOD).weight == 7.0
    assert Screening(Rule(max_weight=5.0), SHAPES, {}).checked(GOOD).weight == 5.0
    assert Screening(Rule(weights="uniform"), SHAPES, {}).checked(GOOD).weight == 1.0
    assert Screening(Rule(name="median"), SHAPES, {}).checked(GOOD).weight == 1.0


def test_long_differences_are_shortened_in_their_direction() -> None:
    found = Screening(Rule(clip_norm=0.5), SHAPES, {}).checked(GOOD).difference
    assert norm(found) == pytest.approx(0.5, rel=1e-6)
    torch.testing.assert_close(found["a"] / norm(found), GOOD.difference["a"] / norm(GOOD.difference))
    short = Screening(Rule(clip_norm=10.0), SHAPES, {}).checked(GOOD).difference
    assert all(torch.equal(short[name], GOOD.difference[name]) for name in short)


def test_outliers_are_told_from_the_median_of_their_round() -> None:
    screening = Screening(Rule(refuse_beyond=3.0), SHAPES, {})
    assert screening.outliers([1.0, 1.1, 0.9, 10.0, 2.9]) == {3: "its norm is 10, the median of its round 1.1"}
    assert Screening(Rule(), SHAPES, {}).outliers([1.0, 1e9]) == {}
