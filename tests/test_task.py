"""What is known of a task file without running it."""

from __future__ import annotations

import pytest

from conftest import MLP, MakeJob
from verbund import task


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", set()),
        ("def inputs(batch):\n    return batch['x']\n", {"inputs"}),
        ("class Net:\n    def inputs(self):\n        loss = 1\n", set()),
        ("if True:\n    from math import sqrt as loss\n", {"loss"}),
        ("targets = lambda batch: batch['y']\n", {"targets"}),
        ("from math import *\n", set(task.FUNCTIONS) - {"model"}),
    ],
)
def test_functions_are_read_off_the_text(text: str, names: set[str], make_job: MakeJob) -> None:
    assert task.functions(make_job(MLP + text)) == {"model"} | names
