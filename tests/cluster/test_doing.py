"""What processes say that they do is read in sentences: `worker 1 was killed by SIGKILL while computing`."""

from __future__ import annotations

import ast
from pathlib import Path

import verbund
from verbund.cluster.supervisor import MEETING
from verbund.cluster.watched import ADDING_UP


def said() -> list[tuple[str, str]]:
    """File and text of all that is said by a literal, as an argument of `doing`."""
    found = []
    for file in Path(verbund.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "doing":
                said = call.args[0]
                texts = (said.body, said.orelse) if isinstance(said, ast.IfExp) else (said,)
                literals = [text.value for text in texts if isinstance(text, ast.Constant)]
                found += [(file.name, text) for text in literals if isinstance(text, str)]
    return found


def test_what_is_done_can_be_said_after_while() -> None:
    texts = said()
    assert ("steps.py", "computing") in texts
    assert ("local_steps.py", "exchanging between islands") in texts
    wrong = [(file, text) for file, text in [*texts, ("", MEETING), ("", ADDING_UP)] if text.split()[0][-3:] != "ing"]
    assert not wrong
