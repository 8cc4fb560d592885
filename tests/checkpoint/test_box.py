"""Boxes against counting every element."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verbund.checkpoint.box import Box, uncovered

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset, length = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offset.append(start)
        length.append(draw(st.integers(0, size - start)))
    return Box(tuple(offset), tuple(length))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    # Every grid cell, and then perhaps some more or fewer: covers of all kinds, exact ones often.
    cuts = [sorted(draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=2)) | {0}) for size in shape]
    cells = []
    for corner in itertools.product(*(range(len(c)) for c in cuts)):
        offset = tuple(cuts[d][i] for d, i in enumerate(corner))
        ends = [(*cuts[d], shape[d])[i + 1] for d, i in enumerate(corner)]
        cells.append(Box(offset, tuple(max(end - start, 0) for start, end in zip(offset, ends, strict=True))))
    cells = [cell for cell in cells if cell.inside(shape)]
    if draw(st.booleans()):
        cells += draw(st.lists(boxes_of(shape), max_size=2))
    if cells and draw(st.booleans()):
        cells.pop(draw(st.integers(0, len(cells) - 1)))
    return shape, draw(st.permutations(cells))


@settings(max_examples=150, deadline=None)
@given(shape_and_boxes())
def test_cover_is_what_counting_says(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.within(Box.whole(shape))] += 1
    exact = bool((count == 1).all()) and bool(boxes)
    assert (uncovered(shape, boxes) is None) == exact


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overlap_is_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    marks = [np.zeros(shape, bool) for _ in range(3)]
    marks[0][a.within(Box.whole(shape))] = True
    marks[1][b.within(Box.whole(shape))] = True
    common = a.overlap(b)
    if common is not None:
        marks[2][common.within(Box.whole(shape))] = True
    assert np.array_equal(marks[0] & marks[1], marks[2])


def test_a_box_outside_is_named() -> None:
    assert "outside" in str(uncovered((4,), [Box((0,), (2,)), Box((2,), (3,))]))
    assert "twice" in str(uncovered((4,), [Box((0,), (3,)), Box((2,), (2,))]))
    assert "only 3 of its 4" in str(uncovered((4,), [Box((0,), (3,))]))
    assert "2 times" in str(uncovered((), [Box((), ()), Box((), ())]))
    assert uncovered((0, 3), [Box((0, 0), (0, 3))]) is None
    assert "nobody" in str(uncovered((0, 3), []))
