"""The peak of this process's memory."""

from __future__ import annotations

import resource
import subprocess
import sys

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
