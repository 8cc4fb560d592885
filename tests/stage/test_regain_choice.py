"""From where all go on after a loss: what is chosen is held by somebody, and nothing newer is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from verbund.errors import ClusterLost
from verbund.mesh.axes import Mesh
from verbund.stage.regain import Standing, choose

STATE = {"samples": 1}
MESH = Mesh(shard=2, data=2)  # 0 and 2 hold the same, 1 and 3


def at(step: int, ready: bool = False) -> Standing:
    return Standing(step, ready, {"samples": step})


def test_the_newest_step_counts_where_each_part_is_held_or_can_be() -> None:
    found = choose([at(6), at(5, ready=True), Standing(), at(5, ready=True)], MESH)
    assert (found.step, found.again, found.how, found.givers, found.state) == (
        6,
        0,
        "peers",
        (0, 1, 0, 3),
        {"samples": 6},
    )


def test_nobody_has_taken_the_step_that_all_were_about_to() -> None:
    found = choose([at(5, ready=True), at(5), Standing(), at(5)], MESH)
    assert (found.step, found.givers) == (5, (0, 1, 0, 3))


def test_both_holders_of_a_part_are_lost() -> None:
    with pytest.raises(ClusterLost, match=r"what workers 1, 3 held is in nobody's memory"):
        choose([at(6), Standing(), at(6), Standing()], MESH)
    with pytest.raises(ClusterLost, match="all workers were lost"):
        choose([Standing()] * 4, MESH)


def test_the_newest_mirror_that_is_whole_of_all() -> None:
    """Worker 1 was lost while it wrote its mirror of step 30."""
    survivor = replace(at(31), mirrors={0: [20, 30], 1: [20]})
    found = choose([survivor, Standing(mirrors={1: []})], Mesh(shard=2))
    assert (found.step, found.again, found.how) == (20, 11, "mirrors")
    assert (found.givers, found.owners) == ((0, 0), (0, 1))


def test_a_mirror_of_a_peer_that_holds_the_same_is_as_good() -> None:
    standings = [replace(at(9), mirrors={0: [8]}), Standing(), replace(at(9), mirrors={2: [8], 3: [8]}), Standing()]
    found = choose(standings, MESH)
    assert (found.step, found.givers, found.owners) == (8, (0, 2, 2, 2), (0, 3, 2, 3))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_chosen_is_there(seed: int) -> None:
    """Any losses, at any moment of the agreement; against a search over all steps."""
    draw = random.Random(seed)
    sizes = draw.choice(
        [{"shard": 2}, {"data": 2, "shard": 2}, {"tensor": 2, "pipeline": 2, "data": 2}, {"islands": 2, "shard": 2}]
    )
    mesh = Mesh(**sizes)
    newest = draw.randint(0, 9)
    taken = draw.random() < 0.5  # somebody has passed the agreement on the next step: then all others are ready
    standings = []
    for _ in range(mesh.world):
        mirrors = {
            rank: [s for s in (2, 4) if draw.random() < 0.6] for rank in range(mesh.world) if draw.random() < 0.5
        }
        if draw.random() < 0.4:
            standings.append(Standing(mirrors=mirrors))
        else:
            passed = taken and draw.random() < 0.5
            standings.append(Standing(newest + passed, taken and not passed, STATE, mirrors))
    top = max((s.step for s in standings if s.step is not None), default=None)

    def held(rank: int, step: int) -> bool:
        peers = replace(mesh, rank=rank).peers("islands", "data")
        return any(
            standings[p].step is not None and step in (standings[p].step, standings[p].step + standings[p].ready)
            for p in peers
        )

    def mirrored(rank: int, step: int) -> bool:
        peers = replace(mesh, rank=rank).peers("islands", "data")
        island = replace(mesh, rank=rank).peers("data", "shard", "tensor", "pipeline")
        return any(step in standings[r].mirrors.get(p, ()) for r in island for p in peers)

    ranks = range(mesh.world)
    steps = [s for s in (2, 4) if all(mirrored(rank, s) for rank in ranks)]
    if top is None or (not all(held(rank, top) for rank in ranks) and not steps):
        with pytest.raises(ClusterLost):
            choose(standings, mesh)
        return
    found = choose(standings, mesh)
    if all(held(rank, top) for rank in ranks):
        assert (found.how, found.step) == ("peers", top)
        assert all(held(giver, top) for giver in found.givers)
    else:
        assert (found.how, found.step) == ("mirrors", max(steps))
        assert all(found.step in standings[g].mirrors[o] for g, o in zip(found.givers, found.owners, strict=True))
