"""What is wrong with a job, in the words of the job file: which key, what it must be, what it is."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from verbund.errors import Problem, nearest

Section = type[BaseModel]

# What other libraries call a key, or a choice.
_SYNONYMS = {
    "batch_size": "train.global_batch",
    "batch": "train.global_batch",
    "learning_rate": "train.optimizer.lr",
    "max_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "loss": "train.objective",
    "lr_scheduler": "train.schedule",
    "scheduler": "train.schedule",
    "early_stopping": "train.patience",
    "grad_clip": "train.clip_norm",
    "gradient_clip_val": "train.clip_norm",
    "accumulate_grad_batches": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_batch",
    "num_workers": "data.loaders",
    "workers": "strategy.mesh",
    "validation_split": "data.validation_fraction",
    "inputs": "data.input",
    "label": "data.target",
    "metrics": "validate.metrics",
}
_CHOICE_SYNONYMS = {
    "mse": "mean_squared_error",
    "mse_loss": "mean_squared_error",
    "l2": "mean_squared_error",
    "regression": "mean_squared_error",
    "ce": "cross_entropy",
    "nll": "cross_entropy",
    "bce": "binary_cross_entropy",
    "lm": "next_token",
    "causal_lm": "next_token",
    "float32": "fp32",
    "32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "ps": "parameter_server",
    "server": "parameter_server",
    "sync": "bulk_synchronous",
    "bsp": "bulk_synchronous",
    "synchronous": "bulk_synchronous",
    "async": "asynchronous",
    "asp": "asynchronous",
    "hogwild": "asynchronous",
    "stale": "bounded_staleness",
    "ssp": "bounded_staleness",
    "bounded": "bounded_staleness",
    "stale_synchronous": "bounded_staleness",
}
_SHOWN = 60


@dataclass(frozen=True)
class _Place:
    """Where an error is: its key, what may stand there, and the section around it."""

    key: tuple[str, ...]
    known: bool
    """Whether there is such a key."""
    whole: bool
    """Whether the error is the key's own and not that of a part of its value."""
    field: FieldInfo | None
    around: Section


def problems(error: ValidationError, job: Section, document: Mapping[str, Any]) -> list[tuple[str, Problem]]:
    """The error as dotted keys and problems, one a key; `where` of a problem is its key.

    Args:
        error: what `job.model_validate(document)` raised.
        job: the outermost section.
        document: what was checked.
    """
    found: dict[str, list[Problem]] = {}
    for item in error.errors(include_url=False):
        place = _place(job, item["loc"])
        key = ".".join(place.key)
        if key in found:  # a union reports each of its members
            continue
        if item["type"] == "value_error":
            found[key] = [Problem(key, line) for line in str(item["ctx"]["error"]).splitlines()]
        elif not place.known:
            found[key] = [Problem(key, "unknown key", _hint(job, place))]
        elif place.field is None:
            found[key] = [Problem(key, "must be a job: a table of keys")]
        elif item["type"] == "missing" and place.whole:
            found[key] = [Problem(key, f"is missing; it is {must_be(place.field)}")]
        else:
            value = _value(document, place.key)
            fix = _meant(place.field.annotation, value)
            found[key] = [Problem(key, f"must be {must_be(place.field)}, but is {shown(value)}", fix)]
    return [(key, problem) for key, each in found.items() for problem in each]


def section_at(job: Section, path: list[str]) -> Section | None:
    """The section that a dotted key names; None if it names none."""
    section: Section | None = job
    for part in path:
        field = _fields(section).get(part) if section is not None else None
        section = _section(field.annotation) if field is not None else None
    return section


def shown(value: Any) -> str:
    """A value as the job file would have it, cut where it is long."""
    text = as_toml(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


# -- where --------------------------------------------------------------------------------------------------------


def _place(job: Section, location: tuple[int | str, ...]) -> _Place:
    around, key, field = job, [], None
    section: Section | None = job
    rest = list(location)
    while rest and section is not None:
        name = str(rest.pop(0))
        key.append(name)
        around, field = section, _fields(section).get(name)
        if field is None:
            return _Place(tuple(key), False, not rest, None, around)
        section = _section(field.annotation)
        if section is None and rest and isinstance(rest[0], int):
            section = _item(field.annotation)
            if section is not None:
                key.append(str(rest.pop(0)))
    return _Place(tuple(key), True, not rest, field, around)


def _fields(section: Section) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items() if not field.exclude}


def _members(annotation: Any) -> list[Any]:
    """The types of a union, None left out; else the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) if part is not type(None) for member in _members(part)]
    return [annotation]


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _section(annotation: Any) -> Section | None:
    return next((part for part in map(_bare, _members(annotation)) if _is_section(part)), None)


def _item(annotation: Any) -> Section | None:
    for part in map(_bare, _members(annotation)):
        if get_origin(part) is list and _is_section(get_args(part)[0]):
            item: Section = get_args(part)[0]
            return item
    return None


def _value(document: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        if isinstance(document, Mapping) and part in document:
            document = document[part]
        elif isinstance(document, list) and part.isdigit() and int(part) < len(document):
            document = document[int(part)]
        else:
            break  # a bare value that stands for a table
    return document


# -- what was meant -----------------------------------------------------------------------------------------------


def _keys(section: Section, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in _fields(section).items():
        yield (*before, name)
        if (inner := _section(field.annotation)) is not None:
            yield from _keys(inner, (*before, name))


def _hint(job: Section, place: _Place) -> str:
    """The nearest key of this section, else where a key of that name is."""
    name = place.key[-1]
    fields = list(_fields(place.around))
    if (synonym := _SYNONYMS.get(name)) is not None and not get_close_matches(name, fields, cutoff=0.8):
        return _did_you_mean([synonym])
    if elsewhere := [key for key in _keys(job) if key[-1] == name]:
        highest = min(map(len, elsewhere))
        return _did_you_mean([".".join(key) for key in elsewhere if len(key) == highest])
    return nearest(name, fields)


def _meant(annotation: Any, value: Any) -> str | None:
    """For a misspelt choice: the one that was meant."""
    choices = [
        c for part in _members(annotation) if get_origin(part) is Literal for c in get_args(part) if isinstance(c, str)
    ]
    if not isinstance(value, str):
        return None
    synonym = _CHOICE_SYNONYMS.get(value.lower(), value)
    close = get_close_matches(synonym, choices, n=1)
    return _did_you_mean(close) if close else None


def _did_you_mean(words: list[str]) -> str:
    return f"Did you mean {' or '.join(f'`{word}`' for word in words)}?"


# -- what it must be ----------------------------------------------------------------------------------------------


def must_be(field: FieldInfo) -> str:
    """What may stand there, e.g. `a whole number greater than 0`, with an example if the field has one."""
    members = _members(field.annotation)
    words = [_kind(member, field.metadata if len(members) == 1 else []) for member in members]
    section = _section(field.annotation)
    if section is not None and (short := getattr(section, "shorthand", None)) is not None:
        words.insert(0, must_be(_fields(section)[short]))
    text = " or ".join(dict.fromkeys(words))
    return f"{text}, e.g. `{as_toml(field.examples[0])}`" if field.examples else text


def _kind(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [bound for part in more for bound in (part.metadata if isinstance(part, FieldInfo) else [part])]
    inner = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Literal:
            listed = [as_toml(choice) for choice in inner]
            return f"{', '.join(listed[:-1])} or {listed[-1]}" if len(listed) > 1 else listed[0]
        case origin if origin is list:
            return f"a list of {_plural(inner[0])}"
        case origin if origin is tuple:
            return f"a list of {len(inner)} {_plural(inner[0])}"
        case origin if origin is dict:
            return f"a table of {_plural(inner[1])}"
    if _is_section(annotation):
        return "a table of keys"
    return _NAMES.get(annotation, "another value") + _bounds(metadata)


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def _plural(annotation: Any) -> str:
    kind = _bare(annotation)
    if _is_section(kind):
        return "tables"
    return _PLURALS.get(kind, "values") + (_kind(annotation, []).removeprefix(_NAMES[kind]) if kind in _NAMES else "")


def _bounds(metadata: list[Any]) -> str:
    bound = {name: getattr(m, name) for m in metadata for name in ("gt", "ge", "lt", "le") if hasattr(m, name)}
    low = f"greater than {bound['gt']:g}" if "gt" in bound else f"at least {bound['ge']:g}" if "ge" in bound else ""
    high = f"less than {bound['lt']:g}" if "lt" in bound else f"at most {bound['le']:g}" if "le" in bound else ""
    return "".join(f" {part}" for part in (" and ".join(filter(None, (low, high))),) if part)


def as_toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
        case Mapping():
            pairs = ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
        case None:
            return "nothing"
    return str(value)
