"""What parameter servers did: the summary's figures and the report's section, of invented runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import write_run

from verbund.observe.events import Journal
from verbund.observe.journal import read
from verbund.observe.report import write_report
from verbund.observe.summary import summarise


def _write(folder: Path) -> None:
    write_run(folder, steps=4)
    for rank, life, staleness in ((0, 0, [[0, 3], [2, 1]]), (1, 0, [[0, 1]]), (1, 1, [[1, 5]])):
        journal = Journal(folder / "journal", "worker", rank, 1, life=life)
        journal.totals("served", staleness=staleness, late=1, known=rank)
        journal.close()
    for life, pushes in ((0, 4), (1, 6)):
        journal = Journal(folder / "journal", "server", 0, 1, life=life)
        journal.totals("server", pushes=pushes, bytes=1000, applying_seconds=0.5)
        journal.close()
    journal = Journal(folder / "journal", "supervisor", 0, 1)
    journal.event("replacement", processes="server 0", why="server 0 was killed by SIGKILL while serving (step 0)")
    journal.close()


def test_all_updates_are_counted_whoever_was_replaced(tmp_path: Path) -> None:
    _write(tmp_path)
    servers = summarise(tmp_path, status="done")["servers"]
    assert servers["updates"] == 10
    staleness = servers["staleness"]
    assert staleness["histogram"] == [[0, 4], [1, 5], [2, 1]]
    assert (staleness["mean"], staleness["max"]) == (0.7, 2)
    assert (servers["late"], servers["repeated"]) == (3, 2)
    assert servers["per_server"] == {"server 0": {"pushes": 10, "bytes": 2000, "applying_seconds": 1.0}}
    assert [each["processes"] for each in servers["replacements"]] == ["server 0"]


def test_none_without_servers(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    assert summarise(tmp_path, status="done")["servers"] is None


def test_the_report_has_bars_and_says_what_was_replaced(tmp_path: Path) -> None:
    _write(tmp_path)
    text = write_report(tmp_path, summarise(tmp_path, status="done")).read_text()
    assert "Parameter servers" in text
    assert text.count('<rect class="communicate"') >= 3
    assert "10 updates. Staleness: 0.70 steps on average, 2 at most." in text
    assert "3 shares came after their step had been taken without them" in text
    assert "killed by SIGKILL while serving" in text


@pytest.mark.parametrize("staleness", ["none", [["a", 1]], [[1]], [[-1, 2]], [[True, 1]], {"0": 1}, None])
def test_what_is_no_histogram_counts_for_nothing(staleness: object, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "worker", 0, 1)
    journal.totals("served", staleness=staleness, late=-1, known="x")
    journal.close()
    (found,) = read(tmp_path / "journal")
    assert found.served == {"staleness": []}
    assert summarise(tmp_path, status="done")["servers"]["updates"] == 0


def test_who_took_a_place_counts_as_the_same_worker(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    Journal(tmp_path / "journal", "worker", 1, 1, life=1).close()
    summary = summarise(tmp_path, status="done")
    assert summary["world"] == 2
    assert len(summary["workers"]) == 2
    assert summary["seconds"]["compute"] == pytest.approx(4 * 0.011)


def test_an_island_without_samples_has_no_loss(tmp_path: Path) -> None:
    for rank, (loss, weight, size) in enumerate(((2.0, 4.0, 4), (float("nan"), 0.0, 0))):
        journal = Journal(tmp_path / "journal", "worker", rank, 1)
        journal.step(0, loss, weight, size, 0.1)
        journal.close()
    summary = summarise(tmp_path, status="done")
    assert summary["loss"]["last"] == 2.0
    assert summary["samples"] == 4
