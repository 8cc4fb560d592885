"""The command line: parse, call, print."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from verbund.errors import InputError, VerbundError
from verbund.job import Job, parse_changes, parse_strategy

app = typer.Typer(
    name="verbund",
    help="Every stage of a PyTorch model's life, distributed by one section of a job file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (TOML).")]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, e.g. runs/latest.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job; may be repeated."),
]
Workers = Annotated[int | None, typer.Option("--workers", metavar="N", help="Number of workers: mesh axis `data`.")]
StrategyText = Annotated[
    str | None,
    typer.Option("--strategy", metavar="TEXT", help="Axes and exchange, e.g. data=2,exchange=all_reduce."),
]
ClusterKind = Annotated[str | None, typer.Option("--cluster", metavar="KIND", help="Where processes run: local.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="The checkpoint; default: the newest.")]


@app.command(epilog="Example: `verbund init digits && verbund train digits/job.toml --workers 2`")
def init(name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")]) -> None:
    """Write a job file and a task file to start from."""
    from verbund.stage.scaffold import scaffold

    for path in scaffold(name):
        print(path)  # noqa: T201
    _say(f"Train it: verbund train {name}/job.toml --workers 2")


@app.command(
    epilog="Examples: `verbund train job.toml` · `verbund train job.toml --workers 2 --set train.epochs=10` · "
    "`verbund train job.toml --json > summary.json`"
)
def train(
    job: JobFile,
    settings: Settings = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    cluster: ClusterKind = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="The run's directory; default: a new one in runs/."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a job; ends with a summary and a report."""
    from verbund.stage import launch

    whole = Job.read(job, _changes(settings, workers, strategy, cluster))
    _finished(launch.train(whole, run, quiet=quiet), as_json)


@app.command(
    epilog="Examples: `verbund resume runs/latest` · `verbund resume runs/latest --workers 4 --set train.epochs=20`"
)
def resume(
    run: RunDirectory,
    settings: Settings = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue a run from its newest checkpoint, with the same or another number of workers."""
    from verbund.stage import launch

    _finished(launch.resume(run, _changes(settings, workers, strategy, None), quiet=quiet), as_json)


@app.command(epilog="Example: `verbund validate runs/latest --workers 2`")
def validate(
    run: RunDirectory,
    data: Annotated[str | None, typer.Option("--data", metavar="SOURCE", help="Another source of samples.")] = None,
    workers: Workers = None,
    step: Step = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The metrics of a run's checkpoint: the same, bit for bit, for any number of workers."""
    from verbund.stage import launch

    result = launch.validate(run, data=data, workers=workers, step=step, quiet=quiet)
    if as_json:
        _print_json(result)
        return
    print(f"step {result['step']}, {result['samples']} samples, {result['world']} workers")  # noqa: T201
    for name, value in result["metrics"].items():
        print(f"{name}: {value}")  # noqa: T201


@app.command(epilog="Example: `verbund predict runs/latest new.parquet --out predictions.parquet --workers 2`")
def predict(
    run: RunDirectory,
    data: Annotated[str, typer.Argument(metavar="DATA", help="A source with the job's input columns.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Default: predictions.parquet in RUN.")
    ] = None,
    workers: Workers = None,
    step: Step = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the model's prediction for every sample, in order, as Parquet."""
    from verbund.stage import launch

    path = launch.predict(run, data, out, workers=workers, step=step, quiet=quiet)
    if as_json:
        _print_json({"predictions": str(path)})
    else:
        print(path)  # noqa: T201


@app.command(epilog="Examples: `verbund report runs/latest` · `verbund report runs/latest --trace trace.json`")
def report(
    run: RunDirectory,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Also write a Chrome trace for ui.perfetto.dev."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a run's report anew from its journal, also while the run goes on."""
    from verbund.stage import launch

    summary, path = launch.report(run, trace)
    if as_json:
        _print_json(summary)
    else:
        print(path)  # noqa: T201


@app.command(epilog="Examples: `verbund doctor` · `verbund doctor job.toml`")
def doctor(
    job: Annotated[Path | None, typer.Argument(metavar="[JOB]", help="Also check this job, as `train` would.")] = None,
    settings: Settings = None,
    workers: Workers = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check this machine, the installation and, if one is given, a job."""
    from verbund.stage import doctor as checks

    whole = Job.read(job, _changes(settings, workers, None, None)) if job else None
    findings = checks.examine(whole)
    if as_json:
        _print_json({"findings": [vars(finding) for finding in findings]})
    else:
        for finding in findings:
            print(f"{finding.verdict:<7} {finding.what}: {finding.found}")  # noqa: T201
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(InputError.exit_status)


@app.command(
    epilog="Examples: `verbund export runs/latest --out model` · `verbund export runs/latest --out model "
    "--format state-dict --step 200`"
)
def export(
    run: RunDirectory,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="A new or empty folder.")],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORM",
            help="hf: a Hugging Face folder; state-dict: model.pt for torch.load; safetensors: model.safetensors. "
            "Default: hf if the model is one of transformers, else safetensors.",
        ),
    ] = None,
    step: Step = None,
    ema: Annotated[bool, typer.Option("--ema", help="The moving average in place of the weights.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a run's model in a form that other programs read."""
    from verbund.stage import launch

    result = launch.export(run, out, form=form, step=step, ema=ema)
    if as_json:
        _print_json(result)
        return
    size = f"{result['tensors']} tensors, {result['bytes'] / 1e6:.1f} MB"
    print(f"{result['folder']}: {result['format']} of step {result['step']}, {size}")  # noqa: T201


def _changes(
    settings: list[str] | None, workers: int | None, strategy: str | None, cluster: str | None
) -> dict[str, Any]:
    changes = parse_changes(settings or [])
    if strategy is not None:
        changes |= parse_strategy(strategy)
    if workers is not None:
        if strategy is not None:
            raise InputError("--workers and --strategy both say how many", where="arguments", fix="Give one of them")
        changes["strategy.mesh"] = {"data": workers}
    if cluster is not None:
        changes["cluster.kind"] = cluster
    return changes


def _finished(run: Any, as_json: bool) -> None:
    if as_json:
        _print_json(run.summary)
        return
    for line in run.headline():
        print(line)  # noqa: T201


def _print_json(document: Any) -> None:
    json.dump(document, sys.stdout)
    sys.stdout.write("\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def main() -> NoReturn:
    """Runs the command; an error becomes one short paragraph and the exit status of its kind."""
    arguments = sys.argv[1:]
    try:
        app(arguments, standalone_mode=False)
    except VerbundError as error:
        _fail(error, arguments)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        _say("verbund: interrupted")
        sys.exit(130)
    except Exception as error:
        show = getattr(error, "show", None)  # an error of the command line's own parser
        if show is None:
            raise
        show()
        sys.exit(InputError.exit_status)
    sys.exit(0)


def _fail(error: VerbundError, arguments: list[str]) -> NoReturn:
    if "--debug" in arguments:
        _say(error.trace or "".join(traceback.format_exception(error)))
    _say(f"verbund: {error}")
    if "--json" in arguments and error.run is not None:
        # The summary of a failed run says more than the error: which step, since when, at whom.
        print((error.run / "summary.json").read_text(encoding="utf-8"))  # noqa: T201
    sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
