"""The verbs `launch …`: what a scheduler needs to start a job over its machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verbund.answer import Answer
from verbund.cli_options import (
    AsJson,
    Debug,
    JobFile,
    Quiet,
    Settings,
    StrategyText,
    Workers,
    changed,
    whole_number,
)
from verbund.errors import InputError
from verbund.job import Job

launch = typer.Typer(help="Write what a scheduler needs to start a job over its machines.", no_args_is_help=True)
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where it is written; default: standard output.")
]
Nodes = Annotated[int, typer.Option("--nodes", metavar="N", parser=whole_number, help="Machines.")]
PerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", metavar="N", parser=whole_number, help="GPUs of each machine.")
]


@launch.command(
    epilog="Example: `verbund launch slurm job.toml --workers 16 --nodes 2 --gpus-per-node 8 --time 12:00:00 --out "
    "job.sh && sbatch job.sh`"
)
def slurm(
    job: JobFile,
    nodes: Nodes = 1,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Of Slurm.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="Of Slurm.")] = None,
    time: Annotated[str | None, typer.Option("--time", metavar="TIME", help="Limit, e.g. 12:00:00.")] = None,
    gpus: PerNode = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus-per-node", metavar="N", parser=whole_number, help="Cores of each machine.")
    ] = None,
    stop_before: Annotated[
        int,
        typer.Option(
            "--stop-before",
            metavar="SECONDS",
            parser=whole_number,
            help="How long before its time is over the run saves, stops and is queued again.",
        ),
    ] = 120,
    requeues: Annotated[
        int, typer.Option("--requeues", metavar="N", parser=whole_number, help="How often it is queued again.")
    ] = 100,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the command listens on the first machine.")
    ] = "0.0.0.0:0",
    settings: Settings = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Write a batch script for `sbatch`: all nodes join, and what is preempted goes on when it is started again."""
    from verbund.stage.launchers.slurm import Slurm, script

    whole = Job.read(job, changed(settings, workers, strategy, None))
    asked = Slurm(nodes, partition, time, gpus, cpus, account, requeues, stop_before, listen)
    return _written(script(whole, job.resolve(), asked, _given(settings, workers, strategy)), "script", out, "sbatch")


@launch.command(
    epilog="Example: `verbund launch kubernetes job.toml --image registry.example/verbund:1 --workers 4 --nodes 2 "
    "--claim shared | kubectl apply -f -`"
)
def kubernetes(
    job: JobFile,
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="With Verbund and what the task imports.")],
    nodes: Nodes = 1,
    claim: Annotated[
        str, typer.Option("--claim", metavar="NAME", help="A volume that all pods see, with the job's folder.")
    ] = "verbund",
    mount: Annotated[str, typer.Option("--mount", metavar="PATH", help="Where pods see it.")] = "/verbund",
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the Job; default: the job's.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Of everything.")] = None,
    gpus: PerNode = None,
    cpus: Annotated[str | None, typer.Option("--cpus", metavar="QUANTITY", help="Of each pod, e.g. 4.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="QUANTITY", help="Of each pod, e.g. 16Gi.")] = None,
    grace: Annotated[
        int,
        typer.Option(
            "--grace", metavar="SECONDS", parser=whole_number, help="Between SIGTERM and SIGKILL, to save the run."
        ),
    ] = 120,
    settings: Settings = None,
    workers: Workers = None,
    strategy: StrategyText = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Write manifests for `kubectl`: an indexed Job, a headless Service, and a NetworkPolicy around them."""
    from verbund.stage.launchers.kubernetes import Kubernetes, manifests

    whole = Job.read(job, changed(settings, workers, strategy, None))
    asked = Kubernetes(image, nodes, claim, mount, name, namespace, gpus, cpus, memory, grace)
    text = manifests(whole, job, asked, _given(settings, workers, strategy))
    return _written(text, "manifests", out, "kubectl apply -f")


def _given(settings: list[str] | None, workers: int | None, strategy: str | None) -> list[tuple[str, str]]:
    """The options of `train` by which a job was changed."""
    pairs = [("--set", setting) for setting in settings or []]
    pairs += [("--workers", str(workers))] if workers is not None else []
    return pairs + ([("--strategy", strategy)] if strategy is not None else [])


def _written(text: str, what: str, out: Path | None, then: str) -> Answer:
    if out is None:
        return Answer({"status": "done", what: text}, text.splitlines(), text.splitlines())
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(out)) from None
    return Answer({"status": "done", what: str(out)}, [f"{out}: `{then} {out}` starts it"])
