"""The list of meshes is whole."""

from __future__ import annotations

import pytest

from parallel.layouts import meshes
from verbund.job import AXES, Strategy
from verbund.mesh.axes import Mesh


@pytest.mark.parametrize(("workers", "count"), [(2, 4), (3, 4), (4, 10), (8, 20)])
def test_all_products(workers: int, count: int) -> None:
    found = list(meshes(workers))
    assert len(set(found)) == count


@pytest.mark.parametrize("workers", [2, 4, 8, 12])
def test_places_and_peers_agree(workers: int) -> None:
    for name in meshes(workers):
        sizes = {axis: int(size) for axis, size in (part.split("=") for part in name.split(","))}
        everybody = [Mesh.of(Strategy(mesh=sizes), rank) for rank in range(workers)]
        assert {mesh.place("pipeline", "data", "shard", "tensor") for mesh in everybody} == set(range(workers))
        for mesh in everybody:
            for axes in (("data",), ("shard", "data"), ("tensor", "pipeline")):
                peers = mesh.peers(*axes)
                assert len(peers) == mesh.size(*axes)
                assert peers[mesh.place(*axes)] == mesh.rank
                assert all(everybody[rank].peers(*axes) == peers for rank in peers)


def test_islands_are_the_slowest_axis() -> None:
    everybody = [Mesh.of(Strategy(mesh={"data": 2, "pipeline": 2}, islands=3), rank) for rank in range(12)]
    assert [mesh.island for mesh in everybody] == [rank // 4 for rank in range(12)]
    assert [mesh.rank for mesh in everybody if mesh.leads] == [0, 4, 8]
    assert everybody[5].peers("islands") == [1, 5, 9]
    assert everybody[5].peers(*AXES) == [4, 5, 6, 7]
    assert sorted(mesh.batch_worker for mesh in everybody if mesh.place("pipeline") == 0) == list(range(6))
