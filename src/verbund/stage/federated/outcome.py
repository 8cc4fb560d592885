"""What a federated run comes to: its summary and report, from the round journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbund.errors import Interrupted, VerbundError
from verbund.exchange.federated.audit import lines_of
from verbund.exchange.federated.round_journal import AUDIT
from verbund.job import Job
from verbund.plain_json import finite
from verbund.run import Run


def rounds_table(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a round that was aggregated.

    `round`, `attempt`, `cohort` (asked), `clients` (whose updates count), `weights` by client, `failed` (reason by
    client), `loss` (of local training), `metrics` (of the parameters that the round began from), `bytes` (of updates).
    """
    table: list[dict[str, Any]] = []
    row: dict[str, Any] = {}
    for line in lines:
        match line["event"]:
            case "round":
                row = {
                    "round": line["round"],
                    "attempt": line["attempt"],
                    "began": line["time"],
                    "cohort": line["cohort"],
                    "weights": {},
                    "failed": {},
                    "bytes": 0,
                }
            case "update":
                row["weights"][line["client"]] = line["weight"]
                row["bytes"] += line["bytes"]
            case "failed":
                row["failed"][line["client"]] = f"{line['state']}: {line['reason']}"
            case "unusable":
                row["weights"].pop(line["client"], None)
                row["failed"][line["client"]] = f"refused: {line['reason']}"
            case "closed":
                row["clients"] = line["clients"]
            case "stepped":
                row |= {"ended": line["time"], "loss": line["loss"], "metrics": line["metrics"]}
                row["clients"] = [name for name in row["clients"] if name in row["weights"]]
                table.append(row)
    return table


def participation(table: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By client: rounds in which it was asked, in which its update counted, and in which it failed."""
    found: dict[str, dict[str, int]] = {}
    for row in table:
        for name in row["cohort"]:
            counts = found.setdefault(name, {"asked": 0, "counted": 0, "failed": 0})
            counts["asked"] += 1
            counts["counted"] += name in row["clients"]
            counts["failed"] += name in row["failed"]
    return found


def summary_of(
    run: Run, job: Job, clients: Mapping[str, Any], error: VerbundError | None, seconds: float
) -> dict[str, Any]:
    """The fields of `summary.json`."""
    lines = lines_of(run.path / "federated" / AUDIT)
    table = rounds_table(lines)
    curves: dict[str, list[list[float]]] = {}
    for row in table:
        for name, value in row["metrics"].items():
            if isinstance(value, (int, float)):
                curves.setdefault(name, []).append([row["round"] - 1, value])
    for line in lines:
        if line["event"] == "evaluated":
            for name, value in line["metrics"].items():
                if isinstance(value, (int, float)):
                    curves.setdefault(name, []).append([line["version"], value])
    from verbund.observe.directions import best

    losses = [[row["round"] - 1, row["loss"]] for row in table if row["loss"] is not None]
    status = "done" if error is None else "interrupted" if isinstance(error, Interrupted) else "failed"
    summary = {
        "status": status,
        "run": str(run.path.resolve()),
        "cause": error.record() if error else None,
        "strategy": job.strategy.model_dump(),
        "world": len({name for row in table for name in row["cohort"]}),
        "steps": len(table),
        "samples": None,
        "loss": {"first": losses[0][1], "last": losses[-1][1], "curve": losses} if losses else None,
        "metrics": {
            name: {"last": curve[-1][1], "best": best(name, [v for _, v in curve]), "curve": curve}
            for name, curve in curves.items()
        },
        "seconds": {"total": round(seconds, 3)},
        "bytes": {
            "received": sum(client.received for client in clients.values()),
            "sent": sum(client.sent for client in clients.values()),
            "updates": sum(row["bytes"] for row in table),
        },
        "rounds": table,
        "participation": participation(table),
        "attempt": run.attempt,
    }
    clean: dict[str, Any] = finite(summary)
    return clean


def close_run(run: Run, job: Job, clients: Mapping[str, Any], error: VerbundError | None, seconds: float) -> Run:
    """Writes the summary; raises what ended the run, if it did not come to its end."""
    try:
        run.write_summary(summary_of(run, job, clients, error, seconds))
    except VerbundError as another:
        error = error or another
    if error is not None:
        error.run = run.path
        raise error
    return run
