"""Manifests for Kubernetes: a Job of one pod, the head, that has the volume and runs the command; an indexed Job whose
pods join and need no volume; a headless Service by which they find the head, and a NetworkPolicy that keeps others out.

Facts of the API: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ (completionMode,
podFailurePolicy, which asks for restartPolicy Never; successPolicy since 1.31), and the hostname NAME-INDEX of a pod of
an indexed Job, which a Service named as its `subdomain` resolves.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from verbund.cluster.invitation import PORT
from verbund.errors import InputError
from verbund.job import Job
from verbund.stage.launchers import yaml
from verbund.stage.launchers.shares import slots_of

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_WORKERS = "workers"
_LONGEST_NAME = 52 - len(f"-{_WORKERS}")  # a pod's hostname has 63 characters, and `-INDEX` follows the Job's name
_SECRET = PurePosixPath("/run/verbund")
_LABEL = "app.kubernetes.io/instance"
_USER = 65532
_INPUT_WRONG, _FAILED = 2, 1


@dataclass(frozen=True)
class Kubernetes:
    """What is asked of Kubernetes.

    Args:
        image: with Verbund and what the task imports.
        nodes: pods.
        claim: a PersistentVolumeClaim with the job's folder.
        shared: whether all pods mount it (ReadWriteMany); else the head alone (ReadWriteOnce will do), and the others
            get task and data from there.
        mount: where it is mounted.
        name: of the Job; default: the job's.
        namespace: of everything.
        gpus: of each pod.
        cpus: of each pod, e.g. `4` or `500m`.
        memory: of each pod, e.g. `16Gi`.
        grace: seconds between SIGTERM and SIGKILL, in which the run saves.
    """

    image: str
    nodes: int = 1
    claim: str = "verbund"
    shared: bool = False
    mount: str = "/verbund"
    name: str | None = None
    namespace: str | None = None
    gpus: int | None = None
    cpus: str | None = None
    memory: str | None = None
    grace: int = 120

    def check(self) -> None:
        """Raises InputError if Kubernetes would not take it."""
        if not self.image.strip() or any(map(str.isspace, self.image)):
            raise InputError(f"`{self.image}` is no image", where="--image", fix="E.g. registry.example/verbund:1")
        for key in ("claim", "namespace"):
            value = getattr(self, key)
            if value is not None and not (_NAME.fullmatch(value) and len(value) < 64):
                raise InputError(f"`{value}` is no name", where=f"--{key}", fix="Lower case, digits and `-`")
        if not self.mount.startswith("/") or self.mount == "/":
            raise InputError(f"`{self.mount}` is no folder to mount at", where="--mount", fix="E.g. /verbund")
        if self.gpus is not None and self.gpus < 1:
            raise InputError("must be at least 1", where="--gpus-per-node")
        if self.grace < 1:
            raise InputError("must be at least 1", where="--grace")
        for key, pattern in (("cpus", r"\d+(\.\d+)?|\d+m"), ("memory", r"\d+(\.\d+)?([EPTGMK]i?|k)?")):
            value = getattr(self, key)
            if value is not None and not re.fullmatch(pattern, value):
                raise InputError(f"`{value}` is no quantity", where=f"--{key}", fix="E.g. 4 or 500m; 16Gi")


def manifests(job: Job, file: Path, asked: Kubernetes, arguments: Sequence[tuple[str, str]] = ()) -> str:
    """The manifests, as one YAML stream.

    Args:
        job: what is trained, with all changes.
        file: its job file; the claim has it, and its folder, under this name.
        asked: see there.
        arguments: the options of `train` that made these changes.

    Raises:
        InputError: if Kubernetes, or the job on so many pods, could not run.
    """
    asked.check()
    if job.strategy.exchange.served and not asked.shared:
        fix = "Give `--shared`, and a claim that all pods may mount (ReadWriteMany)"
        raise InputError("parameter servers need a run folder that all pods see", where="strategy.exchange", fix=fix)
    slots = slots_of(job, asked.nodes)
    name = asked.name or re.sub(r"[^a-z0-9]+", "-", (job.name or "job").lower()).strip("-") or "job"
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        fix = f"Give `--name` with at most {_LONGEST_NAME} lower case letters, digits and `-`"
        raise InputError(f"`{name}` is no name of a Job", where="--name", fix=fix)
    head = (
        f"# kubectl create secret generic {name}-secret --from-file=secret=FILE, where FILE has 32 random bytes:\n"
        f"#   head -c 32 /dev/urandom > FILE\n"
        f"# The claim `{asked.claim}` (ReadWrite{'Many' if asked.shared else 'Once'}) has the folder of the job; "
        "runs are written there.\n"
    )
    claim = {"persistentVolumeClaim": {"claimName": asked.claim}}
    parts = [
        _service(name),
        _policy(name),
        _job(name, name, asked, 1, claim, _head(job, name, file, asked, slots, arguments)),
    ]
    if asked.nodes > 1:
        own = claim if asked.shared else {"emptyDir": {}}
        parts.append(_job(name, f"{name}-{_WORKERS}", asked, asked.nodes - 1, own, _joins(name, asked, slots)))
    for part in parts:
        if asked.namespace is not None:
            part["metadata"]["namespace"] = asked.namespace
    return head + "---\n".join(yaml.text(part) for part in parts)


def _service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "selector": {_LABEL: name},
            "publishNotReadyAddresses": True,
            "ports": [{"name": "verbund", "port": PORT}],
        },
    }


def _policy(name: str) -> dict[str, Any]:
    """Workers exchange tensors without encryption or proof of who takes part: nobody else reaches them."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": {_LABEL: name}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {_LABEL: name}}}]}],
        },
    }


def _job(name: str, job: str, asked: Kubernetes, pods: int, volume: dict[str, Any], commands: str) -> dict[str, Any]:
    """One Job.

    Args:
        name: of all objects together.
        job: this one's name.
        asked: see there.
        pods: how many.
        volume: what is mounted where they work.
        commands: what each runs.
    """
    resources: dict[str, Any] = {"cpu": asked.cpus, "memory": asked.memory, "nvidia.com/gpu": asked.gpus}
    resources = {key: value for key, value in resources.items() if value is not None}
    container: dict[str, Any] = {
        "name": "verbund",
        "image": asked.image,
        "command": ["/bin/sh", "-c", commands],
        "workingDir": asked.mount,
        "env": [
            {"name": "VERBUND_SECRET_FILE", "value": str(_SECRET / "secret")},
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [{"name": "verbund", "containerPort": PORT}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "work", "mountPath": asked.mount},
            {"name": "secret", "mountPath": str(_SECRET), "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if resources:
        container["resources"] = {"limits": resources, "requests": resources}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": asked.grace,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "fsGroup": _USER},
        "containers": [container],
        "volumes": [
            {"name": "work", **volume},
            {"name": "secret", "secret": {"secretName": f"{name}-secret", "defaultMode": 0o440}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    failures = {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": "verbund", "operator": "In", "values": [_FAILED, _INPUT_WRONG]},
            },
        ]
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": 10 * pods,
            "podFailurePolicy": failures,
            "template": {"metadata": {"labels": {"app.kubernetes.io/name": "verbund", _LABEL: name}}, "spec": pod},
        },
    }


def _join(address: str, asked: Kubernetes, slots: int) -> str:
    return f"verbund join {address}:{PORT} --slots {slots} --grace {max(1, asked.grace - 10)}"


def _joins(name: str, asked: Kubernetes, slots: int) -> str:
    """What each pod runs beside the head."""
    folder = "" if asked.shared else f" --folder {shlex.quote(asked.mount)}"
    return f"exec {_join(f'{name}-0.{name}', asked, slots)} --within 3600{folder}\n"


def _head(job: Job, name: str, file: Path, asked: Kubernetes, slots: int, arguments: Sequence[tuple[str, str]]) -> str:
    """What the head runs: the command, and what joins it."""
    run = f"runs/{name}"
    settings = {
        "cluster.kind": "external",
        "cluster.listen": f"0.0.0.0:{PORT}",
        "cluster.nodes": asked.nodes,
        "cluster.join_file": f"{asked.mount}/{run}.join",
    }
    if job.data.cache is None:
        settings["data.cache"] = f"{asked.mount}/cache"  # outlives the pod
    words = [shlex.join(pair) for pair in arguments]
    words += [f"--set {shlex.quote(f'{key}={value}')}" for key, value in settings.items()]
    return (
        "set -u\n"
        f"{_join('127.0.0.1', asked, slots)} --address \"$(hostname -i | cut -d' ' -f1)\" &\n"
        f"if [ -e {run}/job.toml ]; then\n"
        f"  exec verbund resume {run} {' '.join(words)}\n"
        "fi\n"
        f"exec verbund train {shlex.quote(file.name)} --run {run} {' '.join(words)}\n"
    )
