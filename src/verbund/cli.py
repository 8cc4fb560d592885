"""The command line: parse, call, answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from verbund.answer import Answer, Output
from verbund.commands import federate
from verbund.commands.launch import JOINS, join, launch
from verbund.commands.options import (
    AsJson,
    ClusterText,
    Debug,
    JobFile,
    Quiet,
    RunDirectory,
    Settings,
    Step,
    StrategyText,
    Workers,
    changes_of,
    whole_number,
)
from verbund.errors import InputError, Interrupted
from verbund.interrupts import Interrupt, Interrupts
from verbund.job import Job, parse_cluster, parse_strategy

if TYPE_CHECKING:
    from verbund.run import Run

app = typer.Typer(
    name="verbund",
    help="Every stage of a PyTorch model's life, distributed by one section of a job file.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from verbund import __version__

        print(f"verbund {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: `verbund init digits && verbund train digits/job.toml --workers 2`")
def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Write a job file and a task file to start from."""
    from verbund.stage.scaffold import scaffold

    files = [str(path) for path in scaffold(name)]
    train_it = f"Train it: verbund train {files[0]} --workers 2"
    return Answer({"status": "done", "files": files}, [*files, train_it])


@app.command(
    epilog="Examples: `verbund train job.toml` · `verbund train job.toml --workers 2 --set train.epochs=10` · "
    "`verbund train job.toml --json > summary.json`"
)
def train(
    job: JobFile,
    settings: Settings = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    cluster: ClusterText = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="The run's directory; default: a new one in runs/."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Train a job; ends with a summary and a report."""
    from verbund.stage import launch

    whole = Job.read(job, changes_of(settings, workers, strategy, cluster))
    return _trained(launch.train(whole, run, quiet=quiet))


@app.command(
    epilog="Examples: `verbund resume runs/latest` · `verbund resume runs/latest --workers 4 --set train.epochs=20` · "
    "`verbund resume runs/latest --strategy tensor=2`"
)
def resume(
    run: RunDirectory,
    settings: Settings = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    cluster: ClusterText = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Continue a run from its newest checkpoint, with the same or another number of workers."""
    from verbund.stage import launch

    return _trained(launch.resume(run, changes_of(settings, workers, strategy, cluster), quiet=quiet))


@app.command(epilog="Examples: `verbund scale runs/latest 2` · `verbund scale runs/latest 8 --json`")
def scale(
    run: RunDirectory,
    number: Annotated[
        int,
        typer.Argument(
            metavar="N",
            parser=whole_number,
            help="Workers from now on: up to `cluster.max_workers`, or those that the strategy names.",
        ),
    ],
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Change the number of workers of a run while another command trains it; the numbers stay the same."""
    from verbund.stage.scale import scale as change

    found = change(run, number)
    line = f"{_workers(found['workers'])} in place of {found['former']}, after {found['seconds']} s"
    return Answer({"status": "done", "run": str(run.resolve()), **found}, [line])


@app.command(
    epilog="Examples: `verbund validate runs/latest --workers 2` · `verbund validate runs/latest --cluster local`"
)
def validate(
    run: RunDirectory,
    data: Annotated[str | None, typer.Option("--data", metavar="SOURCE", help="Another source of samples.")] = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    cluster: ClusterText = None,
    step: Step = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """The metrics of a run's checkpoint: the same, bit for bit, for any number of workers."""
    from verbund.stage import launch

    found = launch.validate(run, data=data, **_evaluated_by(workers, strategy, cluster), step=step, quiet=quiet)
    metrics = [f"validation {name}: {value}" for name, value in found["metrics"].items()]
    return Answer(
        {"status": "done", "run": str(run.resolve()), **found},
        [f"step {found['step']}, {found['samples']} samples, {_workers(found['world'])}", *metrics],
        metrics,
    )


@app.command(epilog="Example: `verbund predict runs/latest new.parquet --out predictions.parquet --workers 2`")
def predict(
    run: RunDirectory,
    data: Annotated[str, typer.Argument(metavar="DATA", help="A source with the job's input columns.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Default: predictions.parquet in RUN.")
    ] = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    cluster: ClusterText = None,
    step: Step = None,
    live: Annotated[
        bool, typer.Option("--live", help="With what the run's parameter servers have now, while it is being trained.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Write the model's prediction for every sample, in order, as Parquet."""
    from verbund.stage import launch

    by = _evaluated_by(workers, strategy, cluster)
    found = launch.predicted(run, data, out, **by, step=step, live=live, quiet=quiet)
    told: dict[str, Any] = {"status": "done", "run": str(run.resolve()), "predictions": str(found.path)}
    lines = [str(found.path)]
    if found.versions is not None:
        told["versions"] = dict(zip(("oldest", "newest"), found.versions, strict=True))
        lines.append("versions {} to {}".format(*found.versions))
    return Answer(told, lines)


@app.command(epilog="Examples: `verbund report runs/latest` · `verbund report runs/latest --trace trace.json`")
def report(
    run: RunDirectory,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Also write a Chrome trace for ui.perfetto.dev."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Write a run's report anew from its journal, also while the run goes on."""
    from verbund.stage import launch

    summary, path = launch.report(run, trace)
    return Answer({**summary, "report": str(path)}, [str(path), *([str(trace)] if trace else [])])


@app.command(epilog="Examples: `verbund doctor` · `verbund doctor job.toml` · `verbund doctor job.toml --network`")
def doctor(
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="Also check this job, as `train` would.")] = None,
    settings: Settings = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    cluster: ClusterText = None,
    network: Annotated[
        bool, typer.Option("--network", help="Also measure the links between the job's hosts: latency and rate.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Check this machine, the installation and, if one is given, a job."""
    from verbund.stage import doctor as checks

    whole = Job.read(job, changes_of(settings, workers, strategy, cluster)) if job else None
    findings = checks.examine(whole, network=network)
    failed = next((finding for finding in findings if finding.verdict == "failed"), None)
    lines = {finding: f"{finding.verdict:<7} {finding.what}: {finding.found}" for finding in findings}
    return Answer(
        {
            "status": "failed" if failed else "done",
            "cause": failed.record()["cause"] if failed else None,
            "findings": [finding.record() for finding in findings],
        },
        list(lines.values()),
        [line for finding, line in lines.items() if finding.verdict != "ok"],
        InputError.exit_status if failed else 0,
    )


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
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Write a run's model in a form that other programs read."""
    from verbund.stage.export import export as write

    found = write(run, out, form=form, step=step, ema=ema)
    size = f"{found['tensors']} tensors, {found['bytes'] / 1e6:.1f} MB"
    return Answer(
        {"status": "done", "run": str(run.resolve()), **found},
        [f"{found['folder']}: {found['format']} of step {found['step']}, {size}"],
    )


@app.command(
    epilog="Examples: `verbund verify job.toml --strategy tensor=2,pipeline=2` · "
    "`verbund verify job.toml --strategy shard=2 --against data=2`"
)
def verify(
    job: JobFile,
    settings: Settings = None,
    strategy: StrategyText = None,
    cluster: ClusterText = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="TEXT", help="Another strategy; default: a single process."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", parser=whole_number, help="Steps to compare.")] = 3,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Compare a strategy's losses, gradients and parameters with those of a single process, tensor by tensor."""
    from verbund.stage.verify import lines
    from verbund.stage.verify import verify as compare

    whole = Job.read(job, changes_of(settings, None, strategy, cluster))
    found = compare(whole, against=against, steps=steps, quiet=quiet)
    verdict = f"{found['strategy']} against {found['against']}: {'passed' if found['passed'] else 'FAILED'}"
    status = "done" if found["passed"] else "failed"
    return Answer({"status": status, **found}, [*lines(found), verdict], [verdict], 0 if found["passed"] else 1)


app.command(epilog=JOINS)(join)
app.add_typer(launch, name="launch")
app.add_typer(federate.app)


def _evaluated_by(workers: int | None, strategy: str | None, cluster: str | None) -> dict[str, Any]:
    if workers is not None and strategy is not None:
        raise InputError("--workers and --strategy both say how many", where="arguments", fix="Give one of them")
    return {
        "workers": workers,
        "strategy": parse_strategy(strategy) if strategy is not None else None,
        "cluster": parse_cluster(cluster) if cluster is not None else None,
    }


def _trained(run: Run) -> Answer:
    return Answer(run.summary, run.headline())


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def main() -> NoReturn:
    """Runs the command; an error becomes one short paragraph and the exit status of its kind."""
    arguments = sys.argv[1:]
    output = Output(arguments)
    try:
        answer = app(arguments or ["--help"], prog_name="verbund", standalone_mode=False)
        if answer == Interrupted.exit_status:  # how the parser hands a KeyboardInterrupt on
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt, Interrupt) as error:
        with Interrupts():  # what is said is said whole
            sys.exit(output.error(KeyboardInterrupt() if isinstance(error, typer.Abort) else error))
    # An exit status is what `--help` and `--version` leave.
    sys.exit(output.answer(answer) if isinstance(answer, Answer) else answer if arguments else 2)


if __name__ == "__main__":
    main()
