"""RAPL's counters, on a folder that looks like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from verbund.observe.energy import NOT_MEASURED, EnergyMeter


def zone(folder: Path, name: str, label: str, value: int | None, limit: int = 1000) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{label}\n")
    (path / "max_energy_range_uj").write_text(f"{limit}\n")
    if value is not None:
        (path / "energy_uj").write_text(f"{value}\n")
    return path


def test_packages_and_memory_count_and_parts_do_not(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 10)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 10)
    dram = zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    whole = zone(tmp_path, "intel-rapl:1", "psys", 10)
    twice = zone(tmp_path, "intel-rapl-mmio:0", "package-0", 10)
    meter = EnergyMeter(tmp_path, gpus=False)
    meter.start()
    for path in (package, core, dram, whole, twice):
        (path / "energy_uj").write_text("110")
    assert meter.joules() == pytest.approx(200e-6)
    assert meter.how == "RAPL: the whole of package-0, dram"


def test_a_counter_that_wraps(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900, limit=999)
    meter = EnergyMeter(tmp_path, gpus=False)
    meter.start()
    used = 0
    for step in (50, 70, 400, 999):
        used += step
        (package / "energy_uj").write_text(str((900 + used) % 1000))
        assert meter.joules() == pytest.approx(used / 1e6)


def test_without_a_readable_counter_there_is_no_number(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", None)
    for folder in (tmp_path, tmp_path / "none"):
        meter = EnergyMeter(folder, gpus=False)
        meter.start()
        assert meter.joules() is None
        assert meter.how == NOT_MEASURED


def test_a_counter_that_disappears(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    meter = EnergyMeter(tmp_path, gpus=False)
    meter.start()
    (package / "energy_uj").unlink()
    assert meter.joules() is None


def test_not_started(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    assert EnergyMeter(tmp_path, gpus=False).joules() is None


def test_this_machine() -> None:
    meter = EnergyMeter()
    meter.start()
    joules = meter.joules()
    assert (joules is None) == (meter.how == NOT_MEASURED)
    assert joules is None or joules >= 0
