"""YAML of plain values, in blocks; strings are quoted as JSON quotes them, which YAML reads alike."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}  # what some readers take for something else


def text(value: Mapping[str, Any]) -> str:
    """One document."""
    return "".join(f"{line}\n" for line in _mapping(value))


def _mapping(value: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, inner in value.items():
        if isinstance(inner, str) and "\n" in inner:
            lines += [f"{_scalar(key)}: |", *_block(inner)]
        elif isinstance(inner, Mapping) and inner:
            lines += [f"{_scalar(key)}:", *(f"  {line}" for line in _mapping(inner))]
        elif isinstance(inner, Sequence) and not isinstance(inner, str) and inner:
            lines += [f"{_scalar(key)}:", *(f"  {line}" for line in _sequence(inner))]
        else:
            lines.append(f"{_scalar(key)}: {_scalar(inner)}")
    return lines


def _sequence(value: Sequence[Any]) -> list[str]:
    lines: list[str] = []
    for inner in value:
        if isinstance(inner, Mapping) and inner:
            first, *rest = _mapping(inner)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        elif isinstance(inner, str) and "\n" in inner:
            lines += ["- |", *_block(inner)]
        else:
            lines.append(f"- {_scalar(inner)}")
    return lines


def _block(text: str) -> list[str]:
    """The lines of a text that begins with no blank and ends with one line break."""
    return [f"  {line}".rstrip() for line in text.removesuffix("\n").split("\n")]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
