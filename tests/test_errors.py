"""Errors cross a process border as what they are."""

from __future__ import annotations

import json

import pytest

from verbund.comm.peer_lost import PeerLost
from verbund.errors import ClusterLost, InputError, RunFailed, VerbundError, from_record


class Refined(InputError):
    """One that `errors` does not know."""


@pytest.mark.parametrize(
    ("kind", "comes_as"),
    [(ClusterLost, ClusterLost), (PeerLost, ClusterLost), (Refined, InputError), (RunFailed, RunFailed)],
)
def test_an_error_comes_as_its_kind_or_the_nearest_that_is_known(
    kind: type[VerbundError], comes_as: type[VerbundError]
) -> None:
    error = from_record(json.loads(json.dumps(kind("it", where="here", fix="so").record())))
    assert type(error) is comes_as
    assert (error.what, error.where, error.fix) == ("it", "here", "so")
