"""Frames that are repeated, reordered, cut short, flipped or late, between clients and servers and between servers."""

from __future__ import annotations

import pytest

from exchange.parameter_server.serving import Thread, cluster
from exchange.parameter_server.test_failover import COUNTERS, TWO, Counting, half, same


@pytest.mark.parametrize("seed", range(4))
def test_each_push_counts_once(seed: int) -> None:
    """Half of them with pushes that are compressed."""
    with cluster(half(COUNTERS) if seed % 2 else COUNTERS, TWO, kind=Thread, faults=seed, patience=0.5) as servers:
        counting = Counting(servers)
        counting.go_on(15)
        servers.kill(seed % 2)
        servers.fail_over(seed % 2)
        servers.settled()
        counting.go_on(15)
        counting.end()
        same(servers)
        happened = sum((proxy.happened for proxy in servers.proxies), start=servers.proxies[0].happened)
        assert len(happened) >= 4, "too little happened"
