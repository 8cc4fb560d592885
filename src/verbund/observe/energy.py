"""Energy from the machine's own counters: RAPL for processors, NVML for NVIDIA GPUs. No torch.

Counters belong to the machine: what else runs on it is counted too, and `how` says so. Where no counter can
be read, there is no number: nothing is estimated from a processor's name.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
NOT_MEASURED = "not measured (no readable counter)"


class EnergyMeter:
    """Joules since `start`. RAPL's counters wrap within minutes to hours under load: call `joules` now and
    then.

    Args:
        powercap: where the kernel shows RAPL's zones.
        gpus: also ask NVML, if its library is there.
    """

    def __init__(self, powercap: Path = _POWERCAP, *, gpus: bool = True) -> None:
        self._zones = _zones(powercap)
        self._nvml = _Nvml.load() if gpus else None
        self._last: dict[Path, int] = {}
        self._microjoules = 0
        self._gpu_start: list[int] | None = None
        self._started = 0.0
        self.seconds = 0.0
        """Seconds from `start` to the last `joules`."""

    @property
    def how(self) -> str:
        """Where the number comes from, in words."""
        parts = []
        if self._zones:
            parts.append("RAPL: the whole of " + ", ".join(name for name, *_ in self._zones.values()))
        if self._nvml is not None:
            parts.append(f"NVML: {len(self._nvml.devices)} GPU(s) whole")
        return "; ".join(parts) or NOT_MEASURED

    def start(self) -> None:
        """Counts from now on."""
        self._microjoules = 0
        self._last = {}
        for zone in list(self._zones):
            value = _number(zone / "energy_uj")
            if value is None:
                del self._zones[zone]
            else:
                self._last[zone] = value
        self._gpu_start = self._nvml.millijoules() if self._nvml else None
        if self._gpu_start is None:
            self._nvml = None
        self._started = time.monotonic()

    def joules(self) -> float | None:
        """Joules since `start`; None if nothing can be read or `start` was not called."""
        self.seconds = time.monotonic() - self._started
        total = 0.0
        for zone, before in self._last.items():
            value = _number(zone / "energy_uj")
            if value is None:
                return None
            _, limit = self._zones[zone]
            self._microjoules += value - before if value >= before else value + limit + 1 - before
            self._last[zone] = value
        total += self._microjoules / 1e6
        if self._nvml is not None and self._gpu_start is not None:
            now = self._nvml.millijoules()
            if now is None:
                return None
            total += sum(b - a for a, b in zip(self._gpu_start, now, strict=True)) / 1e3
        return total if self._last or self._nvml is not None else None


def _zones(powercap: Path) -> dict[Path, tuple[str, int]]:
    """Readable zones that do not contain one another (packages and DRAM): path to name and range."""
    found = {}
    try:
        paths = sorted(powercap.glob("*-rapl:*"))
    except OSError:
        return {}
    for path in paths:
        try:
            name = (path / "name").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        limit = _number(path / "max_energy_range_uj")
        top = path.name.count(":") == 1 and name.startswith("package")
        # `psys` contains the packages, `core` and `uncore` are contained in them: counting either is counting
        # twice. The memory-mapped interface (intel-rapl-mmio) shows the same packages a second time.
        if not (top or name == "dram") or limit is None or "mmio" in path.name:
            continue
        if _number(path / "energy_uj") is not None:
            found[path] = (name, limit)
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


class _Nvml:
    """The three calls of NVML that an energy counter takes."""

    def __init__(self, library: ctypes.CDLL, devices: list[ctypes.c_void_p]) -> None:
        self._library = library
        self.devices = devices

    @staticmethod
    def load() -> _Nvml | None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() != 0:
                return None
            count = ctypes.c_uint()
            if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
                return None
            devices = []
            for index in range(count.value):
                device = ctypes.c_void_p()
                if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                    return None
                devices.append(device)
        except (OSError, AttributeError):
            return None
        meter = _Nvml(library, devices)
        return meter if devices and meter.millijoules() is not None else None

    def millijoules(self) -> list[int] | None:
        """Per device since the driver was loaded; None if a device has no counter (before Volta)."""
        values = []
        for device in self.devices:
            value = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(value)) != 0:
                return None
            values.append(value.value)
        return values
