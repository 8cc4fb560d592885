"""A batch script for Slurm: every node joins, the command runs on the first, and a run that is preempted goes on."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verbund.errors import InputError
from verbund.job import Job
from verbund.stage.launchers.shares import slots_of

_TIME = re.compile(r"(\d+-)?\d{1,4}(:\d{1,2}){0,2}|UNLIMITED")
_WORD = re.compile(r"[A-Za-z0-9_.,@:+-]+")


@dataclass(frozen=True)
class Slurm:
    """What is asked of Slurm.

    Args:
        nodes: machines.
        partition: `--partition`.
        time: `--time`, as Slurm writes it, e.g. `2-00:00:00`.
        gpus_per_node: `--gpus-per-node`.
        cpus_per_node: `--cpus-per-task` of the one task a node has.
        account: `--account`.
        requeues: how often the job may start again.
        stop_before: seconds before the end of its time at which the run saves and stops.
        listen: where the command listens.
        keep: a folder of each node's own, where it gets address, secret, task and data to; only the first node needs to
            see those of the command then. None: all nodes see them.
    """

    nodes: int = 1
    partition: str | None = None
    time: str | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    account: str | None = None
    requeues: int = 100
    stop_before: int = 120
    listen: str = "0.0.0.0:0"
    keep: Path | None = None

    def check(self) -> None:
        """Raises InputError if Slurm would not understand it."""
        for key in ("partition", "account"):
            value = getattr(self, key)
            if value is not None and not _WORD.fullmatch(value):
                raise InputError(f"`{value}` is no name", where=f"--{key}")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise InputError(f"`{self.time}` is no time limit", where="--time", fix="E.g. 30, 12:00:00 or 2-00:00:00")
        for key in ("gpus_per_node", "cpus_per_node"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise InputError("must be at least 1", where=f"--{key.replace('_', '-')}")
        if self.requeues < 0:
            raise InputError("must not be negative", where="--requeues")
        if self.keep is not None and not self.keep.is_absolute():
            raise InputError(f"`{self.keep}` is no absolute path", where="--folder", fix="E.g. /scratch/verbund")
        if not 1 <= self.stop_before <= 65535:
            raise InputError("Slurm takes 1 to 65535 seconds", where="--stop-before")


_SCRIPT = """\
{directives}

# The run goes on under the same name when Slurm starts this job again.
set -uo pipefail
cd {folder} || exit 2
verbund=({verbund})
run={runs}/{name}-"$SLURM_JOB_ID"
join="$run.join"
mkdir -p {runs} || exit 2
( umask 077; [ -s "$join.secret" ] || head -c 32 /dev/urandom > "$join.secret" ) || exit 2

joiners= failed=
{early}
if [ -e "$run/job.toml" ]; then
    words=(resume "$run")
else
    words=(train {job} --run "$run")
fi
# Before the time is over, or when others need the nodes: finish the step, save, and queue again.
command= told= status=0
trap 'told=1; [ -z "$command" ] || kill -TERM "$command" 2>/dev/null' TERM INT
"${{verbund[@]}}" "${{words[@]}}" \\
    {arguments} &
command=$!
{late}while :; do
    wait "$command"
    now=$?
    [ "$now" -eq 127 ] || status=$now
    [ -n "$told" ] || break
    told=  # a signal has ended the wait, not the command
done
if [ -n "$joiners" ]; then
    kill -TERM "$joiners" 2>/dev/null
    wait "$joiners"
fi
{clear}if [ "$status" -eq 130 ] || [ "$status" -eq 3 ]; then  # it has saved, or machines were lost
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
if [ "$status" -eq 0 ]; then
    rm -f "$join" "$join.secret"
fi
exit "$status"
"""

_SHARED = """\
# One task a node takes the workers of that node; each waits until the command listens, and ends with it.
{each} \\
    "${{verbund[@]}}" join "$join" --slots {slots} --secret-file "$join.secret" --grace 86400 &
joiners=$!
"""

_APART_EARLY = """\
# Only this node needs to see this folder. The others get address and secret, once the command listens, to a folder of
# their own, and task and data from the command.
there={keep}/{name}-"$SLURM_JOB_ID".join
rm -f "$join"
"""

_APART = """\
while [ ! -s "$join" ] && kill -0 "$command" 2>/dev/null; do sleep 0.2; done
if [ -s "$join" ]; then
    if {each} --chdir=/ mkdir -p {keep} &&
        sbcast --force --preserve "$join" "$there" && sbcast --force --preserve "$join.secret" "$there.secret"; then
        {each} --chdir={keep} \\
            "${{verbund[@]}}" join "$there" --slots {slots} --secret-file "$there.secret" --grace 86400 \\
            --folder {keep} &
        joiners=$!
    elif kill -0 "$command" 2>/dev/null; then
        echo "verbund: address and secret could not be sent to all nodes; srun or sbcast says why above" >&2
        failed=1
        kill -TERM "$command" 2>/dev/null
    fi
fi
"""

_CLEAR = """\
timeout 60 {each} --chdir=/ rm -f "$there" "$there.secret"
[ -z "$failed" ] || exit 1
"""


def script(job: Job, file: Path, asked: Slurm, arguments: Sequence[tuple[str, str]] = ()) -> str:
    """The batch script.

    Args:
        job: what is trained, with all changes.
        file: its job file.
        asked: see there.
        arguments: the options of `train` that made these changes.

    Raises:
        InputError: if Slurm, or the job on so many nodes, could not run.
    """
    asked.check()
    slots = slots_of(job, asked.nodes)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", job.name or "job")
    options: dict[str, object] = {
        "job-name": name,
        "nodes": asked.nodes,
        "ntasks-per-node": 1,
        "partition": asked.partition,
        "account": asked.account,
        "time": asked.time,
        "gpus-per-node": asked.gpus_per_node,
        "cpus-per-task": asked.cpus_per_node,
        "signal": f"B:TERM@{asked.stop_before}",
        "output": f"{name}-%j.out",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    settings = {"cluster.kind": "external", "cluster.listen": asked.listen, "cluster.nodes": str(asked.nodes)}
    words = [shlex.join(pair) for pair in arguments]
    words += [f"--set {key}={shlex.quote(value)}" for key, value in settings.items()]
    words += ['--set cluster.join_file="$PWD/$join"', '--set cluster.secret_file="$PWD/$join.secret"']
    keep = None if asked.keep is None else shlex.quote(str(asked.keep))
    words_of = {
        "each": f"srun --nodes={asked.nodes} --ntasks={asked.nodes} --ntasks-per-node=1",
        "slots": slots,
        "keep": keep,
        "name": shlex.quote(name),
    }
    early, late, clear = (_SHARED, "", "") if keep is None else (_APART_EARLY, _APART, _CLEAR)
    return _SCRIPT.format(
        early=early.format_map(words_of),
        late=late.format_map(words_of),
        clear=clear.format_map(words_of),
        directives="\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue"]),
        folder=shlex.quote(str(Path.cwd())),
        verbund=shlex.join([sys.executable, "-m", "verbund"]),
        runs="runs",
        name=shlex.quote(name),
        requeues=asked.requeues,
        job=shlex.quote(str(file)),
        arguments=" \\\n    ".join(words),
    )
