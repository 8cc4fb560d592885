"""`docs/job.md` says what `verbund/job/` says. `python tests/test_job_reference.py` writes it anew."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from verbund import job
from verbund.job.problems import as_toml, must_be

FILE = Path(__file__).parent.parent / "docs" / "job.md"
HEAD = """# Keys of the job file

A job is a TOML file; `--set KEY=VALUE` changes any of its keys, e.g. `--set train.optimizer.lr=0.01`. What a run was
made with, defaults and all, is in its `job.toml`.
"""


def reference() -> str:
    return HEAD + "".join(f"\n{part}" for part in sections(job.Job, ""))


def sections(section: type[BaseModel], path: str) -> Iterator[str]:
    """A table for the section's own keys, then those of the sections in it."""
    about = inspect.cleandoc(section.__doc__ or "") if path else ""
    said = docstrings(section)
    rows, inner = [], []
    for name, field in section.model_fields.items():
        if field.exclude:
            continue
        key = field.alias or name
        part = below(field)
        if part is not None:
            inner += list(sections(part, f"{path}.{key}" if path else key))
        if part is None or path:  # a section of the whole job is its heading
            rows.append(f"| `{key}` | {must_be(field)} | {default(field)} | {said.get(name, '')} |")
    head = f"## {f'`[{path}]`' if path else 'At the top'}\n" + (f"\n{about}\n" if about else "")
    yield head + "\n| key | value | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    yield from inner


def below(field: FieldInfo) -> type[BaseModel] | None:
    """The section that the field is, or a list of."""
    found: list[object] = [field.annotation]
    for part in found:
        found += getattr(part, "__args__", ())
    return next((p for p in found if isinstance(p, type) and issubclass(p, BaseModel)), None)


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.default
    if isinstance(value, BaseModel):
        short = getattr(value, "shorthand", None)
        return f"`{as_toml(getattr(value, short))}`" if short else ""
    return "" if value is None or value in ("", [], {}) else f"`{as_toml(value)}`"


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The text below each field."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            texts[field.target.id] = " ".join(ast.literal_eval(after.value).split()).replace("|", "\\|")
    return texts


def test_the_reference_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == reference(), "run `python tests/test_job_reference.py`"


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
