"""Before a stage: the warm server, the data converted and checked, the dry run, and whether there is memory."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbund import task
from verbund.cluster.external import ExternalCluster
from verbund.cluster.hosts import HostsCluster
from verbund.cluster.local import LocalCluster
from verbund.cluster.process import Cluster, ProcessSpec
from verbund.cluster.ray import RayCluster
from verbund.cluster.supervisor import Supervisor
from verbund.cluster.supplies import Supplies, Tree
from verbund.cluster.watched import Failed
from verbund.data.check import Wanted, check_columns
from verbund.data.manifest import FILES, Manifest
from verbund.data.prepare import Evaluated, Prepared, cache_of, prepare, prepare_evaluated
from verbund.errors import ClusterLost, InputError, Interrupted, JobError, Problem
from verbund.interop import huggingface
from verbund.interrupts import Interrupt
from verbund.job import Data, Job
from verbund.stage.federated import packages
from verbund.stage.processes import with_trace

Notify = Callable[[str], None]
"""Tells the user something."""

_MUCH = 1_000_000_000


@dataclass(frozen=True)
class Facts:
    """What the dry run found out."""

    tickets_per_epoch: int
    total_steps: int | None
    train_samples: int
    validation_samples: int
    parameters: int
    worker_bytes: int
    table_bytes: int
    """What each checkpoint has of tables on parameter servers whatever is used of them: values that no seed makes."""
    row_bytes: int
    """What it has of them besides if all rows are used: values of a `Table`, and what the optimiser keeps."""
    notes: list[str]
    costs: list[float] | None
    """The work of each layer at which a pipeline may be cut."""
    deferred: bool
    """Whether workers can build their parts of the model alone."""
    probe: dict[str, Any] | None
    """What some samples give in the whole model."""
    other_meshes: list[tuple[str, int, int]]
    """Other meshes, what a worker would need under each, in bytes, and how many there would be."""
    process_bytes: int | None
    """What a single process may take, if that is limited."""
    built: bool
    """Whether the model fitted into one process, so that it was tried."""


@contextmanager
def cluster_of(job: Job) -> Iterator[Cluster]:
    """The job's cluster, which ends with the block."""
    # What torch's compiler compiles is kept with the converted data, for the next run, and not in the folder for
    # temporary files.
    cache = (Path(job.folder) / cache_of(job.data)).resolve()
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "compiled")}
    cluster: Cluster
    if job.cluster.kind == "hosts":
        cluster = HostsCluster(job, _made(cache), _heavy(job), environment)
    elif job.cluster.kind in ("external", "ray"):
        kind = RayCluster if job.cluster.kind == "ray" else ExternalCluster
        cluster = kind(job, _made(cache), _heavy(job), environment, notifier(False))
    else:
        cluster = LocalCluster(job.cluster.orphan_grace, _heavy(job), environment)
    try:
        yield cluster
    finally:
        cluster.close()


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", where=str(folder), fix="Give `data.cache`") from None
    return folder


def _heavy(job: Job) -> tuple[str, ...]:
    """What takes seconds to import and this job needs: it is imported once, in the warm server."""
    heavy = ["torch._dynamo"] if job.train.compile else []
    if {"tensor", "pipeline"} & set(job.strategy.axes):
        heavy.append("verbund.stage.preload_divided")
    if job.strategy.exchange.federated:
        heavy.append("torch.fx.experimental.symbolic_shapes")  # vmap imports it when it is first called
    if task.needs_transformers(job):
        heavy.append("transformers.modeling_utils")
    return tuple(heavy)


def notifier(quiet: bool) -> Notify:
    return (lambda _: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201


def refuse_existing(directory: Path | str | None) -> None:
    if directory is not None and Path(directory).exists():
        path = Path(directory)
        if not path.is_dir() or any(path.iterdir()):
            raise InputError(
                "exists already",
                where=str(path),
                fix="Choose another directory, or `verbund resume` this one",
            )


def prepared_data(job: Job, notify: Notify, known: Path | None = None, *, training: bool = True) -> Prepared:
    """Converts the data once, and reports all that is wrong with task and columns together."""
    if training and job.observe.tensorboard:
        from verbund.observe import tensorboard

        tensorboard.require()
    packages.check(job)
    data = _data(job, notify)
    return _checked(job, data, lambda: prepare(data, folder=Path(job.folder), notify=notify, schema=known))


def prepared_evaluation(job: Job, evaluated: Evaluated, notify: Notify, known: Path | None) -> Prepared:
    """The same for what is evaluated instead of the job's own validation set."""
    folder, own = Path(job.folder), task.functions(job)
    changes: dict[str, Any] = {} if evaluated.labelled else {"target": None}
    if job.data.train is None and not (job.train.objective and job.train.objective.name == "next_token"):
        # What the entries of the task's own Dataset are called unless the job names them.
        if "inputs" not in own:
            changes["input"] = job.data.input or "input"
        if "targets" not in own and evaluated.labelled:
            changes["target"] = job.data.target or "target"

    def convert() -> Prepared:
        return prepare_evaluated(evaluated, data, folder=folder, notify=notify, schema=known)

    data = _data(job, notify)
    prepared = _checked(job, data.model_copy(update=changes), convert)
    for note in prepared.notes:
        notify(note)
    return prepared


def _data(job: Job, notify: Notify) -> Data:
    """The job's data, read with the model's own tokenizer where the task is a language model's folder."""
    if job.task.startswith(task.HUGGING_FACE) and not task.check(job):
        return huggingface.with_tokenizer(job, notify)
    return job.data


def _checked(job: Job, data: Data, convert: Callable[[], Prepared]) -> Prepared:
    problems = task.check(job)
    try:
        prepared = convert()
    except InputError as error:
        raise _together(problems, error) from None
    problems += check_columns(prepared, data, Wanted.of(job, task.functions(job)))
    if problems:
        raise JobError(problems)
    return prepared


def _together(problems: list[Problem], error: InputError) -> InputError:
    if not problems:
        return error
    if isinstance(error, JobError):
        return JobError([*problems, *error.problems])
    return JobError([*problems, Problem(error.where or "data", error.what, error.fix)])


def supply(cluster: Cluster, job: Job, prepared: Prepared) -> None:
    """Lets processes on all hosts have the task's code and the converted data.

    Raises:
        InputError: if a host cannot have them.
        ClusterLost: if one is lost meanwhile.
    """
    if job.cluster.kind == "local":
        return
    stores = [store for store in dict.fromkeys((prepared.train, prepared.validation)) if store]
    trees = [tree for store in stores for tree in trees_of(Path(store))]
    if not job.task.startswith(task.HUGGING_FACE):
        trees.insert(0, Tree("code", job.path(job.task).resolve().parent))
    elif job.task != huggingface.BUNDLED:
        trees.insert(0, Tree("model", huggingface.folder(job).resolve()))
    cluster.supply(Supplies(tuple(trees)))


def trees_of(store: Path) -> list[Tree]:
    """A converted data set, and the images that it names, if it does."""
    trees, manifest = [Tree("data", store)], Manifest.read(store)
    if manifest.kind == "images" and manifest.root is not None:
        names = tuple(json.loads((store / FILES).read_text(encoding="utf-8")))
        trees.append(Tree("images", Path(manifest.root), names))
    return trees


def settings_of(job: Job, prepared: Prepared, **more: Any) -> dict[str, Any]:
    return {"job": job.resolved(), "folder": job.folder, "prepared": prepared.record(), **more}


def dry_run(cluster: Cluster, job: Job, prepared: Prepared) -> Facts:
    """One micro-batch forward and backward, in a process of its own, before any worker starts."""
    supply(cluster, job, prepared)
    available = next(iter(cluster.free_memory().values()))
    settings = settings_of(job, prepared, available=available)
    spec = ProcessSpec("preflight", 0, 1, "verbund.stage.preflight:work", settings=settings)
    supervisor = Supervisor(cluster, job.cluster, lambda *_: None)
    try:
        (result,) = supervisor.run([spec])
    except Failed as failed:
        raise with_trace(failed) from None
    except (Interrupt, KeyboardInterrupt):
        raise Interrupted("interrupted while the job was checked: nothing was written") from None
    if supervisor.warnings:
        raise ClusterLost(supervisor.warnings[0])  # no worker can be started any more
    if result["problems"]:
        raise JobError([Problem(p["where"], p["what"], p["fix"]) for p in result["problems"]])
    facts = Facts(**result["facts"])
    _check_memory(cluster, job, facts)
    return facts


def check_disk(place: Path, job: Job, facts: Facts) -> None:
    """Whether there is room for checkpoints of the tables on servers, of which they have the rows that are used.

    Args:
        place: the run's directory, which need not be there yet.
        job: how many checkpoints are kept.
        facts: get a note where these take much.

    Raises:
        InputError: if there is none.
    """
    sure, most = facts.table_bytes, facts.table_bytes + facts.row_bytes
    if most < _MUCH:
        return
    there = next(folder for folder in (place.resolve(), *place.resolve().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    room = f"{_size(free)} are free"
    if sure > free:
        raise InputError(
            f"each checkpoint takes {_size(sure)} for the tables, of which all rows have values at once, and {room}",
            where=str(there),
            fix="Use `verbund.Table`, smaller tables, or `--run` on a larger disk",
        )
    copies = job.checkpoint.keep + 1
    used = f", and up to {_size(most)} once all of their rows are used" if facts.row_bytes else ""
    facts.notes.append(
        f"Each checkpoint takes {_size(sure)} for the tables{used}; {job.checkpoint.keep} are kept while another is "
        f"written, which makes {_size(copies * most)} at most, and {room}"
    )


def _check_memory(cluster: Cluster, job: Job, facts: Facts) -> None:
    """Whether each host has the memory for its workers, and a process may take what a worker needs.

    Raises:
        InputError: naming meshes that would fit.
    """
    places = cluster.placed(job.world)
    for number, (host, available) in enumerate(cluster.free_memory().items()):
        _check_host(job, facts, host, available, places.count(number))


def _check_host(job: Job, facts: Facts, host: str, available: int | None, world: int) -> None:
    need = facts.worker_bytes

    def fits(size: int, workers: int) -> bool:
        within = facts.process_bytes is None or size <= facts.process_bytes
        return within and (available is None or size * workers <= available)

    if not world or fits(need, world):
        return
    divided = job.world > job.strategy.islands * job.strategy.mesh.get("data", 1)
    how = "estimated" if divided else "measured"
    how = f"{how} {'from' if divided else 'in'} a dry run of one" if facts.built else "estimated without a dry run"
    if facts.process_bytes is not None and need > facts.process_bytes:
        what = f"a worker needs about {_size(need)} of memory ({how}), and a process may take "
        what += _size(facts.process_bytes)
    else:
        what = f"{world} worker{'s' if world > 1 else ''} need about {_size(need * world)} of memory ({how}), "
        what += f"{_size(available or 0)} are free"
    if host:
        what += f" on host {host}"
    fewer = max((n for n in range(1, world) if fits(need, n)), default=0)
    fixes = [f"use at most {fewer} workers{' there' if host else ''}"] if fewer and not divided else []
    meshes: dict[str, str] = {}
    for name, size, workers in facts.other_meshes:
        if fits(size, -(-workers * world // job.world)):
            meshes.setdefault(name.partition("=")[0], name)
    fixes += [f"use the mesh {' or '.join(meshes.values())}"] if meshes else []
    fixes.append("a smaller `train.micro_batch`" if fixes else "use a smaller `train.micro_batch`")
    fix = ", or ".join(fixes)
    raise InputError(what, where="strategy.mesh", fix=f"{fix[0].upper()}{fix[1:]}")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
