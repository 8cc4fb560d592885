"""What a server has acknowledged is there again after it was killed, and whatever the end of its log looks like."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from exchange.parameter_server.holding import begun, blocks_of, push, spec
from exchange.parameter_server.serving import Process, cluster
from verbund.errors import CheckpointError, RunFailed
from verbund.exchange.parameter_server.holdings import Holdings
from verbund.exchange.parameter_server.log import Log
from verbund.exchange.parameter_server.plan import Plan, Rule
from verbund.exchange.parameter_server.push import Part

PLAN = Plan(tuple(blocks_of({"a": (5, 3), "b": (4,)})), spec("adam", 0.1), Rule("asynchronous"))
COUNTERS = Plan(tuple(blocks_of({"a": (64, 32)}, 16)), spec("sgd", 1.0), Rule("asynchronous"))


class Logged:
    """Holdings with a log."""

    def __init__(self, folder: Path, plan: Plan = PLAN, bound: int = 1 << 26) -> None:
        self.holdings = Holdings(plan)
        self.lock = threading.Lock()
        self.log = Log(folder, self.image, bound)
        self.number = self.log.recover(self.holdings)

    def image(self, block: int) -> Any:
        with self.lock:
            return (self.number, self.holdings.image(block)) if block in self.holdings else None

    def begin(self) -> Logged:
        made = begun(self.holdings.plan, {b.name: torch.ones(b.shape) for b in self.holdings.plan.blocks})
        for block in range(len(self.holdings.plan.blocks)):
            self.record(made.image(block))
        return self

    def record(self, record: Any) -> None:
        with self.lock:
            self.number += 1
            if hasattr(record, "parts"):
                self.holdings.apply(record)
            else:
                self.holdings.put(record)
                record = self.holdings.image(record.block)
            self.log.append(self.number, record)

    def push(self, ticket: int) -> None:
        generator = torch.Generator().manual_seed(ticket)
        blocks = self.holdings.plan.blocks
        chosen = [number for number in range(len(blocks)) if (ticket + number) % 3]
        parts = [Part(n, 0, torch.randn(blocks[n].count, generator=generator)) for n in chosen]
        self.record(push(parts, ticket))

    def synced(self) -> Logged:
        self.log.wait(self.number, 10.0)
        return self

    def same(self, other: Holdings) -> bool:
        for block in range(len(self.holdings.plan.blocks)):
            mine, others = self.holdings.image(block), other.image(block)
            if mine.fields != others.fields or mine.tensors.keys() != others.tensors.keys():
                return False
            if not all(torch.equal(mine.tensors[name], others.tensors[name]) for name in mine.tensors):
                return False
        return True


def after(tickets: int) -> Holdings:
    """What there is after so many pushes, by another way than a log."""
    plain = Logged.__new__(Logged)
    plain.holdings, plain.lock, plain.number = Holdings(PLAN), threading.Lock(), 0
    plain.log = type("None", (), {"append": lambda *given: None})()
    plain.begin()
    for ticket in range(tickets):
        plain.push(ticket)
    return plain.holdings


def test_what_was_synced_is_there_again(tmp_path: Path) -> None:
    first = Logged(tmp_path).begin()
    for ticket in range(10):
        first.push(ticket)
    first.synced().log.close()
    again = Logged(tmp_path)
    assert again.number == first.number
    assert again.same(after(10))
    for ticket in range(10, 15):
        again.push(ticket)
    again.synced().log.close()
    assert Logged(tmp_path).same(after(15))


@pytest.mark.parametrize("seed", range(12))
def test_a_torn_or_flipped_tail(tmp_path: Path, seed: int) -> None:
    """The log ends before the first record that is bad; what comes after it is written in its place."""
    chance = random.Random(seed)
    first = Logged(tmp_path / "log").begin()
    ends = []
    for ticket in range(6):
        first.push(ticket)
        first.synced()
        ends.append((tmp_path / "log" / "log-1.bin").stat().st_size)
    first.log.close()
    path = tmp_path / "log" / "log-1.bin"
    content = bytearray(path.read_bytes())
    at = chance.randrange(ends[1], len(content))
    whole = sum(end <= at for end in ends)
    if seed % 2:
        content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    else:
        path.write_bytes(content[:at])
    again = Logged(tmp_path / "log")
    assert again.same(after(whole))
    for ticket in range(whole, 8):
        again.push(ticket)
    again.synced().log.close()
    assert Logged(tmp_path / "log").same(after(8))


def test_a_log_that_had_only_begun(tmp_path: Path) -> None:
    first = Logged(tmp_path)
    first.log.close()
    path = tmp_path / "log-1.bin"
    path.write_bytes(path.read_bytes()[:20])
    again = Logged(tmp_path).begin()
    again.synced().log.close()
    assert Logged(tmp_path).same(after(0))


def size(path: Path) -> int:
    """0 of what is renamed or removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_snapshots_keep_it_short(tmp_path: Path) -> None:
    """Disk use is bounded; the snapshot with the logs after it is all that there was."""
    first = Logged(tmp_path, bound=20_000).begin()
    most = 0
    for ticket in range(400):
        first.push(ticket)
        if ticket % 10 == 0:
            first.synced()
            most = max(most, sum(map(size, tmp_path.iterdir())))
    first.synced().log.close()
    assert first.log.snapshots > 2
    assert most < 100_000 < first.log.bytes
    assert len(list(tmp_path.glob("snapshot-*"))) == 1
    again = Logged(tmp_path)
    assert again.number == first.number
    assert again.same(after(400))
    again.log.close()


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_killed_while_it_takes_a_snapshot(tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the folder at any moment is one to go on from."""
    copies: list[Path] = []

    def copy(name: str) -> None:
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(tmp_path / "log", copies[-1])

    shoot, rename = Log._write_snapshot, Path.rename

    def written(self: Log, path: Path) -> int:
        if moment == 0:
            copy("before")
        number = shoot(self, path)
        if moment == 1:
            copy("written")
        return number

    def renamed(self: Path, target: Path) -> Path:
        found = rename(self, target)
        if moment == 2:
            copy("renamed")
        return found

    monkeypatch.setattr(Log, "_write_snapshot", written)
    monkeypatch.setattr(Path, "rename", renamed)
    first = Logged(tmp_path / "log", bound=5_000).begin()
    for ticket in range(60):
        first.push(ticket)
        first.synced()
    first.log.close()
    monkeypatch.undo()
    assert copies
    for folder in copies:
        again = Logged(folder)
        tickets = again.number - len(PLAN.blocks)
        assert again.same(after(tickets))
        again.log.close()
        assert not list(folder.glob(".snapshot*"))


def test_what_is_damaged_beyond_the_tail_is_told(tmp_path: Path) -> None:
    first = Logged(tmp_path, bound=5_000).begin()
    for ticket in range(60):
        first.push(ticket)
        first.synced()
    first.log.close()
    (snapshot,) = tmp_path.glob("snapshot-*")
    content = bytearray(snapshot.read_bytes())
    content[len(content) // 2] ^= 1
    snapshot.write_bytes(content)
    with pytest.raises(CheckpointError, match="the snapshot is damaged"):
        Logged(tmp_path)
    snapshot.unlink()
    with pytest.raises(CheckpointError, match=r"log-1\.bin is not there"):
        Logged(tmp_path)


def test_another_model(tmp_path: Path) -> None:
    Logged(tmp_path).begin().synced().log.close()
    with pytest.raises(CheckpointError, match="of another model"):
        Logged(tmp_path, COUNTERS)


def test_a_full_disk(tmp_path: Path) -> None:
    """Nothing is acknowledged that is not there; what was there before is."""
    first = Logged(tmp_path).begin()
    for ticket in range(3):
        first.push(ticket)
    first.synced()
    size = (tmp_path / "log-1.bin").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        first.push(3)
        with pytest.raises(RunFailed, match="the log of a parameter server failed: the disk is full"):
            first.synced()
        first.push(4)
        with pytest.raises(RunFailed, match="the disk is full"):
            first.synced()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    first.log.close()
    assert Logged(tmp_path).same(after(3))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_at_random(seed: int) -> None:
    """Two clients count with a server that is killed again and again: each push counts exactly once."""
    chance = random.Random(seed)
    pushes = 100
    with cluster(COUNTERS, kind=Process, log=True, log_bytes=1 << 19) as servers:
        clients = [servers.client(island) for island in (0, 1)]
        for block, of in enumerate(COUNTERS.blocks):
            clients[0].begin(block, torch.zeros(of.count))
        versions: list[list[int]] = [[], []]
        failures: list[BaseException] = []

        def count(island: int) -> None:
            try:
                into = {block: torch.zeros(of.count) for block, of in enumerate(COUNTERS.blocks)}
                parts = [Part(block, 0, torch.ones(of.count)) for block, of in enumerate(COUNTERS.blocks)]
                for ticket in range(island, 2 * pushes, 2):
                    clients[island].push(ticket, parts, weight=1.0)
                    seen = clients[island].pull(into)
                    assert all(float(into[block][0]) == -version for block, version in seen.items())
                    versions[island].append(seen[0])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=count, args=(island,)) for island in (0, 1)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(chance.uniform(0.02, 0.1))
            servers.kill(0)
            servers.fail_over(0)
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        into = {block: torch.zeros(of.count) for block, of in enumerate(COUNTERS.blocks)}
        assert clients[0].pull(into) == dict.fromkeys(into, 2 * pushes)
        assert all(torch.equal(values, torch.full_like(values, -2 * pushes)) for values in into.values())
        assert all(seen == sorted(seen) for seen in versions)
        assert servers.view.number > 2
