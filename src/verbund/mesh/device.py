"""Where a worker computes."""

from __future__ import annotations

import os

import torch

from verbund.errors import InputError


def choose(rank: int, workers: int) -> torch.device:
    """A GPU of its own per worker where there are any, else the CPU.

    Raises:
        InputError: if there are GPUs, but fewer than workers.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if workers > count:
        raise InputError(
            f"{workers} workers, but {count} GPUs",
            where="strategy.mesh",
            fix="Use as many workers as GPUs, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU",
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(setting: int, processes: int) -> int:
    """Sets the threads of this process's operations: `setting`, or a fair share of the cores if it is 0."""
    threads = setting or max(1, cores() // processes)
    torch.set_num_threads(threads)
    return threads
