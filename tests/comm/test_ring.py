"""Collectives over the wire, each member a thread; the reference is plain numpy in float64."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from verbund.comm.peer_lost import PeerLost
from verbund.comm.ring import WireGroup, group
from verbund.comm.wire import Secret

T = TypeVar("T")
SECRET = Secret.create()


class Store:
    """What torch's stores are: `get` waits for the key."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.over = threading.Event()
        """Whether nobody waits for the members any more."""
        self.seconds = seconds

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, self.seconds):
                raise RuntimeError(f"no {key}")
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        if self.over.is_set():
            raise RuntimeError("the era is over")
        return all(key in self.values for key in keys)


def members(
    world: int, work: Callable[[WireGroup], T], credentials: Secret | None = None, timeout: float = 10.0
) -> list[Any]:
    """What `work` gives for each member, or its `PeerLost`."""
    store = Store()
    given: list[Any] = [None] * world

    def live(rank: int) -> None:
        try:
            member = WireGroup(store, rank, world, credentials=credentials, timeout=timeout)
            try:
                given[rank] = work(member)
            finally:
                member.close()
        except PeerLost as error:
            given[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return given


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring takes many steps of many blocks."""
    monkeypatch.setattr(group, "_DIRECT", 64)
    monkeypatch.setattr(group, "_BLOCK", 400)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 16, 17, 1003])
def test_all_reduce(world: int, count: int) -> None:
    def work(member: WireGroup) -> tuple[Tensor, Tensor]:
        total, largest = values(member.rank, count), values(member.rank, count)
        member.all_reduce(total, "a sum")
        member.all_reduce(largest, "a maximum", maximum=True)
        return total, largest

    found = members(world, work)
    everyone = torch.stack([values(rank, count) for rank in range(world)]).double()
    for total, largest in found:
        assert torch.equal(total.view(torch.int32), found[0][0].view(torch.int32))  # the same bits everywhere
        torch.testing.assert_close(total.double(), everyone.sum(0), rtol=1e-5, atol=1e-6)
        assert torch.equal(largest.double(), everyone.amax(0))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_dtypes(dtype: torch.dtype) -> None:
    def work(member: WireGroup) -> Tensor:
        total = (10 * values(member.rank, 999)).to(dtype)
        member.all_reduce(total, "a sum")
        return total

    found = members(3, work)
    exact = sum((10 * values(rank, 999)).to(dtype).double() for rank in range(3))
    tolerance = {torch.bfloat16: 2e-1, torch.float16: 3e-2}.get(dtype, 1e-12)
    for total in found:
        assert torch.equal(total, found[0])
        torch.testing.assert_close(total.double(), exact, rtol=tolerance / 10, atol=tolerance)


def test_large_over_tls_in_the_background() -> None:
    """Several under way at once, real sizes, with a secret; computing goes on."""

    def work(member: WireGroup) -> tuple[Tensor, Tensor, Tensor]:
        large, small, more = values(member.rank, 700_001), values(member.rank, 3), values(member.rank, 300_000)
        works = [member.start_all_reduce(each) for each in (large, small, more)]
        torch.randn(200, 200) @ torch.randn(200, 200)
        for each in works:
            member.finish(each, "a sum")
        return large, small, more

    found = members(3, work, SECRET)
    for number, count in enumerate((700_001, 3, 300_000)):
        exact = sum(values(rank, count).double() for rank in range(3))
        for each in found:
            assert torch.equal(each[number], found[0][number])
            torch.testing.assert_close(each[number].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("count", [0, 3, 1000])
@pytest.mark.parametrize("root", [0, 2])
def test_gather_broadcast_send(count: int, root: int) -> None:
    def work(member: WireGroup) -> tuple[list[Tensor], Tensor, Tensor, list[dict[str, Any]]]:
        mine = values(member.rank, count)
        sending = member.start_send(mine, (member.rank + 1) % 3, tag=7)
        gathered = member.all_gather(mine.view(1, count), "a gather")
        given = values(member.rank, count)
        member.broadcast(given, root, "a broadcast")
        received = torch.empty(count)
        member.receive(received, (member.rank - 1) % 3, 7, "a receive")
        member.finish(sending, "a send")
        arrays = member.all_gather_arrays({f"of {member.rank}": np.arange(member.rank)}, "arrays")
        member.barrier("a barrier")
        return gathered, given, received, arrays

    for rank, (gathered, given, received, arrays) in enumerate(members(3, work)):
        assert torch.equal(torch.cat(gathered), torch.stack([values(other, count) for other in range(3)]))
        assert torch.equal(given, values(root, count))
        assert torch.equal(received, values((rank - 1) % 3, count))
        assert [{name: list(array) for name, array in each.items()} for each in arrays] == [
            {f"of {other}": list(range(other))} for other in range(3)
        ]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("count", [0, 2, 500])
def test_parts_for_each(world: int, count: int) -> None:
    def work(member: WireGroup) -> tuple[Tensor, Tensor]:
        sent = values(member.rank, world * count)
        dealt, added = torch.empty(world * count), torch.empty(count)
        member.finish(member.start_all_to_all(dealt, sent), "an all-to-all")
        member.finish(member.start_reduce_scatter(added, sent), "a reduce-scatter")
        return dealt, added

    whole = torch.stack([values(rank, world * count).view(world, count) for rank in range(world)])
    for rank, (dealt, added) in enumerate(members(world, work)):
        assert torch.equal(dealt.view(world, count), whole[:, rank])
        torch.testing.assert_close(added.double(), whole[:, rank].double().sum(0), rtol=1e-5, atol=1e-6)


def test_a_tensor_may_change_as_soon_as_its_sum_is_there() -> None:
    def work(member: WireGroup) -> list[float]:
        tensor, seen = torch.zeros(500_000), []
        for step in range(5):
            tensor.fill_(member.rank + step)
            member.all_reduce(tensor, "a sum")
            seen += [float(tensor.min()), float(tensor.max())]
        return seen

    for seen in members(3, work):
        assert seen == [float(3 + 3 * step) for step in range(5) for _ in range(2)]


def test_bytes_are_counted_by_peer() -> None:
    count, world = 1_000_000, 4

    def work(member: WireGroup) -> tuple[dict[int, int], dict[int, int]]:
        member.all_reduce(values(member.rank, count), "a sum")
        member.barrier("the end")
        return member.sent_bytes(), member.received_bytes()

    found = members(world, work)
    around = 2 * (world - 1) * count * 4 // world
    for rank, (sent, received) in enumerate(found):
        assert around <= sent[(rank + 1) % world] <= 1.01 * around
        assert around <= received[(rank - 1) % world] <= 1.01 * around
        assert sent[(rank + 2) % world] < 1000


class TestLost:
    def naming(self, found: list[Any], rank: int, but: set[int]) -> None:
        for other, error in enumerate(found):
            if other not in but:
                assert isinstance(error, PeerLost), found
                assert f"rank {rank} " in str(error), found

    def test_a_member_dies(self) -> None:
        """All others name it at once, also who does not wait for it."""

        def work(member: WireGroup) -> float:
            member.barrier("the start")
            if member.rank == 2:
                for peer in member._peers.values():
                    peer.connection.end()
                raise PeerLost("died")
            start = time.monotonic()
            try:
                member.all_reduce(torch.zeros(1_000_000), "a sum")
            finally:
                assert time.monotonic() - start < 5.0
            return 0.0

        self.naming(members(4, work, SECRET, timeout=20.0), 2, {2})

    def test_a_member_is_silent(self) -> None:
        """Also those that wait for somebody else name who keeps all waiting."""
        over = threading.Event()

        def work(member: WireGroup) -> None:
            member.barrier("the start")
            if member.rank == 1:
                over.wait(20.0)
                return
            try:
                member.all_reduce(torch.zeros(1_000_000), "a sum")
            finally:
                if member.rank == 0:
                    over.set()

        self.naming(members(4, work, timeout=1.5), 1, {1})

    def test_a_member_takes_nothing(self) -> None:
        """It is there and does not read; what is sent to it does not wait for ever."""
        over = threading.Event()

        def work(member: WireGroup) -> None:
            if member.rank == 1:
                over.wait(20.0)
                return
            try:
                member.finish(member.start_send(torch.zeros(8_000_000), 1), "a send")
            finally:
                over.set()

        self.naming(members(2, work, timeout=1.0), 1, {1})

    def test_a_member_does_not_come(self) -> None:
        store = Store(seconds=0.3)
        with pytest.raises(PeerLost, match=r"missing ranks 1, 2"):
            WireGroup(store, 0, 3, timeout=0.3)
        with pytest.raises(PeerLost, match="rank 0"):
            WireGroup(Store(seconds=0.3), 1, 2, timeout=0.3)

    def test_nobody_waits_any_more(self) -> None:
        """One of those that were to come has gone again: the others do not wait until their time is over."""
        store = Store()
        store.over.set()
        begun = time.monotonic()
        with pytest.raises(PeerLost, match="the era is over"):
            WireGroup(store, 0, 2, timeout=20.0)
        assert time.monotonic() - begun < 10.0

    def test_cut_by_another_thread(self) -> None:
        """Whoever waits for a member that stands still is set free, and so are the others; nothing begins any more."""

        def work(member: WireGroup) -> str:
            tensor = torch.ones(1 << 18)
            if member.rank == 2:
                with pytest.raises(PeerLost):
                    member.receive(tensor, 0, 7, "what nobody sends")
            else:
                if member.rank == 0:
                    threading.Timer(0.1, member.cut).start()
                with pytest.raises(PeerLost):
                    member.all_reduce(tensor, "a sum")
            member.cut()
            with pytest.raises(PeerLost):
                member.all_reduce(tensor, "another one")
            member.close()
            return "free"

        begun = time.monotonic()
        assert members(3, work) == ["free"] * 3
        assert time.monotonic() - begun < 8.0

    def test_another_secret(self) -> None:
        store = Store()
        errors: list[PeerLost] = []

        def live(rank: int) -> None:
            try:
                WireGroup(store, rank, 2, credentials=Secret.create(), timeout=1.0)
            except PeerLost as error:
                errors.append(error)

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert sorted("does not know the secret" in str(error) for error in errors) == [False, True]

    def test_they_do_different_things(self) -> None:
        def work(member: WireGroup) -> None:
            if member.rank:
                member.broadcast(torch.zeros(3), 0, "a broadcast")
            else:
                member.barrier("a barrier")

        for error in members(2, work, timeout=0.6):
            assert isinstance(error, PeerLost)

    def test_who_leaves_after_its_work_is_not_lost(self) -> None:
        """The others still have something to do with each other."""

        def work(member: WireGroup) -> float:
            total = torch.ones(100_000)
            member.all_reduce(total, "a sum")
            if member.rank < 2:
                time.sleep(0.3)
                for _ in range(3):
                    member.finish(member.start_send(total, 1 - member.rank), "a send")
                    member.receive(total, 1 - member.rank, 0, "a receive")
            return float(total.sum())

        assert members(3, work) == [300_000.0] * 3

    def test_a_group_that_has_lost_a_member_does_no_more(self) -> None:
        def work(member: WireGroup) -> None:
            if member.rank == 0:
                return
            with pytest.raises(PeerLost):
                member.barrier("a barrier")
            member.barrier("another one")

        assert isinstance(members(2, work)[1], PeerLost)
