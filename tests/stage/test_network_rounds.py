"""In which order the links between hosts are measured."""

from __future__ import annotations

import itertools

import pytest

from verbund.stage.network import rounds


@pytest.mark.parametrize("hosts", range(2, 9))
def test_each_pair_once_and_no_host_twice_at_a_time(hosts: int) -> None:
    found = rounds(hosts)
    for turn in found:
        taken = [host for pair in turn for host in pair]
        assert len(set(taken)) == len(taken)
    assert sorted(pair for turn in found for pair in turn) == list(itertools.combinations(range(hosts), 2))
    assert len(found) == hosts - 1 + hosts % 2
