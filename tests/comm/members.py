"""Small groups of processes for tests: forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from verbund.comm.collectives import Group
from verbund.comm.shared_memory import identity

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["verbund.comm.collectives"])


@dataclass
class Member:
    process: BaseProcess
    connection: Connection

    def result(self, seconds: float = 30.0) -> Any:
        """What its function returned, or told.

        Raises:
            RuntimeError: with the error's text and trace, if there was one.
        """
        assert self.connection.poll(seconds), "a member said nothing"
        kind, value = self.connection.recv()
        if kind == "failed":
            raise RuntimeError(value)
        return value


def start(
    folder: Path,
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 20.0,
    hosts: list[str] | None = None,
    crippled: Callable[[int], None] | None = None,
) -> list[Member]:
    """Starts `function(group, tell, *arguments)` in `world` processes; `tell` sends a value to the test.

    Args:
        folder: where they meet.
        world: how many.
        function: of a module's top level.
        arguments: of it.
        timeout: of the group.
        hosts: on which host each says that it is; all on this one if not given.
        crippled: called first in each, with its rank.
    """
    members = []
    store = folder / f"store-{len(list(folder.iterdir()))}"
    store.touch()
    for rank in range(world):
        ours, theirs = _CONTEXT.Pipe()
        host = hosts[rank] if hosts else None
        process = _CONTEXT.Process(
            target=_live, args=(theirs, str(store), rank, world, timeout, host, crippled, function, arguments)
        )
        process.start()
        theirs.close()
        members.append(Member(process, ours))
    return members


def run(folder: Path, world: int, function: Callable[..., Any], *arguments: Any, **more: Any) -> list[Any]:
    """The results, by rank."""
    members = start(folder, world, function, *arguments, **more)
    try:
        wait([member.connection for member in members], 120.0)
        return [member.result(120.0) for member in members]
    finally:
        for member in members:
            member.process.kill()
            member.process.join()


def _live(
    connection: Connection,
    store: str,
    rank: int,
    world: int,
    timeout: float,
    host: str | None,
    crippled: Callable[[int], None] | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        if host is not None:
            identity.host = lambda: host
        if crippled is not None:
            crippled(rank)
        group = Group(Path(store), rank, world, torch.device("cpu"), timeout)
        connection.send(("done", function(group, lambda value: connection.send(("told", value)), *arguments)))
    except BaseException as error:
        connection.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    connection.recv()  # until the test is over: a member that has left is another matter
