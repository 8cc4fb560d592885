"""The verbs of machines that others start: `launch …`, what a scheduler needs for it, and `join`, what each does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verbund.answer import Answer
from verbund.commands.options import (
    AsJson,
    Debug,
    JobFile,
    Quiet,
    Settings,
    StrategyText,
    Workers,
    changes_of,
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
    epilog="Example: `verbund launch slurm job.toml --workers 16 --nodes 2 --gpus-per-node 8 --set "
    "cluster.trusted_network=10.0.0.0/24 --time 12:00:00 --out job.sh && sbatch job.sh`"
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
    keep: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Where nodes share no files: of each node, where it gets address, secret, task and data to, e.g. "
            "/scratch/me; only the first needs to see this folder.",
        ),
    ] = None,
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

    whole = Job.read(job, changes_of(settings, workers, strategy, None))
    asked = Slurm(nodes, partition, time, gpus, cpus, account, requeues, stop_before, listen, keep)
    return _written(script(whole, job.resolve(), asked, _given(settings, workers, strategy)), "script", out, "sbatch")


@launch.command(
    epilog="Example: `verbund launch kubernetes job.toml --image registry.example/verbund:1 --workers 4 --nodes 2 "
    "--set cluster.trusted_network=10.0.0.0/24 --claim mine | kubectl apply -f -`"
)
def kubernetes(
    job: JobFile,
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="With Verbund and what the task imports.")],
    nodes: Nodes = 1,
    claim: Annotated[
        str, typer.Option("--claim", metavar="NAME", help="A volume with the job's folder, for the first pod.")
    ] = "verbund",
    shared: Annotated[
        bool,
        typer.Option("--shared", help="All pods mount the volume; else they get task and data from the first pod."),
    ] = False,
    mount: Annotated[str, typer.Option("--mount", metavar="PATH", help="Where it is mounted.")] = "/verbund",
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
    """Write manifests for `kubectl`: a Job for the command, one for the other pods, a Service and a NetworkPolicy."""
    from verbund.stage.launchers.kubernetes import Kubernetes, manifests

    whole = Job.read(job, changes_of(settings, workers, strategy, None))
    asked = Kubernetes(image, nodes, claim, shared, mount, name, namespace, gpus, cpus, memory, grace)
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


JOINS = (
    "Examples: `verbund join 10.0.0.1:29170 --secret-file secret --slots 4` · `srun verbund join --slots 8` · "
    "`torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint 10.0.0.1:29400 -m verbund join 10.0.0.1:29170`"
)


def join(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST:PORT",
            help="Where the command listens, or the path of the file that tells it (`cluster.join_file`); default: "
            "`VERBUND_JOIN`, `MASTER_ADDR` or `SLURM_LAUNCH_NODE_IPADDR`.",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file", metavar="FILE", help="The secret that the command has; default: `VERBUND_SECRET_FILE`."
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            metavar="N",
            parser=whole_number,
            help="Workers that this machine takes; default: as many as torchrun, srun or mpirun start here, else 1.",
        ),
    ] = None,
    own: Annotated[
        str | None,
        typer.Option("--address", metavar="IP", help="Of this machine, for the others; default: towards the command."),
    ] = None,
    within: Annotated[
        float, typer.Option("--within", metavar="SECONDS", help="How long to wait for the command and its run.")
    ] = 600.0,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            help="How long the first SIGTERM or Ctrl-C does not end it while the run needs this machine.",
        ),
    ] = 0.0,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Where this machine gets task and data to, even if it sees the command's folders; default: it uses "
            "what it sees, and gets the rest to ~/.cache/verbund.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> Answer:
    """Take part in a run whose cluster is `external`, with this machine, until the run is over."""
    from verbund.stage.joining import join as take_part

    done = take_part(address, secret_file, slots, own=own, within=within, grace=grace, keep=keep, quiet=quiet)
    return Answer({"status": "done", "joined": done.joined, "slots": done.slots}, [done.text])
