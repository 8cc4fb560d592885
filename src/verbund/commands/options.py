"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from verbund.errors import InputError
from verbund.job import parse_changes, parse_cluster, parse_strategy


def whole_number(text: str) -> int:
    """A whole number of an argument."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"`{text}` is not a whole number") from None


JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (TOML).")]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, e.g. runs/latest.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job; may be repeated."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", parser=whole_number, help="Number of workers: mesh axis `data`."),
]
StrategyText = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="TEXT",
        help="How work is divided: data=2 · tensor=2,pipeline=2 · islands=4,exchange=diloco · "
        "islands=2,exchange=parameter_server · data=4,compression=int8; axes that are not named are 1.",
    ),
]
ClusterText = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="KIND",
        help="Where processes run: local · hosts or hosts=NAME,NAME · external or external=HOST:PORT, for machines "
        "that `verbund join` · ray or ray=HOST:PORT.",
    ),
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", parser=whole_number, help="The checkpoint; default: the newest."),
]
# What these three do is done in `main`, for errors too.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no closing lines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]


def changes_of(
    settings: list[str] | None, workers: int | None, strategy: str | None, cluster: str | None
) -> dict[str, Any]:
    """The keys of a job that arguments change."""
    changes = parse_changes(settings or [])
    if strategy is not None:
        changes |= parse_strategy(strategy)
    if workers is not None:
        if strategy is not None:
            raise InputError("--workers and --strategy both say how many", where="arguments", fix="Give one of them")
        changes["strategy.mesh"] = {"data": workers}
    if cluster is not None:
        changes |= parse_cluster(cluster)
    return changes
