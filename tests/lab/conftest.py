from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two hosts whose links are as fast as memory."""
    with Lab(hosts=2) as lab:
        yield lab
