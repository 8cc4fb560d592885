"""JSON for people: any JSON reader understands it, and no list takes a line for each number."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from verbund import plain_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_it_is_json(value: object) -> None:
    assert json.loads(plain_json.text(value)) == value


def test_what_json_has_not_is_null() -> None:
    assert json.loads(plain_json.text({"a": [math.nan, (1, -math.inf)]})) == {"a": [None, [1, None]]}


def test_a_curve_fills_lines() -> None:
    curve = [[step, 2.5 / (step + 1)] for step in range(2000)]
    lines = plain_json.text({"loss": {"curve": curve}}).splitlines()
    assert len(lines) < 800
    assert max(map(len, lines)) <= 120
    assert lines[3].strip().startswith("[0, 2.5], [1, 1.25], [2, 0.8333333333333334],")
