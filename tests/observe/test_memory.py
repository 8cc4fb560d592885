"""The peak of this process's memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from verbund.observe import memory

CODE = """
from verbund.observe.memory import peak_bytes, reset_peak
before = peak_bytes()
block = b"x" * (64 << 20)
grown = peak_bytes()
del block
kept = peak_bytes()
print(before, grown, kept, reset_peak(), peak_bytes())
"""


def test_peak_grows_by_what_is_touched_and_stays() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, grown, kept, permitted, after = done.stdout.split()
    assert int(grown) - int(before) >= 60 << 20
    assert abs(int(kept) - int(grown)) < 1 << 20  # the kernel adds its counters up per core, and now and then
    if permitted == "True":
        assert int(after) < int(kept) - (50 << 20)


def test_agrees_with_the_resource_limits_view() -> None:
    from verbund.observe.memory import peak_bytes

    kernel = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert 0.5 * kernel <= peak_bytes() <= 1.5 * kernel


def test_the_narrowest_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit may be that of a group around this process's own; what the kernel could give back is free."""
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/outer/inner\n")
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    everything = memory.available_bytes()
    for folder, limit in ((inner, "max"), (inner.parent, "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 50\n")
    assert everything is None or everything > 1000
    assert memory.available_bytes() == 350
