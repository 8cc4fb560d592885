"""A GPT block divided over 2 workers: our cut modules against torch's `parallelize_module` on DTensor, over gloo.

    python bench/tensor_parallel.py [--hidden 1024] [--rounds 7]

Both sides cut the same block in the same processes and take turns, forward and backward; the peer's plan is that of
torch's own tutorial (column and row parallel linear layers, local outputs in between). Prints one JSON line: milliseconds
of a step (medians over the rounds, of the slower worker), and the ratio ours ÷ peer's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from verbund.comm.collectives import Group
from verbund.mesh.tensor import layers
from verbund.mesh.tensor.exchange import Axis
from verbund.mesh.tensor.plan import plan

WORKERS, HEAD = 2, 64
STEPS = 5


class Block(nn.Module):
    """A pre-norm transformer block; the number of heads follows from the projections' width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def ours(hidden: int, group: Group) -> nn.Module:
    block = Block(hidden)
    heads = {"units": hidden // HEAD}
    given = {name: {"cut": "column", **heads} for name in "qkv"}
    given |= {"out": {"cut": "row", **heads}, "up": {"cut": "column"}, "down": {"cut": "row"}}
    cuts, _, _ = layers.apply(block, plan(block, given), Axis(group))
    shares = {id(p): nn.Parameter(cuts[id(p)].share(p.data)) for p in block.parameters() if id(p) in cuts}
    layers.replace_parameters(block, shares)
    return block


def peers(hidden: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORKERS,))
    column = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    return parallelize_module(Block(hidden), mesh, {**column, "out": RowwiseParallel(), "down": RowwiseParallel()})


def step(block: nn.Module, x: Tensor) -> Tensor:
    block.zero_grad(set_to_none=True)
    output: Tensor = block(x)
    output.square().mean().backward()
    return output


def work(rank: int, folder: Path, hidden: int, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    group = Group(folder / "ours", rank, WORKERS, torch.device("cpu"), 60.0)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "peer"), WORKERS), rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    block = ours(hidden, group)
    torch.manual_seed(0)
    peer = peers(hidden)
    x = torch.randn(8, 128, hidden, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(step(block, x), step(peer, x), rtol=1e-4, atol=1e-5)
    taken: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(2 * rounds):
        name, side = (("ours", block), ("peer", peer))[number % 2]
        group.all_reduce(torch.zeros(1), "a barrier")
        start = time.perf_counter()
        for _ in range(STEPS):
            step(side, x)
        slowest = torch.tensor([(time.perf_counter() - start) / STEPS])
        group.all_reduce(slowest, "the slowest worker", maximum=True)
        taken[name].append(1e3 * float(slowest))
    if rank == 0:
        mine, theirs = (statistics.median(taken[name]) for name in ("ours", "peer"))
        print(
            json.dumps(
                {
                    "bench": "tensor_parallel",
                    "workers": WORKERS,
                    "hidden": hidden,
                    "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                    "milliseconds": {"ours": round(mine, 1), "peer": round(theirs, 1), "ratio": round(mine / theirs, 3)},
                }
            ),
            flush=True,
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(WORKERS):
            if not (pid := os.fork()):
                status = 1
                try:
                    work(rank, Path(folder), arguments.hidden, arguments.rounds)
                    status = 0
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            workers.append(pid)
        failed = [os.waitpid(pid, 0)[1] for pid in workers]
    sys.exit(int(any(failed)))


if __name__ == "__main__":
    main()
