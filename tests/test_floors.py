"""A module imports only from its own floor or below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "verbund"

# From the ground up. A longer prefix wins.
FLOORS: list[tuple[str, ...]] = [
    ("errors", "interrupts", "plain_json", "job", "placement", "sums", "objectives", "metrics",
     "randomness", "tables"),
    ("task", "interop.huggingface", "interop.smollm2",
     "data", "comm", "checkpoint", "run", "observe.events", "observe.journal", "observe.network", "observe.memory",
     "observe.appended", "observe.energy", "observe.progress", "observe.directions", "observe.garbage"),
    ("cluster",),
    ("mesh", "exchange", "plan"),
    ("stage",),
    ("observe", "community", "interop"),
    ("cli", "commands", "answer", "__main__", "__init__"),
]  # fmt: skip

# What a stage shows when it has ended stands above it; it is imported where it is called.
LATE = {
    "stage.launch": {"observe.report", "observe.summary", "observe.trace"},
    "stage.attempt": {"observe.report", "observe.summary"},
    "stage.before": {"observe.tensorboard"},
    "stage.news": {"observe.tensorboard"},
    "stage.federated.outcome": {"observe.report", "observe.summary"},
}


def floor(module: str) -> int:
    best, level = "", -1
    for number, prefixes in enumerate(FLOORS):
        for prefix in prefixes:
            if (module == prefix or module.startswith(prefix + ".")) and len(prefix) > len(best):
                best, level = prefix, number
    assert level >= 0, f"{module} stands on no floor"
    return level


def name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> list[str]:
    """All of the package's modules that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inner = SOURCE.joinpath(*node.module.split(".")[1:], alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                found.append(f"{node.module}.{alias.name}" if is_module else node.module)
    return [module.removeprefix("verbund.") for module in found if module.startswith("verbund.")]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: name(path))
def test_imports_only_from_own_floor_or_below(path: Path) -> None:
    module = name(path)
    allowed = LATE.get(module, set())
    above = [other for other in imports(path) if other not in allowed and floor(other) > floor(module)]
    assert not above, f"{module} imports from above: {above}"


def test_supervising_side_does_not_import_torch() -> None:
    import subprocess
    import sys

    modules = "verbund.cli, verbund.stage.launch, verbund.stage.doctor, verbund.stage.verify, "
    modules += "verbund.stage.federated.serve, verbund.stage.federated.client"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
