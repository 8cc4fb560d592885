"""Text and tables as HTML. All that comes from a run is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_CODE = re.compile(r"`([^`\n]+)`")


def prose(text: object) -> str:
    """Text with what stands in backticks as code."""
    return _CODE.sub(r"<code>\1</code>", escape(str(text)))


def bullets(lines: Iterable[object], kind: str = "") -> str:
    """A list of sentences, or nothing."""
    items = "".join(f"<li>{prose(line)}</li>" for line in lines)
    return f'<ul class="{escape(kind)}">{items}</ul>' if items else ""


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names the rows; cells are plain text."""
    columns = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def details(summary: str, inner: str) -> str:
    """What is shown when asked for. `inner` is HTML."""
    return f"<details><summary>{prose(summary)}</summary>{inner}</details>" if inner else ""


def section(title: str, inner: str) -> str:
    """A section of the page, or nothing if it is empty. `inner` is HTML."""
    if not inner:
        return ""
    name = re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{inner}</section>'
