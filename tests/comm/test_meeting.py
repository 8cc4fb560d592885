"""Members that fall silent while they meet, as the processes of a machine without power do."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from comm.members import _CONTEXT
from verbund.comm.collectives import Group
from verbund.comm.peer_lost import PeerLost
from verbund.comm.sockets import Sockets

SILENT = 60.0


def _meet(rank: int, store: str, line: Connection) -> None:
    sockets = Sockets()
    gather = Group.all_gather_arrays

    def first(group: Group, *arguments: Any) -> Any:
        line.send("connected")
        if rank == 1:
            time.sleep(SILENT)  # its sockets stay open, and nothing comes of it any more
        return gather(group, *arguments)

    def cut() -> None:
        line.recv()
        sockets.shut()

    Group.all_gather_arrays = first  # type: ignore[method-assign]
    threading.Thread(target=cut, daemon=True).start()
    try:
        Group(Path(store), rank, 2, torch.device("cpu"), SILENT, sockets=sockets)
        line.send("met")
    except PeerLost as error:
        line.send(str(error))


def test_a_member_that_falls_silent_while_they_meet(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    lines, processes = [], []
    for rank in range(2):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_meet, args=(rank, str(tmp_path / "store"), theirs))
        process.start()
        lines.append(ours)
        processes.append(process)
    try:
        for line in lines:
            assert line.poll(30)
            assert line.recv() == "connected"
        assert not lines[0].poll(0.3)  # by itself it would wait for the other
        lines[0].send("cut")
        assert lines[0].poll(SILENT / 4)
        assert "the first meeting broke off" in lines[0].recv()
    finally:
        for process in processes:
            process.kill()
