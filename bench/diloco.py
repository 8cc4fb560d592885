"""DiLoCo between 4 islands against synchronous training on the same tokens, on a small language model.

    python bench/diloco.py [--quick] [--steps 1500]

A GPT reads the bytes of Python's own documentation: `pydoc_data.topics` and the docstrings of the standard library,
each paragraph once, of which every 25th run of paragraphs is held out. All rows train for as many steps of the same
global batch. Synchronous training adds up gradients in every step (`exchange = "all_reduce"`). It and DiLoCo with int4
each try a grid of learning rates, and each takes its best; the other rows take DiLoCo's. `alone` is one island on its
quarter of the text and of the batch, `own data` four islands that each draw from their own quarter.

Prints a table and one JSON line: per row the validation loss and its ratio to the best synchronous one's; the bytes
that all workers send between islands, and how many times fewer they are. Those of rows that exchange parameters are
counted by the run (`exchange.bytes_with`); those of synchronous training are what the run counts for one exchange
without compression (2 (n - 1) / n times the model's bytes, of each of n workers), times the steps. The bigram model is
counted on all of the training text, with the best of several numbers added to every count.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verbund.cluster.local import LocalCluster
from verbund.cluster.process import Cluster
from verbund.job import Job
from verbund.stage import before, launch

ISLANDS, SEQUENCE, BATCH, WARM_UP = 4, 32, 32, 30
RATES = (8e-3, 1.6e-2, 3.2e-2)
STEPS, EVERY, OUTER = 1500, 16, {"outer_lr": 0.7, "outer_momentum": 0.6}
HELD_OUT, RUN_OF_PARAGRAPHS = 25, 32
ADDED = (0.001, 0.01, 0.1, 1.0)
NOT_READ = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "site-packages"}

TASK = f"""
import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LAYERS = 32, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (p.view(batch, length, HEADS, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding({SEQUENCE}, WIDTH)
        self.near = nn.Linear(3 * WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, tokens):
        x = functional.pad(self.tokens(tokens), (0, 0, 2, 0))
        x = self.near(torch.cat([x[:, 2:], x[:, 1:-1], x[:, :-2]], -1))
        return self.head(self.norm(self.blocks(x + self.positions(torch.arange(tokens.shape[1])))))


def model():
    return GPT()
"""


@dataclass(frozen=True)
class Row:
    """A training: what it is called, its learning rate, and what differs from the synchronous one.

    Args:
        exchange: keys of `strategy.exchange`.
        compression: of what is exchanged.
        changes: other keys of the job.
        alone: one island, with its quarter of text and batch.
    """

    name: str
    rate: float
    exchange: dict[str, Any] = field(default_factory=lambda: {"name": "all_reduce"})
    changes: dict[str, Any] = field(default_factory=dict)
    alone: bool = False


# -- text ------------------------------------------------------------------------------------------------------


def write_texts(folder: Path) -> tuple[bytes, bytes]:
    """Writes `train.txt`, its first quarter `quarter.txt`, and `validation.txt`; the first and the last."""
    paragraphs = list(dict.fromkeys(p.strip("\n") for text in documentation() for p in text.split("\n\n")))
    parts: tuple[list[str], list[str]] = ([], [])
    for number, paragraph in enumerate(paragraphs):
        parts[number // RUN_OF_PARAGRAPHS % HELD_OUT == HELD_OUT - 1].append(paragraph)
    train, validation = ("\n\n".join(part).encode("ascii", "replace") for part in parts)
    (folder / "train.txt").write_bytes(train)
    (folder / "quarter.txt").write_bytes(train[: len(train) // ISLANDS])
    (folder / "validation.txt").write_bytes(validation)
    return train, validation


def documentation() -> Iterator[str]:
    """Python's topics, and the docstrings of the standard library."""
    from pydoc_data.topics import topics

    yield from topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if NOT_READ & set(file.relative_to(library).parts):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def bigram(train: bytes, validation: bytes) -> float:
    """The mean loss of a bigram model in nats: the best over what is added to every count."""
    counts = np.zeros((256, 256))
    seen, told = (np.frombuffer(text, np.uint8) for text in (train, validation))
    np.add.at(counts, (seen[:-1], seen[1:]), 1)
    losses = []
    for added in ADDED:
        logs = np.log((counts + added) / (counts + added).sum(1, keepdims=True))
        losses.append(-float(logs[told[:-1], told[1:]].mean()))
    return min(losses)


# -- training --------------------------------------------------------------------------------------------------


class Bench:
    """Trains rows in one folder."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self._number = 0
        self._one_sum = 0.0

    def train(self, row: Row) -> dict[str, Any]:
        """The figures of a row."""
        raw: dict[str, Any] = {
            "task": "task.py",
            "data": {"train": "quarter.txt" if row.alone else "train.txt", "validation": "validation.txt"},
            "train": {"objective": "next_token", "global_batch": BATCH // ISLANDS if row.alone else BATCH},
            "validate": {"every": "end"},
            "checkpoint": {"every": "end"},
            "strategy": {"islands": 1 if row.alone else ISLANDS, "exchange": row.exchange},
            "cluster": {"threads": 1},
        }
        raw["data"] |= {"sequence": SEQUENCE, "cache": str(self.folder / "cache")}
        raw["train"] |= {"steps": self.steps, "clip_norm": 1.0, "schedule": {"name": "cosine", "warmup": WARM_UP}}
        raw["train"]["optimizer"] = {"name": "adamw", "lr": row.rate}
        job = Job.build(raw, row.changes, source="bench", folder=self.folder)
        self._number += 1
        begun = time.monotonic()
        summary = launch.train(job, self.folder / f"run-{self._number}").summary
        seconds = time.monotonic() - begun
        exchange = summary["exchange"]
        figures: dict[str, Any] = {
            "row": row.name,
            "rate": row.rate,
            "loss": round(summary["metrics"]["loss"]["last"], 4),
            "seconds": round(seconds, 1),
        }
        if exchange := summary["exchange"]:
            self._one_sum = exchange["bytes_without"] / exchange["exchanges"]
            figures |= {"exchanges": exchange["exchanges"], "bytes": exchange["bytes_with"]}
        elif not row.alone:
            figures |= {"exchanges": self.steps}
        print(json.dumps(figures), file=sys.stderr, flush=True)
        return figures

    def synchronous_bytes(self) -> int:
        """What as many all-reduces of gradients send as there are steps, by the size of those that were counted."""
        return round(self._one_sum * self.steps)


@contextmanager
def warm_processes() -> Iterator[None]:
    """All trainings within the block fork their workers from one warm server."""
    warm, made = LocalCluster(preload=["verbund.stage.preload"]), before.cluster_of

    @contextmanager
    def cluster(job: Job) -> Iterator[Cluster]:
        yield warm

    before.cluster_of = cluster
    try:
        yield
    finally:
        before.cluster_of = made
        warm.close()


# -- rows ------------------------------------------------------------------------------------------------------


def rows(bench: Bench, rates: tuple[float, ...], quick: bool) -> list[dict[str, Any]]:
    """The figures of all rows, the best synchronous one first."""
    synchronous = best([bench.train(Row("all_reduce", rate)) for rate in rates])
    main = {"name": "diloco", "every": EVERY, "compression": "int4", **OUTER}
    found = best([bench.train(Row("diloco, int4", rate, main)) for rate in rates])
    rate = found["rate"]
    streaming = main | {"fragments": 3, "delay": 2}
    others = [
        Row("diloco", rate, main | {"compression": "none"}),
        Row("diloco, int8", rate, main | {"compression": "int8"}),
        Row("diloco, int4, 3 fragments, delay 2", rate, streaming),
        Row("diloco, int4, outer_momentum 0.9", rate, main | {"outer_momentum": 0.9}),
        Row("local_sgd, int4", rate, {"name": "local_sgd", "every": EVERY, "compression": "int4"}),
        Row("diloco, int4, own data", rate, main, {"data.placement": "island"}),
        Row("alone", rate, alone=True),
    ]
    if quick:
        others = [others[-1]]
    figures = [synchronous, found, *(bench.train(row) for row in others)]
    synchronous["bytes"] = bench.synchronous_bytes()
    for row in figures:
        row["loss_ratio"] = round(row["loss"] / synchronous["loss"], 4)
        if "bytes" in row:
            row["fewer_bytes"] = round(synchronous["bytes"] / row["bytes"], 1)
    return figures


def best(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the lowest loss, with the losses of all rates that were tried."""
    return {**min(figures, key=lambda row: row["loss"]), "grid": [[row["rate"], row["loss"]] for row in figures]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="fewer rates, and of the other rows the last one alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, warm_processes():
        folder = Path(name)
        train, validation = write_texts(folder)
        (folder / "task.py").write_text(TASK)
        figures = rows(Bench(folder, arguments.steps), RATES[1:2] if arguments.quick else RATES, arguments.quick)
        found = bigram(train, validation)
    print(f"{'':36} {'rate':>6} {'loss':>7} {'ratio':>6} {'MB':>8} {'fewer':>6} {'s':>6}", file=sys.stderr)
    for row in figures:
        sent, fewer = f"{row.get('bytes', 0) / 1e6:.2f}", f"{row.get('fewer_bytes', math.inf):.0f}"
        print(
            f"{row['row']:36} {row['rate']:6.3f} {row['loss']:7.4f} {row['loss_ratio']:6.3f} {sent:>8} {fewer:>6} "
            f"{row['seconds']:6.1f}",
            file=sys.stderr,
        )
    print(f"{'bigram':36} {'':6} {found:7.4f}", file=sys.stderr)
    settings = {"islands": ISLANDS, "steps": arguments.steps, "global_batch": BATCH, "sequence": SEQUENCE}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    text = {"train_bytes": len(train), "validation_bytes": len(validation), "bigram_loss": round(found, 4)}
    print(json.dumps({"bench": "diloco", "machine": machine, **settings, **text, "rows": figures}))


if __name__ == "__main__":
    main()
