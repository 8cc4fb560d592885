"""What can be said of a task without running it: read off the file's text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec

from verbund.errors import Problem
from verbund.job import Job

HUGGING_FACE = "hf:"
FUNCTIONS = (
    "model",
    "inputs",
    "targets",
    "loss",
    "metrics",
    "augment",
    "dataset",
    "validation_dataset",
    "tensor_plan",
    "pipeline_plan",
    "rows",
)


def check(job: Job) -> list[Problem]:
    """What can be said of the task without importing it."""
    if job.task.startswith(HUGGING_FACE):
        from verbund.interop import huggingface

        return huggingface.check(job)
    if job.task.startswith("keras:"):
        return [Problem("task", f"`{job.task}` is not available in this version", "Name a Python file with `model()`")]
    path = job.path(job.task)
    if not path.is_file():
        return [Problem("task", f"no such file: {path}", "The path is relative to the job file")]
    try:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    except SyntaxError as error:
        return [Problem(f"{path}, line {error.lineno}", f"syntax error: {error.msg}")]
    except (OSError, ValueError) as error:
        return [Problem(str(path), f"cannot be read: {error}")]
    return []


def needs_transformers(job: Job) -> bool:
    """Whether the task's model is one of the package transformers, as far as the text tells."""
    if find_spec("transformers") is None:
        return False
    if job.task.startswith(HUGGING_FACE):
        return True
    try:
        tree = ast.parse(job.path(job.task).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    return any(name.split(".")[0] == "transformers" for name in imported)


def functions(job: Job) -> frozenset[str]:
    """Which of `FUNCTIONS` the task file has, read off its text without running it; all where it imports `*`."""
    if job.task.startswith(HUGGING_FACE):
        return frozenset(("model",))
    try:
        tree = ast.parse(job.path(job.task).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    names = set(_bound(tree))
    return frozenset(FUNCTIONS) if "*" in names else frozenset(name for name in FUNCTIONS if name in names)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that running a module binds; what its functions and classes bind inside is not among them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.alias):
            yield child.asname or child.name
        elif not isinstance(child, (ast.AsyncFunctionDef, ast.Lambda)):
            yield from _bound(child)
