"""The table of faults names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "faults.md"


def test_each_fault_has_its_tests() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if re.match(r"\| *[0-9]* *\| (?!fault)", line)]
    numbers = [int(number) for row in rows if (number := row.split("|")[1].strip())]
    assert numbers == list(range(1, 26))
    for row in rows:
        named = re.findall(r"`([a-z0-9_/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            there = {
                node.name
                for node in ast.walk(ast.parse((TESTS / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert name in there, f"{file} has no {name}"
