"""Saving and loading a checkpoint from a host that does not see the run's folder, against one that does.

    python bench/files_apart.py [--mb 256] [--rounds 3]

A process writes `--mb` megabytes of tensors as its part of a checkpoint, reads them back whole, and reads of each
tensor the half of its columns: over loopback inside TLS from the owner's file service, a process of its own, and by the
path. Both end on the same disk, synced and hashed. One JSON line: seconds (medians), and bytes that the service moved
for the columns as a share of the whole.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from verbund import checkpoint
from verbund.checkpoint import Checkpoint, Piece, write_part
from verbund.cluster.file_service import FileService
from verbund.comm.files import Line, Location, Remote
from verbund.comm.rendezvous import Listener, Meeting
from verbund.comm.wire import WireError

WIDTH = 1024


def own(folder: str, pipe: Connection) -> None:
    """The owner's process: serves until it is told to end, and tells on request what it has moved."""
    service, listener = FileService(), Listener(Meeting.at("127.0.0.1", 30.0))
    service.open(Path(folder))
    pipe.send(listener.meeting.record())

    def accept() -> None:
        while True:
            try:
                accepted = listener.accept()
            except WireError:
                continue
            if accepted is not None:
                service.serve(accepted[0])

    threading.Thread(target=accept, daemon=True).start()
    while pipe.recv() != "end":
        pipe.send(service.bytes)


def timed(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = arguments.mb * 1_000_000 // (4 * WIDTH * 4)
    pieces = [Piece.whole("parameters", f"w{number}", torch.rand(rows, WIDTH)) for number in range(4)]
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        here = Path(scratch).resolve() / "checkpoints"
        here.mkdir()
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=own, args=(str(here.parent), theirs))
        process.start()
        line = Line(Meeting.of(ours.recv()))
        far = Remote(line, str(here))
        places: dict[str, Location] = {"apart": far, "shared": here}
        share = 0.0
        for step in range(1, 2 * arguments.rounds + 1):
            name = "apart" if step % 2 else "shared"
            place = places[name]
            parts: list[dict[str, object]] = []
            folder = checkpoint.partial_folder(place, step)
            save = timed(lambda f=folder, p=parts: p.append(write_part(f, 0, pieces)))  # type: ignore[misc]
            path = checkpoint.commit(here, step, parts, {})
            with Checkpoint.open(place / path.name, verify=False) as saved:
                load = timed(lambda s=saved: [s.read("parameters", piece.name).sum() for piece in pieces])  # type: ignore[misc]
                ours.send("count")
                before = ours.recv()
                half = timed(
                    lambda s=saved: [  # type: ignore[misc]
                        s.read("parameters", piece.name, (0, 0), (rows, WIDTH // 2)).sum() for piece in pieces
                    ]
                )
                ours.send("count")
                if name == "apart":
                    share = (ours.recv() - before) / (16 * rows * WIDTH)
                else:
                    ours.recv()
            for what, seconds in (("save", save), ("load", load), ("columns", half)):
                found.setdefault(f"{what} {name}", []).append(seconds)
        line.close()
        ours.send("end")
        process.join(10)
        process.kill()
    medians = {key: round(statistics.median(values), 3) for key, values in found.items()}
    print(json.dumps({"mb": arguments.mb, **medians, "columns share": round(share, 4), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
