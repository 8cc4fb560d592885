"""JSON that people can read: an object's keys on lines of their own, a list's values side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_WIDTH = 120


def text(value: Any) -> str:
    """`value` as a JSON document that ends in a newline. Numbers that JSON has none of are null."""
    return _laid_out(finite(value), "") + "\n"


def finite(value: Any) -> Any:
    """The value with NaN and infinities as None: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _laid_out(value: Any, indent: str) -> str:
    if not isinstance(value, (dict, list)) or not value:
        return json.dumps(value)
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(str(key))}: {_laid_out(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"
    if any(isinstance(part, dict) for part in value):
        return "[\n" + ",\n".join(inner + _laid_out(part, inner) for part in value) + f"\n{indent}]"
    parts = [json.dumps(part) for part in value]
    if len(indent) + sum(len(part) + 2 for part in parts) <= _WIDTH:
        return f"[{', '.join(parts)}]"
    return "[\n" + "\n".join(inner + line for line in _filled(parts, _WIDTH - len(inner))) + f"\n{indent}]"


def _filled(parts: list[str], width: int) -> list[str]:
    """The parts with commas between them, as many to a line as fit."""
    lines: list[str] = []
    for number, part in enumerate(parts):
        word = part if number == len(parts) - 1 else f"{part},"
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
