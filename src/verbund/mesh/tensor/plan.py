"""The plan of tensor parallelism: which modules are cut, and how. From the task, from Hugging Face, or by detection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn import functional

from verbund.errors import InputError, nearest

KINDS = ("column", "row", "embedding", "gather", "sequence", "attention", "divide", "partial")
_KEYS = ("cut", "parts", "units", "gather", "scatter", "dim", "attributes")
_ELEMENTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.Mish,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Dropout,
    nn.Identity,
)
# What transformers calls the styles of its plans. Those that are not here (experts) cannot be cut yet.
_HF: dict[str, dict[str, Any]] = {
    "colwise": {"cut": "column"},
    "colwise_rep": {"cut": "column", "gather": True},
    "colwise_gather_output": {"cut": "column", "gather": True},
    "rowwise": {"cut": "row"},
    "embedding_rowwise": {"cut": "embedding"},
    "replicated_with_grad_allreduce": {"cut": "partial"},
}
# Attention and feed-forward layers of encoders that come without a plan: BERT and its kin.
_ENCODER: dict[str, dict[str, Any]] = {
    "attention.self.query": {"cut": "column"},
    "attention.self.key": {"cut": "column"},
    "attention.self.value": {"cut": "column"},
    "attention.output.dense": {"cut": "row"},
    "intermediate.dense": {"cut": "column"},
    "output.dense": {"cut": "row"},
}


@dataclass(frozen=True)
class Entry:
    """How one module is cut.

    Args:
        path: of the module.
        cut: `column` divides a Linear's outputs, `row` its inputs (the outputs are added up over the workers),
            `embedding` the rows of a table; `attention` the heads of an nn.MultiheadAttention; `sequence` marks a
            module that works on a share of the sequence, `gather` one whose first input is a share and is gathered for
            all columns inside; `partial` one that all hold whole and that works on divided
            activations; `divide` the whole numbers in `attributes`.
        parts: into how many equal parts the outputs fall that are each divided for themselves (3: query, key and
            value), or the parts' sizes.
        units: what is never divided, e.g. heads.
        gather: column: every worker gets all outputs.
        scatter: row and embedding: the sum is left divided along the sequence; column: the input is.
        dim: the dimension of the sequence.
        attributes: names.
    """

    path: str
    cut: str
    parts: int | tuple[int, ...] = 1
    units: int | None = None
    gather: bool = False
    scatter: bool = False
    dim: int = 1
    attributes: tuple[str, ...] = ()


def plan(model: nn.Module, given: Mapping[str, Any] | None) -> list[Entry]:
    """The plan of a model.

    Args:
        model: on any device.
        given: what the task's `tensor_plan()` returned: glob patterns of module paths to a kind, or to a dict of the
            fields of `Entry`.

    Raises:
        InputError: if the plan does not fit the model, or nothing can be cut.
    """
    entries = list(_given(model, given)) if given is not None else list(_found(model))
    if not any(entry.cut in ("column", "row", "embedding", "attention") for entry in entries):
        raise InputError(
            "no layer of this model is known to be divisible by the axis `tensor`",
            where="strategy.mesh.tensor",
            fix="Give `tensor_plan()` in the task file: {module path: 'column', 'row' or 'embedding'}, or use the axis "
            "`shard`",
        )
    return entries


def _given(model: nn.Module, given: Mapping[str, Any]) -> Iterator[Entry]:
    modules = dict(model.named_modules())
    for pattern, value in given.items():
        spec = {"cut": value} if isinstance(value, str) else dict(value)
        if str(spec.get("cut", "")).endswith("+gather"):
            spec = {**spec, "cut": spec["cut"].removesuffix("+gather"), "gather": True}
        _check(pattern, spec)
        matching = [path for path in modules if fnmatchcase(path, pattern)]
        if not matching:
            raise InputError(
                f"`{pattern}` matches no module", where="tensor_plan()", fix=nearest(pattern, [p for p in modules if p])
            )
        for path in matching:
            yield _entry(path, spec)


def _check(pattern: str, spec: dict[str, Any]) -> None:
    for key in spec:
        if key not in _KEYS:
            raise InputError(f"`{key}` of `{pattern}` is not known", where="tensor_plan()", fix=nearest(key, _KEYS))
    if spec.get("cut") not in KINDS:
        text = str(spec.get("cut"))
        raise InputError(
            f"`{pattern}` is to be cut by `{text}`",
            where="tensor_plan()",
            fix=f"{nearest(text, KINDS)} Known are {', '.join(KINDS)}",
        )


def _entry(path: str, spec: dict[str, Any]) -> Entry:
    parts = spec.get("parts", 1)
    return Entry(
        path,
        spec["cut"],
        tuple(parts) if isinstance(parts, (list, tuple)) else int(parts),
        spec.get("units"),
        bool(spec.get("gather", False)),
        bool(spec.get("scatter", False)),
        int(spec.get("dim", 1)),
        tuple(spec.get("attributes", ())),
    )


def _found(model: nn.Module) -> Iterator[Entry]:
    if (hf := _hugging_face(model)) is not None:
        yield from hf
        return
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            yield Entry(path, "attention", units=module.num_heads)
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            if module.activation in (functional.relu, functional.gelu) or isinstance(module.activation, _ELEMENTWISE):
                yield Entry(f"{prefix}linear1", "column")
                yield Entry(f"{prefix}linear2", "row")
        elif isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            yield from _sequential(prefix, module)


def _sequential(prefix: str, module: nn.Sequential) -> Iterator[Entry]:
    """Linear layers with nothing but element-wise ones in between, by twos: the first by its outputs, the second by
    its inputs, so that only the second one's outputs are exchanged."""
    waiting: str | None = None
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) is nn.Linear:
            if waiting is None:
                waiting = path
            else:
                yield Entry(waiting, "column")
                yield Entry(path, "row")
                waiting = None
        elif not isinstance(child, _ELEMENTWISE):
            waiting = None


def _hugging_face(model: Any) -> list[Entry] | None:
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        return None
    styles = {**(getattr(model, "_tp_plan", None) or {})}
    if not styles:
        return _by_suffix(model, config, {f"*.{suffix}": spec for suffix, spec in _ENCODER.items()})
    specs: dict[str, dict[str, Any]] = {}
    for pattern, style in styles.items():
        if style in _HF:
            specs[pattern] = _HF[style]
            specs[f"*.{pattern}"] = _HF[style]
        elif style not in ("replicated", "sequence_parallel", "gather", "local"):
            raise InputError(
                f"the plan of {type(model).__name__} cuts `{pattern}` by `{style}`, which is not available",
                where="strategy.mesh.tensor",
                fix="Give `tensor_plan()` in the task file, or use the axes `shard` and `pipeline`",
            )
    entries = _by_suffix(model, config, specs)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    known = {entry.path for entry in entries}
    for path, module in model.named_modules():
        if module is embedding and path not in known and type(module) is nn.Embedding:
            entries.append(Entry(path, "embedding"))
        elif module is head and path not in known and isinstance(module, nn.Linear):
            entries.append(Entry(path, "column", gather=True))
    return entries


def _by_suffix(model: nn.Module, config: Any, specs: dict[str, dict[str, Any]]) -> list[Entry]:
    """Entries of the modules that a pattern matches; projections of attention are cut by whole groups of heads."""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    entries = []
    for path, module in model.named_modules():
        spec = next((spec for pattern, spec in specs.items() if fnmatchcase(path, pattern)), None)
        if spec is None:
            continue
        if spec["cut"] in ("column", "row") and not isinstance(module, nn.Linear):
            continue
        of_attention = "attn" in path or "attention" in path
        entries.append(_entry(path, {**spec, "units": groups if of_attention and spec["cut"] != "partial" else None}))
    return entries
