"""The loader: the same batches in the same order, however they are read; its failures are named and nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verbund.data.dataset import DatasetSource
from verbund.data.loader import Batch, Item, Loader, LoaderProcesses
from verbund.data.prepare import prepare
from verbund.data.samples import ColumnFiles, Ids, Rows, Samples, Source
from verbund.errors import DataError, RunFailed, TaskError
from verbund.job import Data


class Numbers(Source):
    """Rows that are known: x[i] = i, and y = (i, i, …) of `width`."""

    def __init__(self, slow: bool = False, width: int = 3, change: Callable[[Ids], None] | None = None) -> None:
        self.size = 1000
        self.slow = slow
        self._width = width
        self._change = change

    def rows(self, ids: Ids, ticket: int | None = None) -> Rows:
        if self._change is not None:
            self._change(ids)
        # Names that a message has fields of its own for must not matter.
        return {"kind": ids.copy(), "fields": np.repeat(ids[:, None], self._width, 1).astype(np.float32)}


def plan(count: int = 20, size: int = 7) -> Iterator[Item]:
    for ticket in range(count):
        yield Item(ticket, np.arange(ticket * size, (ticket + 1) * size), phantom=ticket == 3)


def check(batches: list[Batch], count: int = 20, size: int = 7, width: int = 3) -> None:
    assert [batch.ticket for batch in batches] == list(range(count))
    for batch in batches:
        expected = np.arange(batch.ticket * size, (batch.ticket + 1) * size)
        assert batch.ids.tolist() == expected.tolist()
        assert batch.columns["kind"].tolist() == expected.tolist()
        assert batch.columns["fields"].shape == (size, width)
        assert batch.columns["fields"][:, 0].tolist() == expected.tolist()
        assert batch.phantom == (batch.ticket == 3)


@pytest.mark.parametrize("prefetch", [1, 2, 50])
@pytest.mark.parametrize("how", ["inline", "thread", "1", "2", "3"])
def test_every_way_of_reading_gives_the_same(how: str, prefetch: int) -> None:
    samples = Samples(Numbers(slow=how == "thread"))
    processes = LoaderProcesses(int(how), samples) if how.isdigit() else None
    loader = Loader(samples, plan(), prefetch=prefetch, processes=processes)
    check(list(loader))
    loader.close()
    loader.close()


def test_messages_larger_than_a_socket_holds_do_not_lock_up() -> None:
    # 400 kB of ids in every request, 1.6 MB of values in every answer.
    samples = Samples(Numbers(width=8))
    loader = Loader(samples, plan(8, 50_000), prefetch=4, processes=LoaderProcesses(2, samples))
    check(list(loader), 8, 50_000, 8)
    loader.close()


@pytest.mark.parametrize("processes", [0, 2])
def test_the_transform_runs_where_is_read(processes: int) -> None:
    def transform(batch: Batch) -> Batch:
        place = torch.full((len(batch.ids),), os.getpid() if processes else threading.get_ident())
        return batch.with_columns({**batch.columns, "place": place, "twice": batch.columns["kind"] * 2})

    samples = Samples(Numbers())
    pool = LoaderProcesses(processes, samples, transform) if processes else None
    pids = set(pool.pids) if pool else set()
    loader = Loader(samples, plan(), transform=transform, processes=pool)
    batches = list(loader)
    places = {int(place) for batch in batches for place in batch.columns["place"]}
    assert places == pids if processes else places.isdisjoint({threading.get_ident()})
    assert all(torch.equal(batch.columns["twice"], batch.columns["kind"] * 2) for batch in batches)
    loader.close()


def failing(ids: Ids) -> None:
    if 70 in ids:
        raise ValueError("a bad day")


@pytest.mark.parametrize("how", ["inline", "thread"])
def test_an_exception_arrives_at_its_batch(how: str) -> None:
    loader = Loader(Samples(Numbers(slow=how == "thread", change=failing)), plan(), prefetch=5)
    batches = iter(loader)
    check([next(batches) for _ in range(10)], 10)
    with pytest.raises(ValueError, match="a bad day"):
        next(batches)
    loader.close()


def test_an_exception_in_a_process_names_it_and_the_samples() -> None:
    samples = Samples(Numbers(change=failing))
    loader = Loader(samples, plan(), processes=LoaderProcesses(2, samples))
    batches = iter(loader)
    check([next(batches) for _ in range(10)], 10)
    with pytest.raises(RunFailed) as found:
        next(batches)
    assert "ValueError in loader process 0, samples 70, 71, 72, 73, … of ticket 10: a bad day" in found.value.what
    assert "test_loader.py, line" in str(found.value.where)
    loader.close()


def test_a_data_error_crosses_the_process_as_it_is() -> None:
    def change(ids: Ids) -> None:
        raise DataError("is no readable image", where="cat/1.png")

    samples = Samples(Numbers(change=change))
    loader = Loader(samples, plan(), processes=LoaderProcesses(1, samples))
    with pytest.raises(DataError, match="is no readable image") as found:
        list(loader)
    assert found.value.where == "cat/1.png"
    loader.close()


def test_values_that_cannot_travel_are_told() -> None:
    def transform(batch: Batch) -> Batch:
        return batch.with_columns({"z": torch.zeros(len(batch.ids), dtype=torch.complex64)})

    samples = Samples(Numbers())
    loader = Loader(samples, plan(), processes=LoaderProcesses(1, samples, transform))
    with pytest.raises(RunFailed, match="complex64"):
        list(loader)
    loader.close()


def killed(ids: Ids) -> None:
    if 70 in ids:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_is_named() -> None:
    samples = Samples(Numbers(change=killed))
    pool = LoaderProcesses(2, samples)
    loader = Loader(samples, plan(), processes=pool)
    start = time.monotonic()
    with pytest.raises(RunFailed, match=rf"loader process 0 \(pid {pool.pids[0]}\) was killed by SIGKILL .*samples 70"):
        list(loader)
    assert time.monotonic() - start < 10
    loader.close()


def test_a_process_that_hangs_is_named_after_the_deadline() -> None:
    samples = Samples(Numbers(change=lambda ids: time.sleep(60) if 70 in ids else None))
    loader = Loader(samples, plan(), processes=LoaderProcesses(2, samples, deadline=0.3))
    with pytest.raises(
        RunFailed, match=r"loader process 0 .* has not delivered samples 70.* of ticket 10 within 0.3 s"
    ):
        list(loader)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("processes", [0, 2])
def test_closing_early_ends_everything(processes: int) -> None:
    before = threading.active_count()
    samples = Samples(Numbers(slow=True))
    pool = LoaderProcesses(processes, samples) if processes else None
    pids = pool.pids if pool else ()
    loader = Loader(samples, plan(10**9), prefetch=3, processes=pool)
    batches = iter(loader)
    check([next(batches) for _ in range(5)], 5)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 2
    assert threading.active_count() == before
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_more_is_read_ahead_than_asked() -> None:
    asked: list[int] = []

    def watched() -> Iterator[Item]:
        for item in plan(100):
            asked.append(item.ticket)
            yield item

    loader = Loader(Samples(Numbers(slow=True)), watched(), prefetch=3)
    batches = iter(loader)
    next(batches)
    time.sleep(0.2)
    assert len(asked) <= 1 + 3 + 1  # taken, waiting, and one in the thread's hands
    loader.close()


def test_processes_end_with_their_worker() -> None:
    script = """
import os, sys, time
import numpy as np
from verbund.data.loader import LoaderProcesses
from verbund.data.samples import Samples, Source
class Nothing(Source):
    size = 1
    def rows(self, ids, ticket=None): return {}
pool = LoaderProcesses(2, Samples(Nothing()))
print(*pool.pids, flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(pids) == 2
    worker.kill()
    worker.wait()
    worker.stdout.close()
    until = time.monotonic() + 5
    while any(running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_batch_from_column_files_costs_little(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (5000, 784), np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(5000))
    prepared = prepare(Data(train="d.npz", cache="cache"), folder=tmp_path)
    samples = Samples(ColumnFiles(Path(str(prepared.train))))
    ids = [np.random.default_rng(i).integers(0, 5000, 64) for i in range(500)]
    best = 1.0
    for _ in range(3):
        start = time.thread_time()
        batches = list(Loader(samples, (Item(ticket, i) for ticket, i in enumerate(ids))))
        best = min(best, time.thread_time() - start)
    for batch, chosen in zip(batches, ids, strict=True):
        assert np.array_equal(batch.columns["x"].numpy(), x[chosen])
    assert best / len(ids) < 100e-6


# -- Datasets of the task ----------------------------------------------------------------------------------------------


class Noisy:
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        noise = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64)
        return noise, index


def rows_of(dataset: Any, ids: list[int], ticket: int | None = 0, seed: int = 1) -> Rows:
    return DatasetSource(dataset, ["input", "target"], seed).rows(np.array(ids), ticket)


def test_draws_belong_to_the_sample() -> None:
    whole = rows_of(Noisy(), [3, 4, 5, 6])
    assert np.array_equal(rows_of(Noisy(), [6, 3])["input"], whole["input"][[3, 0]])
    assert whole["target"].tolist() == [3, 4, 5, 6]
    assert len(np.unique(whole["input"])) == 12
    for other in (rows_of(Noisy(), [3, 4, 5, 6], ticket=1), rows_of(Noisy(), [3, 4, 5, 6], seed=2)):
        assert not np.isin(other["input"], whole["input"]).any()


def test_the_global_generators_stay_as_they_were() -> None:
    def draws() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draws()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    rows_of(Noisy(), [1, 2])
    assert draws() == expected


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_augmentation_is_the_same_for_any_number_of_processes(processes: int) -> None:
    samples = Samples(DatasetSource(Noisy(), ["input", "target"], 7))
    pool = LoaderProcesses(processes, samples) if processes else None
    loader = Loader(samples, plan(5), processes=pool)
    read = torch.cat([batch.columns["input"] for batch in loader])
    loader.close()
    alone = [rows_of(Noisy(), [i], ticket=i // 7, seed=7)["input"] for i in range(35)]
    assert np.array_equal(read.numpy(), np.concatenate(alone))


@pytest.mark.parametrize(
    ("item", "columns"),
    [
        ((torch.ones(2), 3), {"input": (2,), "target": ()}),
        ([np.ones(2), 3, 1.5], {"input": (2,), "target": (), "column2": ()}),
        ({"a": 1, "b": np.zeros((2, 2))}, {"a": (), "b": (2, 2)}),
        (np.arange(4), {"input": (4,)}),
        (torch.ones(3, dtype=torch.bfloat16), {"input": (3,)}),
        (5, {"input": ()}),
    ],
)
def test_items_of_any_form(item: Any, columns: dict[str, Any]) -> None:
    rows = rows_of([item] * 4, [0, 2])
    assert {name: value.shape for name, value in rows.items()} == {name: (2, *s) for name, s in columns.items()}


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError


class Refusing:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise Mute


def test_bad_items_name_the_sample() -> None:
    with pytest.raises(TaskError, match=r"`input` has shape \[3\] in sample 1 and \[2\] in sample 0"):
        rows_of([np.zeros(2), np.zeros(3)], [0, 1])
    with pytest.raises(TaskError, match="`input` of sample 1 is a str"):
        rows_of([1, "word"], [0, 1])
    with pytest.raises(TaskError, match=r"sample 1 and sample 0 have not both `b`"):
        rows_of([{"a": 1, "b": 2}, {"a": 1}], [0, 1])
    with pytest.raises(RunFailed, match="IndexError in sample 9"):
        rows_of([1, 2], [9])
    with pytest.raises(RunFailed, match=r"Mute in sample 0: \(its text cannot be had: TypeError\)"):
        rows_of(Refusing(), [0])
    with pytest.raises(TaskError, match="no map-style Dataset"):
        DatasetSource(iter([1]), ["input"], 0)
    with pytest.raises(DataError, match="empty"):
        DatasetSource([], ["input"], 0)
