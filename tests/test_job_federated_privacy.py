"""Settings of privacy and secure aggregation are refused where they promise what they cannot keep."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from verbund.job.federated_privacy import Privacy, Secure, privacy_problems


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "local", "adaptive": True}, "`adaptive` is for the privacy `central`"),
        ({"kind": "central", "quantile": 0.3}, "set `adaptive = true`"),
        ({"kind": "central", "adaptive": True, "noise": 4.0, "count_noise": 2.0}, "more than half of `noise`"),
        ({"kind": "central", "delta": 0.0}, "greater than 0"),
        ({"kind": "central", "epsilon": 1.0}, "Extra inputs"),
    ],
)
def test_privacy_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Privacy.model_validate(settings)


def test_secure_needs_an_honest_majority_among_the_survivors() -> None:
    assert Secure.model_validate({}).threshold == 0.7
    with pytest.raises(ValidationError, match=r"must be more than 0\.65"):
        Secure.model_validate({"threshold": 0.6, "colluding": 0.3})
    with pytest.raises(ValidationError, match="greater than 0"):
        Secure.model_validate({"threshold": 0.5})


def test_what_does_not_go_together() -> None:
    assert not privacy_problems(Privacy.model_validate("central"), Secure())
    assert "needs secure aggregation" in privacy_problems(Privacy(kind="distributed"), None)[0]
    assert "`local`" in privacy_problems(Privacy(kind="local"), Secure())[0]
    assert "max_weight" in privacy_problems(Privacy(kind="central"), Secure(max_weight=5))[0]
