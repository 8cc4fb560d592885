"""Collectives through shared memory, against sums taken one by one."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import members
import numpy as np
import pytest
import torch
from torch import Tensor

from verbund.cluster.local import LocalCluster
from verbund.comm import collectives
from verbund.comm.collectives import Group
from verbund.mesh.groups import Groups

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ROUNDS = {1: 100, 2: 4000, 3: 3000, 4: 2000, 5: 1000}  # by world


def shared(group: Group) -> bool:
    return group._shared is not None


def values(seed: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    if dtype in WHOLE:
        return torch.randint(0, 100, (count,), generator=generator).to(dtype)
    return (torch.randn(count, generator=generator) * 10).to(dtype)


def added(parts: list[Tensor], maximum: bool = False) -> Tensor:
    """The sum in the order of the ranks; of half precision in float32, rounded once."""
    low = parts[0].dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if low else parts[0].clone()
    for part in parts[1:]:
        total = torch.maximum(total, part) if maximum else total + part
    return total.to(parts[0].dtype)


def size(draw: random.Random) -> int:
    return draw.choices(
        (draw.randint(0, 64), draw.randint(1, 9000), draw.randint(9000, 90_000), draw.randint(90_000, 600_000)),
        (400, 500, 95, 5),
    )[0]


# -- every collective, in every order, on every kind of memory ------------------------------------------------------


def many_rounds(group: Group, tell: Any, seed: int, rounds: int) -> str:
    """Random collectives, up to six of them under way; every result is checked by every member, bit by bit."""
    draw = random.Random(seed)
    world, rank = group.world, group.rank
    resident = {dtype: group.empty(600_000, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    flying: list[tuple[Any, Tensor, Tensor, str]] = []
    busy: set[torch.dtype] = set()
    for number in range(rounds):
        kind = draw.choice(("sum", "sum", "sum", "maximum", "gather", "scatter", "broadcast", "barrier"))
        dtype, count = draw.choice((*FLOATS, *WHOLE)), size(draw)
        lives = draw.random() < 0.5 and dtype in resident and dtype not in busy
        key = seed * 100_000 + number
        place = resident[dtype][:count] if lives else torch.empty(count, dtype=dtype)
        if kind in ("sum", "maximum"):
            place.copy_(values(key, rank, count, dtype))
            work = group.start_all_reduce(place, kind == "maximum")
            wanted = added([values(key, r, count, dtype) for r in range(world)], kind == "maximum")
        elif kind == "gather":
            whole = torch.empty(world * count, dtype=dtype)
            work = group.start_all_gather(whole, values(key, rank, count, dtype))
            wanted = torch.cat([values(key, r, count, dtype) for r in range(world)])
            place, lives = whole, False
        elif kind == "scatter":
            count = min(count, 50_000)
            target = torch.empty(count, dtype=dtype)
            work = group.start_reduce_scatter(target, values(key, rank, count * world, dtype))
            parts = [values(key, r, count * world, dtype) for r in range(world)]
            wanted = added([part[count * rank : count * (rank + 1)] for part in parts])
            place, lives = target, False
        elif kind == "broadcast":
            root = draw.randrange(world)
            place.copy_(values(key, rank, count, dtype))
            work, wanted = group.start_broadcast(place, root), values(key, root, count, dtype)
        else:
            group.barrier("a barrier")
            continue
        if lives:
            busy.add(dtype)
        flying.append((work, place, wanted, f"round {number}: {kind} of {count} × {dtype}"))
        if len(flying) == 6 or draw.random() < 0.5:
            for work, place, wanted, what in flying:
                group.finish(work, what)
                assert torch.equal(place.view(-1), wanted.view(-1)), what
            flying.clear()
            busy.clear()
    for work, _, _, what in flying:
        group.finish(work, what)
    return "equal" if shared(group) or world == 1 else "not shared"


@pytest.mark.parametrize("world", ROUNDS)
def test_every_collective_is_exact_on_all_members(tmp_path: Path, world: int) -> None:
    assert members.run(tmp_path, world, many_rounds, world, ROUNDS[world]) == ["equal"] * world


def records(group: Group, tell: Any, seed: int) -> str:
    """Records of all lengths, short ones of one all-gather and long ones of two, and of both kinds together."""
    draw = random.Random(seed)
    for number in range(60):
        lengths = [draw.choice((0, 1, 900, draw.randint(930, 980), 5000)) for _ in range(group.world)]
        given = [np.random.default_rng((number, rank)).integers(0, 255, n, np.uint8) for rank, n in enumerate(lengths)]
        found = group.all_gather_arrays({"bytes": given[group.rank], f"of {group.rank}": np.arange(2)}, "records")
        for rank, (one, wanted) in enumerate(zip(found, given, strict=True)):
            assert set(one) == {"bytes", f"of {rank}"}
            assert np.array_equal(one["bytes"], wanted)
    return "equal"


@pytest.mark.parametrize("hosts", [None, ["a", "b", "c"]])
def test_records_of_any_length(tmp_path: Path, hosts: list[str] | None) -> None:
    assert members.run(tmp_path, 3, records, 1, hosts=hosts) == ["equal"] * 3


def test_more_members_than_cores(tmp_path: Path) -> None:
    assert members.run(tmp_path, 6, many_rounds, 77, 300) == ["equal"] * 6


def like_gloo(group: Group, tell: Any) -> float:
    worst = 0.0
    for count in (1, 1000, 300_000):
        mine = values(count, group.rank, count, torch.float32)
        theirs = mine.clone()
        group.all_reduce(mine, "ours")
        path, group._shared = group._shared, None
        group.all_reduce(theirs, "gloo's")
        group._shared = path
        assert path is not None
        worst = max(worst, float((mine - theirs).abs().max()))
    return worst


def test_equals_gloo_within_rounding(tmp_path: Path) -> None:
    assert max(members.run(tmp_path, 3, like_gloo)) < 1e-4


# -- several groups ---------------------------------------------------------------------------------------------------


def crossed(group: Group, tell: Any, rounds: int) -> str:
    """Two axes of a mesh of 2 × 2; who is on the diagonal waits for them in the other order than the others."""
    row, column = group.rank // 2, group.rank % 2
    a = group.part("a", [row * 2, row * 2 + 1])
    b = group.part("b", [column, column + 2])
    for number in range(rounds):
        count = (10, 100_000, 300_000)[number % 3]
        x, y = torch.ones(count), torch.full((count,), 2.0)
        begun = [(a, a.start_all_reduce(x)), (b, b.start_all_reduce(y))]
        for who, work in reversed(begun) if (row == column) != bool(number % 2) else begun:
            who.finish(work, "a sum")
        assert (x == 2).all()
        assert (y == 4).all()
    return "done"


def test_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    assert members.run(tmp_path, 4, crossed, 200) == ["done"] * 4


def beside_messages(group: Group, tell: Any) -> str:
    """Member 2 has begun a sum and now waits for a message that depends on others who wait for that sum."""
    pair = group.part("pair", [1, 2]) if group.rank in (1, 2) else None
    for _ in range(20):
        big, small = torch.ones(400_000), torch.zeros(8)
        if pair is not None:
            work = pair.start_all_reduce(big)
        if group.rank == 1:
            assert pair is not None
            pair.finish(work, "the sum")
            group.finish(group.start_send(small + 5, 0), "a message")
        elif group.rank == 0:
            group.receive(small, 1, 0, "a message")
            group.finish(group.start_send(small, 2), "a message")
        else:
            assert pair is not None
            group.receive(small, 0, 0, "a message")
            pair.finish(work, "the sum")
            assert (small == 5).all()
        assert pair is None or (big == 2).all()
    return "done"


def test_a_sum_goes_on_while_a_member_waits_for_a_message(tmp_path: Path) -> None:
    assert members.run(tmp_path, 3, beside_messages) == ["done"] * 3


def different(group: Group, tell: Any) -> str:
    group.all_reduce(torch.ones(10 + group.rank), "a sum")
    return "went through"


def test_members_that_disagree_are_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exchange different things"):
        members.run(tmp_path, 2, different)


# -- members that are lost --------------------------------------------------------------------------------------------


def until_lost(group: Group, tell: Any, count: int, living: bool) -> str:
    place = group.empty(count, torch.float32) if living else torch.ones(count)
    parts = [group.part("all", list(range(group.world)))]
    tell(os.getpid())
    try:
        while True:
            parts[0].all_reduce(place.fill_(1.0), "the sum")
    except collectives.PeerLost as error:
        return error.what


@pytest.mark.parametrize(("count", "living"), [(100, False), (600_000, False), (600_000, True)])
@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_member_is_named_within_a_second(tmp_path: Path, world: int, count: int, living: bool) -> None:
    all_ = members.start(tmp_path, world, until_lost, count, living)
    try:
        pids = [member.result() for member in all_]
        time.sleep(0.1)
        struck = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)  # and is a zombie from now on: nobody has waited for it
        for rank in (0, *range(2, world)):
            assert all_[rank].result(5.0) == "the sum broke off: worker 1 is gone"
        assert time.monotonic() - struck < 1.0
    finally:
        end(all_)


def test_a_stopped_member_is_named_at_the_deadline(tmp_path: Path) -> None:
    all_ = members.start(tmp_path, 2, until_lost, 600_000, True, timeout=1.0)
    try:
        pids = [member.result() for member in all_]
        time.sleep(0.1)
        os.kill(pids[1], signal.SIGSTOP)
        assert all_[0].result(5.0) == "the sum broke off: worker 1 did not come within 1 s"
    finally:
        end(all_)


def until_told(group: Group, tell: Any, folder: str) -> str:
    tell(os.getpid())
    while True:
        time.sleep(0.05 * group.rank)  # member 0 waits nearly always
        told = torch.tensor([float(os.path.exists(os.path.join(folder, "enough")))])
        group.all_reduce(told, "the sum", maximum=True)
        if told.item():
            return "done"


def test_members_that_were_suspended_together_go_on(tmp_path: Path) -> None:
    """As a container that is paused: the standstill is nobody's fault, however long it was."""
    (meeting := tmp_path / "meeting").mkdir()
    all_ = members.start(meeting, 2, until_told, str(tmp_path), timeout=1.0)
    try:
        pids = [member.result() for member in all_]
        for _ in range(3):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1.3)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.1)
        (tmp_path / "enough").touch()
        assert [member.result() for member in all_] == ["done"] * 2
    finally:
        end(all_)


def test_nothing_is_left_of_members_killed_at_any_moment(tmp_path: Path) -> None:
    """Neither in /dev/shm nor of the kernel's shared memory."""
    before = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    for number in range(12):
        all_ = members.start(tmp_path, 2, until_lost, 1_000_000, True)
        time.sleep(0.01 * number)
        for member in all_:
            assert member.process.pid is not None
            os.kill(member.process.pid, signal.SIGKILL)
        end(all_)
    assert (os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []) == before


def end(all_: list[members.Member]) -> None:
    for member in all_:
        member.process.kill()
        member.process.join()


# -- where memory cannot be shared ------------------------------------------------------------------------------------


def one_sum(group: Group, tell: Any) -> tuple[float, str | None, bool]:
    x = group.empty(300_000, torch.float32).fill_(1.0)
    group.all_reduce(x, "a sum")
    return float(x.mean()), group.note, shared(group)


def no_room(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def no_mapping(rank: int) -> None:
    if rank == 0:
        import mmap

        from verbund.comm.shared_memory import arena

        def refuse(self: arena.Memory, descriptor: int, size: int, own: Any = arena.Memory.__init__) -> None:
            if not isinstance(self, arena.Arena):
                raise OSError(13, "Permission denied")
            own(self, descriptor, size)

        arena.Memory.__init__ = refuse  # type: ignore[method-assign]
        assert mmap.PAGESIZE


def full_memory(rank: int) -> None:
    if rank == 1:
        from verbund.comm.shared_memory import arena

        arena.available_bytes = lambda: 1 << 20  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("crippled", "says"),
    [
        (no_room, "worker 1: no memory can be shared: File too large"),
        (no_mapping, "worker 0: the memory of another worker cannot be mapped: Permission denied"),
        (full_memory, "worker 1: 2 MiB are not free"),
    ],
)
def test_gloo_takes_over_and_says_why(tmp_path: Path, crippled: Any, says: str) -> None:
    for mean, note, path in members.run(tmp_path, 3, one_sum, crippled=crippled):
        assert mean == 3.0
        assert note is not None
        assert note.endswith(says)
        assert not path


def test_no_room_for_a_large_tensor_costs_only_speed(tmp_path: Path) -> None:
    assert members.run(tmp_path, 2, too_large) == ["done"] * 2


def too_large(group: Group, tell: Any) -> str:
    from verbund.comm.shared_memory import arena

    if group.rank == 1:
        arena.available_bytes = lambda: 1 << 20  # type: ignore[assignment]
    x = group.empty(1_000_000, torch.float32).fill_(1.0)
    assert group._host is not None
    assert (group._host.arena.place_of(x) is None) or group.rank == 0
    group.all_reduce(x, "a sum")
    assert (x == 2).all()
    return "done"


# -- several hosts ----------------------------------------------------------------------------------------------------


def over_hosts(group: Group, tell: Any) -> tuple[str, int]:
    assert group._shared is None
    resident = group.empty(300_000, torch.float32)
    for number in range(9):
        count = (7, 5000, 300_000)[number % 3]
        flying = []
        for k in range(3):
            x = values(number * 8 + k, group.rank, count, torch.float64)
            wanted = added([values(number * 8 + k, r, count, torch.float64) for r in range(group.world)], k == 2)
            flying.append((group.start_all_reduce(x, k == 2), x, wanted))
        for work, x, wanted in flying:
            group.finish(work, "a sum over hosts")
            assert torch.allclose(x, wanted, rtol=1e-12, atol=1e-12)
        group.all_reduce(resident.fill_(1.0), "a sum")
        assert (resident == group.world).all()
        whole = torch.empty(group.world)
        group.finish(group.start_all_gather(whole, torch.tensor([float(group.rank)])), "a gathering")
        assert whole.tolist() == list(range(group.world))
        group.barrier("a barrier")
    x = values(5, group.rank, 1000, torch.float32)
    group.all_reduce(x, "a sum")
    return x.numpy().tobytes().hex(), group.shared_bytes


@pytest.mark.parametrize(
    "hosts", [["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "a", "b"], ["a", "a", "b", "b", "c"]]
)
def test_hosts_add_up_inside_first(tmp_path: Path, hosts: list[str]) -> None:
    results = members.run(tmp_path, len(hosts), over_hosts, hosts=hosts)
    assert len({value for value, _ in results}) == 1, "equal on all members, bit by bit"
    for host, (_, moved) in zip(hosts, results, strict=True):
        assert bool(moved) == (hosts.count(host) > 1)


def test_a_host_each_goes_through_sockets_without_a_note(tmp_path: Path) -> None:
    assert members.run(tmp_path, 2, one_sum, hosts=["a", "b"]) == [(2.0, None, False)] * 2


def lost_over_hosts(group: Group, tell: Any) -> str:
    tell(os.getpid())
    try:
        while True:
            group.all_reduce(torch.ones(100_000), "the sum")
    except collectives.PeerLost as error:
        return error.what


@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_lost_on_another_host(tmp_path: Path, victim: int) -> None:
    """A leader, and one that is none: its own host names it, and all others come to an end once that ends."""
    all_ = members.start(tmp_path, 4, lost_over_hosts, hosts=["a", "a", "b", "b"], timeout=3.0)
    try:
        pids = [member.result() for member in all_]
        time.sleep(0.1)
        os.kill(pids[victim], signal.SIGKILL)
        assert all_[1 - victim].result(5.0) == f"the sum broke off: worker {victim} is gone"
        os.kill(pids[1 - victim], signal.SIGKILL)
        for rank in (2, 3):
            assert "broke off" in all_[rank].result(8.0)
    finally:
        end(all_)


def in_a_chain(group: Group, tell: Any, receives: bool) -> str:
    """0 waits for 1, and 1 for 2: of 2's end 0 hears by 1 alone, which keeps all that it had under way."""
    low = group.part("low", [0, 1]) if group.rank < 2 else None
    high = group.part("high", [1, 2]) if group.rank > 0 else None
    tell(os.getpid())
    waits = low if group.rank == 0 else high
    assert waits is not None
    kept = []
    try:
        if receives:
            kept = [low.start_send(torch.ones(3), 0, 7)] if low is not None and group.rank else []
            waits.receive(torch.ones(3), group.rank == 0, 5, "the values")
        while True:
            waits.all_reduce(torch.ones(5000), "the sum")
    except collectives.PeerLost as error:
        group.leave()
        group.leave()  # once more changes nothing
        return f"{error.what} ({len(kept)} kept)"


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize("hosts", [None, ["a", "b", "c"]])
def test_who_leaves_ends_the_wait_of_others(hosts: list[str] | None, receives: bool, tmp_path: Path) -> None:
    all_ = members.start(tmp_path, 3, in_a_chain, receives, hosts=hosts, timeout=60.0)
    try:
        pids = [member.result() for member in all_]
        time.sleep(0.1)
        os.kill(pids[2], signal.SIGKILL)
        for rank in (1, 0):
            assert re.search("broke off|could not start", all_[rank].result(5.0))
    finally:
        end(all_)


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_a_run_shares_memory_and_leaves_the_warm_server_as_it_was(warm: LocalCluster, run_job: Any) -> None:
    """Two runs in a row, forked from one server: nothing of the first is in the way of the second."""
    for _ in range(2):
        run = run_job(changes={"strategy.mesh": {"data": 2}, "train.steps": 3})
        assert run.summary["bytes"]["shared"] > 0
        assert not [note for note in run.summary["notes"] if "memory cannot be shared" in note]
    server = Path(f"/proc/{warm._servers[0].pid}")
    assert "memfd:verbund" not in (server / "maps").read_text()
    assert len(list((server / "task").iterdir())) == 1


def test_a_group_tells_once_why_memory_is_not_shared() -> None:
    groups = Groups.alone(torch.device("cpu"))
    other = Group.apart(1, 2, torch.device("cpu"))
    groups.island.note, other.note = "no room", "not of the first member"
    assert replace(groups, shard=other).notes() == ["no room"]
