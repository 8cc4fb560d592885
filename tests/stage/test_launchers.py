"""Scripts and manifests for schedulers: what they say is what Slurm, Kubernetes and the shell understand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import Command, MakeJob
from verbund.cluster.invitation import PORT
from verbund.stage.launchers import yaml as ours

yaml = pytest.importorskip("yaml")
TWO = ("--workers", "4", "--nodes", "2", "--set", 'cluster.trusted_network="10.0.0.0/8"')


@pytest.fixture
def job(make_job: MakeJob, tmp_path: Path) -> str:
    (tmp_path / "job.toml").write_text(make_job(changes={"name": "my job"}).toml())
    return "job.toml"


def test_a_batch_script(command: Command, job: str, tmp_path: Path) -> None:
    asked = [
        "--partition",
        "gpu",
        "--time",
        "1-00:00:00",
        "--gpus-per-node",
        "2",
        "--stop-before",
        "60",
        "--folder",
        "/scratch/a b",
    ]
    written = command("launch", "slurm", job, *TWO, *asked, "--out", "a b.sh")
    assert written.status == 0, written.err
    assert "sbatch a b.sh" in written.out
    text = (tmp_path / "a b.sh").read_text()
    first, *lines = text.split("\n\n")[0].splitlines()
    assert first == "#!/bin/bash"
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in lines)  # Slurm reads no quotes here
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
    expected = {"nodes": "2", "partition": "gpu", "time": "1-00:00:00", "gpus-per-node": "2", "signal": "B:TERM@60"}
    assert expected.items() <= options.items()
    assert {"requeue": "", "job-name": "my-job", "ntasks-per-node": "1"}.items() <= options.items()
    assert subprocess.run(["bash", "-n", tmp_path / "a b.sh"], capture_output=True).stderr == b""
    # What ShellCheck warns of first (SC2086): an expansion that may be split.
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for found in re.finditer(r"\$[A-Za-z_]\w*|\$\{[^}]*\}", code):
        before = code[: found.start()].rpartition("\n")[2]
        quoted = before.replace("\\'", "").count('"') % 2 == 1 or before.count("'") % 2 == 1
        assert quoted or re.search(r"\w=$", before), (before, found[0])
    assert "--slots 2" in text
    assert "--folder '/scratch/a b' &" in text
    assert "--set 'cluster.trusted_network=\"10.0.0.0/8\"'" in text


PLAYED = {
    # Every node is a folder of its own below $NODES; what is said to Slurm goes there, and nothing else does.
    "srun": """#!/bin/bash
while [[ "$1" == --* ]]; do [[ "$1" == --chdir=* ]] && at="${1#--chdir=}"; shift; done
if [[ "$1" == mkdir ]]; then mkdir -p "${@: -1}"; exit; fi
if [[ "$1" == rm ]]; then exec "$@"; fi
cd "$at" && exec "$@"
""",
    "sbcast": """#!/bin/bash
[ -z "${REFUSED:-}" ] || { echo "sbcast: error: no space" >&2; exit 1; }
exec cp --preserve=mode "${@: -2:1}" "${@: -1}"
""",
    "scontrol": """#!/bin/bash
echo "requeued" >&2
""",
}
STANDS_IN = """#!/bin/bash
shift 2
if [ "$1" = join ]; then
    [[ "$2" != "$HIDDEN"* && "$(cat "$2")" = node1:4711 ]] || { echo "not seen: $2" >&2; exit 2; }
    [[ "$6" != "$HIDDEN"* && "$(stat -c %a "$6")" = 600 ]] || { echo "not seen: $6" >&2; exit 2; }
    echo joined > "$HIDDEN/joined"
    exit 0
fi
trap 'exit 130' TERM
for word in "$@"; do [[ "$word" == cluster.join_file=* ]] && echo node1:4711 > "${word#*=}"; done
for _ in $(seq 200); do [ -e "$HIDDEN/joined" ] && exit 0; sleep 0.05; done
exit 3
"""


@pytest.mark.parametrize("refused", [False, True])
def test_nodes_that_see_nothing_of_the_folder(refused: bool, command: Command, job: str, tmp_path: Path) -> None:
    """Address and secret lie where a node sees them, whose only folder is its own; a failed copy ends it."""
    node, tools = tmp_path / "a node", tmp_path / "tools"
    tools.mkdir()
    for name, text in {**PLAYED, "python": STANDS_IN}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    assert command("launch", "slurm", job, *TWO, "--folder", str(node), "--out", "apart.sh").status == 0
    script = tmp_path / "apart.sh"
    script.write_text(
        re.sub(r"(?m)^verbund=\(\S+ ", f"verbund=({shlex.quote(str(tools / 'python'))} ", script.read_text())
    )
    hidden = str(tmp_path / "hidden")
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "HIDDEN": hidden}
    (tmp_path / "hidden").mkdir()
    script.write_text(script.read_text().replace("runs/", f"{tmp_path}/hidden/").replace("mkdir -p runs", "true"))
    script.write_text(script.read_text().replace('"$PWD/$join', '"$join'))
    ended = subprocess.run(
        ["bash", script], env=environment | ({"REFUSED": "1"} if refused else {}), capture_output=True, timeout=60
    )
    said = ended.stderr.decode()
    assert ended.returncode == (1 if refused else 0), said
    assert ("could not be sent to all nodes" in said) is refused
    assert "requeued" not in said  # what would fail again
    assert (tmp_path / "hidden" / "joined").exists() is not refused
    assert list(node.iterdir()) == []  # no secret stays there


# What the API knows, of what is written (Kubernetes 1.31): the fields of each object and their kinds.
NAMES, TEXT, NUMBER, FLAG = "names", str, int, bool
ENV = {"name": TEXT, "value": TEXT}
CONTAINER = {
    "name": TEXT,
    "image": TEXT,
    "command": [TEXT],
    "workingDir": TEXT,
    "env": [ENV],
    "ports": [{"name": TEXT, "containerPort": NUMBER}],
    "securityContext": {"allowPrivilegeEscalation": FLAG, "capabilities": {"drop": [TEXT]}},
    "volumeMounts": [{"name": TEXT, "mountPath": TEXT, "readOnly": FLAG}],
    "resources": {"limits": NAMES, "requests": NAMES},
}
POD = {
    "subdomain": TEXT,
    "restartPolicy": TEXT,
    "terminationGracePeriodSeconds": NUMBER,
    "automountServiceAccountToken": FLAG,
    "securityContext": {"runAsNonRoot": FLAG, "runAsUser": NUMBER, "fsGroup": NUMBER},
    "containers": [CONTAINER],
    "volumes": [
        {
            "name": TEXT,
            "persistentVolumeClaim": {"claimName": TEXT},
            "secret": {"secretName": TEXT, "defaultMode": NUMBER},
            "emptyDir": {"medium": TEXT},
        }
    ],
}
RULE = {
    "action": TEXT,
    "onPodConditions": [{"type": TEXT, "status": TEXT}],
    "onExitCodes": {"containerName": TEXT, "operator": TEXT, "values": [NUMBER]},
}
SELECTOR = {"matchLabels": NAMES}
SPECS = {
    ("batch/v1", "Job"): {
        "completionMode": TEXT,
        "completions": NUMBER,
        "parallelism": NUMBER,
        "backoffLimit": NUMBER,
        "podFailurePolicy": {"rules": [RULE]},
        "template": {"metadata": {"labels": NAMES}, "spec": POD},
    },
    ("v1", "Service"): {
        "clusterIP": TEXT,
        "selector": NAMES,
        "publishNotReadyAddresses": FLAG,
        "ports": [{"name": TEXT, "port": NUMBER}],
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector": SELECTOR,
        "policyTypes": [TEXT],
        "ingress": [{"from": [{"podSelector": SELECTOR}]}],
    },
}


def fits(value: Any, schema: Any, where: str) -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        assert not value.keys() - schema.keys(), where
        for key, inner in value.items():
            fits(inner, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for inner in value:
            fits(inner, schema[0], f"{where}[]")
    elif schema == NAMES:
        assert all(isinstance(key, str) and isinstance(inner, str | int) for key, inner in value.items()), where
    else:
        assert type(value) is schema, where


@pytest.mark.parametrize("shared", [False, True])
def test_manifests(shared: bool, command: Command, job: str, tmp_path: Path) -> None:
    asked = ["--image", "r.example/v:1", "--gpus-per-node", "2", "--memory", "16Gi", "--namespace", "ml", "--cpus", "4"]
    nodes = ("--workers", "6", "--nodes", "3", "--set", 'cluster.trusted_network="10.0.0.0/8"')
    written = command("launch", "kubernetes", job, *nodes, *asked, *(["--shared"] if shared else []))
    assert written.status == 0, written.err
    documents = list(yaml.safe_load_all(written.out))
    for document, name in zip(documents, ["my-job", "my-job", "my-job", "my-job-workers"], strict=True):
        fits(document["spec"], SPECS[document["apiVersion"], document["kind"]], document["kind"])
        assert document["metadata"] == {"name": name, "namespace": "ml"}
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
    service, policy, *jobs = (document["spec"] for document in documents)
    head, others = (run["template"]["spec"] for run in jobs)
    # The head is what the others look for; nobody but the pods of both Jobs reaches either.
    assert head["subdomain"] == "my-job"
    label = {"app.kubernetes.io/instance": "my-job"}
    assert service["selector"] == policy["podSelector"]["matchLabels"] == label
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == label
    assert [(run["completions"], run["parallelism"], run["completionMode"]) for run in jobs] == [
        (1, 1, "Indexed"),
        (2, 2, "Indexed"),
    ]
    # One volume at one pod, or all share it.
    claim = {"name": "work", "persistentVolumeClaim": {"claimName": "verbund"}}
    assert head["volumes"][0] == claim
    assert others["volumes"][0] == (claim if shared else {"name": "work", "emptyDir": {}})
    for run, pod in zip(jobs, (head, others), strict=True):
        assert label.items() <= run["template"]["metadata"]["labels"].items()
        (container,) = pod["containers"]
        assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
        assert pod["volumes"][1]["secret"] == {"secretName": "my-job-secret", "defaultMode": 0o440}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 2}
        shell, option, commands = container["command"]
        (tmp_path / "commands.sh").write_text(commands)
        assert subprocess.run([shell, "-n", tmp_path / "commands.sh"], capture_output=True).stderr == b""
        assert option == "-c"


def test_a_single_pod_needs_no_others(command: Command, job: str) -> None:
    text = command("launch", "kubernetes", job, "--image", "i").out
    assert [document["kind"] for document in yaml.safe_load_all(text)] == ["Service", "NetworkPolicy", "Job"]


def test_each_pod_runs_its_part(command: Command, job: str, tmp_path: Path) -> None:
    """The commands of the head and of another pod, with a `verbund` that says what it was asked."""
    text = command("launch", "kubernetes", job, *TWO, "--image", "i", "--mount", str(tmp_path)).out
    jobs = list(yaml.safe_load_all(text))[2:]
    (tmp_path / "verbund").write_text('#!/bin/sh\nIFS="|"\necho "$*|"\n')
    (tmp_path / "verbund").chmod(0o700)

    def said(number: int) -> list[str]:
        commands = jobs[number]["spec"]["template"]["spec"]["containers"][0]["command"]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(commands, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return sorted(done.stdout.splitlines())

    (join,) = said(1)
    assert join.startswith(f"join|my-job-0.my-job:{PORT}|--slots|2|")
    assert join.endswith(f"|--folder|{tmp_path}|")
    joins, trains = said(0)
    assert joins.startswith(f"join|127.0.0.1:{PORT}|--slots|2|")
    assert trains.startswith('train|job.toml|--run|runs/my-job|--set|cluster.trusted_network="10.0.0.0/8"|--workers|4|')
    (tmp_path / "runs" / "my-job").mkdir(parents=True)
    (tmp_path / "runs" / "my-job" / "job.toml").touch()
    assert said(0)[1].startswith("resume|runs/my-job|--set|")


WRONG = [
    (["slurm", "--nodes", "3"], "3 nodes for 1 workers"),
    (["slurm", "--nodes", "2", "--workers", "2"], "without encryption or proof"),
    (["slurm", "--time", "soon"], "`soon` is no time limit"),
    (["slurm", "--partition", "a b"], "`a b` is no name"),
    (["slurm", "--folder", "here"], "`here` is no absolute path"),
    (["kubernetes", "--image", "i", "--strategy", "islands=2,exchange=parameter_server"], "Give `--shared`"),
    (["kubernetes"], "Missing option '--image'"),
    (["kubernetes", "--image", "a b"], "`a b` is no image"),
    (["kubernetes", "--image", "i", "--name", "My"], "`My` is no name of a Job"),
    (["kubernetes", "--image", "i", "--memory", "much"], "`much` is no quantity"),
    (["kubernetes", "--image", "i", "--out", "no/such/folder"], "cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_no_scheduler_takes(arguments: list[str], message: str, command: Command, job: str) -> None:
    scheduler, *more = arguments
    ended = command("launch", scheduler, job, *more)
    assert (ended.status, message in ended.err) == (2, True), ended.err


def test_yaml_is_read_back() -> None:
    value = {
        "a": {"no": "no", "deep": [{"b": 1, "c": ["x", "yes", "0o10", "1e3", ""]}, {}, []]},
        "text": "first\n  second: 'x'\n\nlast\n",
        "odd": 'a "quoted" \\ é: # &',
        "list": ["line\nanother\n", True, None, 1.5],
    }
    assert yaml.safe_load(ours.text(value)) == value
