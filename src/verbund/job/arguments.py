"""Settings, strategies and clusters as a command line gives them."""

from __future__ import annotations

import tomllib
from typing import Any

from verbund.errors import InputError, nearest
from verbund.job.strategy import AXES, Strategy


def parse_value(text: str) -> Any:
    """The value of `--set KEY=VALUE`: a TOML value, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """`["train.steps=100"]` as `{"train.steps": 100}`.

    Raises:
        InputError: if one has no `=`.
    """
    changes = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(f"`{setting}` is no setting", where="--set", fix="Write KEY=VALUE, e.g. train.steps=100")
        changes[key.strip()] = parse_value(text.strip())
    return changes


def parse_strategy(text: str) -> dict[str, Any]:
    """`data=2,islands=3,exchange=diloco,exchange.every=50` as changes of the strategy. It says the whole division:
    axes and islands that are not named become 1, an exchange that is not named `all_reduce`.

    Raises:
        InputError: on a word that is neither an axis nor a key of the strategy.
    """
    changes: dict[str, Any] = {"strategy.mesh": {}, "strategy.islands": 1, "strategy.exchange": "all_reduce"}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise InputError(f"`{word}` is not NAME=VALUE", where="--strategy", fix="E.g. data=2")
        if key in AXES:
            if not value.lstrip("-").isdigit():
                raise InputError(f"axis `{key}` has size `{value}`", where="--strategy", fix="Give a whole number")
            changes["strategy.mesh"][key] = int(value)
        elif key.partition(".")[0] in Strategy.model_fields:
            changes[f"strategy.{key}"] = parse_value(value)
        else:
            known = [*AXES, *(k for k in Strategy.model_fields if k != "mesh")]
            raise InputError(f"`{key}` is no axis or key of a strategy", where="--strategy", fix=nearest(key, known))
    return changes


def parse_cluster(text: str) -> dict[str, Any]:
    """`KIND` or `KIND=WHAT` as changes of the cluster: `hosts=10.0.0.1,10.0.0.2`, which take even shares;
    `external=10.0.0.1:29170`, where the command listens; `ray=10.0.0.1:6379`, the Ray cluster.

    Raises:
        InputError: on names that belong to no kind.
    """
    kind, equals, names = (part.strip() for part in text.partition("="))
    changes: dict[str, Any] = {"cluster.kind": kind}
    if not equals:
        return changes
    hosts = [name.strip() for name in names.split(",") if name.strip()]
    match kind:
        case "hosts" if hosts:
            return changes | {"cluster.hosts": hosts, "cluster.slots": None}
        case "external" if names:
            return changes | {"cluster.listen": names}
        case "ray" if names:
            return changes | {"cluster.address": names}
    fix = "E.g. local, hosts, hosts=NAME,NAME, external, external=HOST:PORT, ray or ray=HOST:PORT"
    raise InputError(f"`{text}` is no cluster", where="--cluster", fix=fix)
