"""Mirrors: what a worker holds, copied every so many steps to memory that outlives it.

The memory is an arena (`comm/shared_memory/arena.py`), which the worker's neighbours on its host map: it is there as
long as one of them lives. Each worker has two mirrors in it, so that while one is written the other is whole; one
counts once its step is written into the arena's first page, after all else. Workers agree upon each step, and a mirror
is whole before the next update; so of the newest two mirrored steps one is whole everywhere, whoever dies when. That
of a worker without neighbours goes to another host (`mirror_transfer.py`).

Copying goes on in a thread beside the next step's forward and backward pass, which change none of it but running
statistics; these are copied at once. (Wang et al., "GEMINI", SOSP 2023, keeps such checkpoints in the memory of peers.)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.checkpoint.piece import dtype_name
from verbund.cluster.worker import Worker
from verbund.comm.shared_memory import identity
from verbund.comm.shared_memory.arena import Arena, Memory, Neighbour, NoRoom
from verbund.comm.shared_memory.identity import Unavailable
from verbund.job import Job
from verbund.mesh.groups import Groups
from verbund.mesh.state import Tensors
from verbund.stage.mirror_transfer import MirrorTransfer
from verbund.stage.refill import MIRRORS, mirror_every

# In an arena's first page, of each mirror: its place, the bytes there, whose it is, its step + 1; 0: it is not whole.
_DIRECTORY, _ENTRY, _ENTRIES = 128, 4, 64
_ALIGN = 64
_LENGTH = 8  # bytes of a mirror that say how long its header is


class Mirrors:
    """This worker's mirrors, and its neighbours'.

    Args:
        every: steps between two mirrors.
        note: is told why there are none, if so.
    """

    def __init__(self, every: int, note: Callable[[str], None]) -> None:
        self.every = every
        self._rank, self._note = 0, note
        self._arena: Arena | None = None
        self._host = ""
        self._memories: dict[int, list[Memory]] = {}
        self._copying: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._content: Tensor | None
        self._taken = 0  # mirrors since all have met
        self._step, self._content, self._sends = 0, None, False
        self._transfer: MirrorTransfer | None = None
        try:
            self._host, self._arena = identity.host(), Arena()
        except Unavailable as error:
            self._give_up(str(error))

    @staticmethod
    def of(worker: Worker, job: Job) -> Mirrors | None:
        """Those of a training, if it has any."""
        every = mirror_every(job)
        return Mirrors(every, lambda text: worker.send("note", text=f"{worker.spec.name}: {text}")) if every else None

    def meet(self, groups: Groups, rank: int) -> None:
        """Maps the memory of those of this host. All workers call it together, whenever they have met.

        Args:
            groups: of all.
            rank: this worker's place among them, which it keeps.
        """
        self._join()
        self._rank = rank
        self._taken, self._sends = 0, False
        if self._arena is not None and self._arena not in (known := self._memories.setdefault(rank, [])):
            known.append(self._arena)
        record = self._arena.record() | {"host": self._host} if self._arena is not None else {}
        raw = np.frombuffer(json.dumps(record).encode(), np.uint8)
        hosts = []
        for other, arrays in enumerate(groups.gather({"record": raw}, "the meeting of mirrors")):
            record = json.loads(arrays["record"].tobytes())
            hosts.append(record.get("host", ""))
            if other == rank or self._arena is None or record.get("host") != self._host:
                continue
            known = self._memories.setdefault(other, [])
            if all(memory.token() != record["token"] for memory in known):
                try:
                    neighbour = Neighbour.of(record)
                except Unavailable:
                    continue  # it is not there any more, or cannot be mapped: its mirrors are others' to read
                neighbour.close()
                known.append(neighbour.memory)
        first = rank - groups.island.rank
        self._transfer = MirrorTransfer(groups, hosts[first : first + groups.island.world], first)

    def due(self, step: int) -> bool:
        """Whether a mirror is due after so many steps."""
        return step % self.every == 0

    def take(self, step: int, state: dict[str, Any], tensors: Tensors) -> None:
        """Starts copying; `finish` comes before anything of `tensors` but the running statistics changes. All workers
        do so after the same step.

        Args:
            step: how many are done.
            state: the training's own, JSON values.
            tensors: all that this worker holds after that step.
        """
        self._join()
        self._step, self._content, self._sends = step, None, True
        self._taken += 1
        if self._taken == 2:  # all have one of their own now: the memory of those that are gone is given back
            self._memories = {rank: known[-1:] for rank, known in self._memories.items()}
        header, places, size = _laid_out(state, tensors)
        room = self._room(self._rank, step, size)
        if room is None:
            return
        content, whole = room
        target = content.numpy()
        target[: len(header)] = np.frombuffer(header, np.uint8)
        pairs = []
        for (key, values), at in zip(tensors.items(), places, strict=True):
            source = _bytes(values)
            if key[0] == "buffers":
                target[at : at + len(source)] = source
            else:
                pairs.append((target[at : at + len(source)], source))

        def copy() -> None:
            try:
                for to, source in pairs:
                    np.copyto(to, source)  # without Python's lock
                whole()
            except BaseException as error:
                self._failure = error

        self._content = content
        self._copying = threading.Thread(target=copy, name="mirror", daemon=True)
        self._copying.start()

    def finish(self, step: int | None = None) -> None:
        """Waits until the mirror under way is whole, and starts what is to be sent of it; that is waited for by the
        step of the next one at the latest.

        Args:
            step: that all are about to agree upon; None: whatever is sent is to be there at once.

        Raises:
            PeerLost: if a worker to which something is sent, or from which it comes, is lost.
        """
        self._join()
        if self._transfer is None:
            return
        if self._sends:
            self._sends = False
            self._transfer.start(self._content, self._step, self._room)
        if step is None or step % self.every == 0:
            self._transfer.finish()

    def _join(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error

    def _room(self, owner: int, step: int, size: int) -> tuple[Tensor, Callable[[], None]] | None:
        """Memory for a mirror, in the place of the oldest of this worker's; and what makes it whole."""
        if self._arena is None:
            return None
        words = self._arena.words(_DIRECTORY, _ENTRY * _ENTRIES)
        entries = [i for i in range(_ENTRIES) if words[_ENTRY * i + 1] and words[_ENTRY * i + 2] == owner]
        if len(entries) < MIRRORS:
            entries = [i for i in range(_ENTRIES) if not words[_ENTRY * i + 1]]
        if not entries:
            return None
        at = _ENTRY * min(entries, key=lambda i: words[_ENTRY * i + 3])
        words[at + 3] = 0
        if words[at + 1] < size:
            try:
                words[at], words[at + 1] = self._arena.take(size), size
            except NoRoom as error:
                self._give_up(str(error))
                return None
        words[at + 2] = owner

        def whole() -> None:
            words[at + 3] = step + 1

        return self._arena.view(words[at], size, torch.uint8), whole

    def back_to(self, step: int) -> None:
        """All have gone back to a mirrored step: what came after it is nobody's any more."""
        if self._arena is not None:
            words = self._arena.words(_DIRECTORY, _ENTRY * _ENTRIES)
            for at in range(0, _ENTRY * _ENTRIES, _ENTRY):
                if words[at + 3] > step + 1:
                    words[at + 3] = 0

    def steps(self) -> dict[int, list[int]]:
        """By worker the mirrored steps that are whole and can be read here."""
        found: dict[int, set[int]] = {}
        for memory in self._readable():
            for owner, step in _whole(memory):
                found.setdefault(owner, set()).add(step)
        return {owner: sorted(steps) for owner, steps in found.items()}

    def read(self, rank: int, step: int) -> Tensor:
        """A mirror's bytes, as they lie in memory; see `unpacked`."""
        for memory in self._readable():
            if (index := _whole(memory).get((rank, step))) is not None:
                place, size = memory.words(_DIRECTORY + 8 * _ENTRY * index, 2)
                return memory.view(place, size, torch.uint8)
        raise KeyError(f"worker {rank} has no mirror of step {step}")

    def _readable(self) -> list[Memory]:
        return [memory for known in self._memories.values() for memory in known]

    def _give_up(self, why: str) -> None:
        self._arena = None
        self._memories.clear()
        self._note(f"no mirrors: {why}. After a loss training goes on from a checkpoint")


def unpacked(content: Tensor) -> tuple[dict[str, Any], Tensors]:
    """What a mirror has: the training's own state, and the tensors, which lie in `content`'s memory."""
    raw = content.numpy()
    length = int.from_bytes(raw[:_LENGTH].tobytes(), "little")
    header = json.loads(raw[_LENGTH : _LENGTH + length].tobytes())
    tensors: Tensors = {}
    for kind, name, dtype, shape, at in header["tensors"]:
        kind_of = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind_of.itemsize
        tensors[kind, name] = content[at : at + size].view(kind_of).view(shape)
    return header["state"], tensors


def _whole(memory: Memory) -> dict[tuple[int, int], int]:
    """The whole mirrors in an arena: whose, and of which step, to where in the directory."""
    words = memory.words(_DIRECTORY, _ENTRY * _ENTRIES)
    return {(words[_ENTRY * i + 2], words[_ENTRY * i + 3] - 1): i for i in range(_ENTRIES) if words[_ENTRY * i + 3]}


def _laid_out(state: dict[str, Any], tensors: Tensors) -> tuple[bytes, list[int], int]:
    """A mirror's header, where each tensor lies, and its bytes in all."""
    room = _LENGTH + len(json.dumps(state)) + sum(len(name) + 200 for _, name in tensors)
    at = -(-room // _ALIGN) * _ALIGN
    places, described = [], []
    for (kind, name), values in tensors.items():
        places.append(at)
        described.append([kind, name, dtype_name(values.dtype), list(values.shape), at])
        at += -(-values.nbytes // _ALIGN) * _ALIGN
    text = json.dumps({"state": state, "tensors": described}).encode()
    return len(text).to_bytes(_LENGTH, "little") + text, places, max(at, _ALIGN)


def _bytes(values: Tensor) -> Any:
    """A tensor's bytes: its own memory where that can be, else a copy."""
    return values.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
