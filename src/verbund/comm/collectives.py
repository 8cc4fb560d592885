"""Collectives between the workers of an island: through shared memory inside a host, else over gloo or NCCL.

Every call names what it is for. A peer's death surfaces as `PeerLost`, which is never the first cause: the supervisor
knows which process died and says so.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verbund.comm.peer_lost import PeerLost
from verbund.comm.shared_memory.group import SharedGroup, Started
from verbund.comm.shared_memory.hierarchy import Hierarchy
from verbund.comm.shared_memory.host import Host
from verbund.comm.shared_memory.reduction import Reducer
from verbund.comm.sockets import Sockets

# The classes below the functions of torch.distributed, of which its stubs know only some.
c10d: Any = dist

Work = Any
"""torch's handle of a collective under way, with `wait()`, or one through shared memory."""


# gloo's default of 2 takes a fifth longer over an all-reduce of 1 MB between two busy processes.
_THREADS = 4
_CONNECT_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_SHORT = 1016
"""Bytes of a record that need no second all-gather."""


class Group:
    """Workers of one island and what they do together.

    A group of one does nothing and costs nothing. Tensors on the CPU go through shared memory where all members share
    a host; all-reduces use it inside each host where some do. gloo does the rest, and takes over where memory cannot be
    shared; `note` says why. gloo's sockets are bound to `address`.

    All members start a group's collectives in the same order. A collective that was started goes on while this process
    waits for another one, of whichever group. One thread uses a group and all its parts.

    Args:
        store: torch's, through which all members of this generation find each other; or the path of a file for one.
        rank: this process's number, 0 … world − 1.
        world: how many there are.
        device: where the tensors lie; `cuda` uses NCCL for them and gloo for what stays on the host.
        timeout: seconds after which a collective gives up by itself.
        address: of this host; loopback if all members are on it. gloo has no TLS: between hosts the network must be
            trusted.
        sockets: to which gloo's are added; whoever shuts them ends what goes on over the network, the meeting included,
            and who waits for it meets `PeerLost`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        device: torch.device,
        timeout: float,
        address: str = "127.0.0.1",
        sockets: Sockets | None = None,
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._timeout = timeout
        self._address = address
        self._gloo: Any = None
        self._nccl: Any = None
        self._store: Any = None
        self._root = store  # a store of Python's is of no use to torch once Python has let go of it
        self._host: Host | None = None
        self._numbers = list(range(world))  # the members' in the island
        self._sockets = sockets or Sockets()  # gloo's, those of all parts among them
        self._shared: SharedGroup | None = None
        self._hierarchy: Hierarchy | None = None
        self.note: str | None = None
        if world > 1:
            assert store is not None, "a group of several needs a store"
            self._store = c10d.FileStore(str(store), world) if isinstance(store, Path) else store
            try:
                arena, record = Host.described()
                records = self._meet(record)
                self._host, self.note = Host.met(rank, arena, records)
                self._share()
            except PeerLost:
                self.leave()
                raise

    @staticmethod
    def apart(rank: int, world: int, device: torch.device) -> Group:
        """A group that is connected to nobody: for what only has to know its place."""
        group = Group(None, 0, 1, device, 0.0)
        group.rank, group.world = rank, world
        return group

    def part(self, name: str, ranks: list[int]) -> Group:
        """A group of some of this one's workers, this one among them.

        Every worker of `ranks` calls it, with the same list; groups that share a worker have different names.

        Args:
            name: of the group, e.g. the axis.
            ranks: numbers in this group, in the order in which they count in the new one.
        """
        part = Group(None, 0, 1, self.device, self._timeout, self._address)
        part.rank, part.world = ranks.index(self.rank), len(ranks)
        if part.world > 1:
            part._root = self._root
            part._store = c10d.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}/", self._store)
            part._host, part._numbers = self._host, [self._numbers[rank] for rank in ranks]
            part._sockets = self._sockets
            part._meet({})
            part._share()
        return part

    def _meet(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Connects all members once they are there.

        Args:
            record: plain values that this one tells the others.

        Returns:
            those of all, by rank.
        """
        limit = timedelta(seconds=self._timeout)
        options = c10d.ProcessGroupGloo._Options()
        # Once all are there they connect at once, or one of them has gone again.
        options._timeout = min(limit, timedelta(seconds=_CONNECT_SECONDS))
        options._threads = _THREADS
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._address)]
        try:
            self._store.set(f"here/{self.rank}", json.dumps(record))
            self._store.wait([f"here/{rank}" for rank in range(self.world)], limit)
            records = [json.loads(self._store.get(f"here/{rank}")) for rank in range(self.world)]
            store = c10d.PrefixStore("gloo/", self._store)
            with self._sockets.opened():
                self._gloo = self._connected(lambda: c10d.ProcessGroupGloo(store, self.rank, self.world, options))
            self._gloo._set_default_timeout(limit)
            if self.device.type == "cuda":
                nccl = c10d.ProcessGroupNCCL.Options()
                nccl._timeout = limit
                store = c10d.PrefixStore("nccl/", self._store)
                self._nccl = c10d.ProcessGroupNCCL(store, self.rank, self.world, nccl)
            return records
        except RuntimeError as error:
            raise PeerLost(f"the {self.world} workers did not meet: {_first_line(error)}") from error

    def _connected(self, connect: Callable[[], Any]) -> Any:
        """What `connect` gives; it is left to its own timeout where the store says that nobody waits any more, as one
        of those that it waits for has gone."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(connect())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run, name="connecting", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            self._store.check(["here/0"])
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Plain values of all members, by rank."""
        raw = np.frombuffer(json.dumps(record).encode(), np.uint8)
        return [
            json.loads(arrays["record"].tobytes())
            for arrays in self.all_gather_arrays({"record": raw}, "the first meeting")
        ]

    def _share(self) -> None:
        """Prepares what members on one host do together through memory."""
        if self._host is None:
            return
        companions = self._host.companions(self._numbers)
        if len(companions) == self.world:
            return
        channels, note = self._host.channels(self._numbers, 1 if len(companions) == 1 else 2, self._exchange)
        self.note = self.note or note
        if note is not None:
            self._host = None
            return
        groups = [SharedGroup(self._host, channel, self._timeout) for channel in channels]
        if len(companions) == 1:
            (self._shared,) = groups
            return
        leaders = [self._numbers.index(host[0]) for host in companions]
        between = self.part("leaders", leaders)._polled_all_reduce if self.rank in leaders else None
        inside = (groups[0], groups[1]) if groups else None
        self._hierarchy = Hierarchy(self._host, inside, between, self._timeout)

    def _polled_all_reduce(self, tensor: Tensor, maximum: bool) -> Callable[[], bool]:
        """Starts an all-reduce; what it gives says whether that is over."""
        work: Any = self.start_all_reduce(tensor, maximum)

        def over() -> bool:
            if not work.is_completed():
                return False
            _landed(work.wait, "an all-reduce between hosts")
            return True

        return over

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Flat memory on this group's device, the best there is for its collectives. All members call it together.

        It is not given back before the process ends: for what lives as long as the work.
        """
        shared = self._shared.empty(count, dtype) if self._shared is not None and self.device.type == "cpu" else None
        return torch.empty(count, dtype=dtype, device=self.device) if shared is None else shared

    @property
    def root(self) -> int:
        """The same number for all groups of this process that were made from one."""
        return id(self._sockets)

    @property
    def shared_bytes(self) -> int:
        """Bytes that this process has handed over to collectives through shared memory, in all groups."""
        return 0 if self._host is None else self._host.moved

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> Work | None:
        """Starts adding up `tensor` over all workers, in place; `finish` waits for it."""
        if self.world == 1:
            return None
        if (path := self._shared or self._hierarchy) is not None and _adds(tensor):
            return path.start_all_reduce(tensor, maximum)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX if maximum else c10d.ReduceOp.SUM
        return self._started(lambda: self._backend(tensor).allreduce([tensor], options), "an all-reduce")

    def finish(self, work: Work | None, what: str) -> None:
        """Waits for a collective under way.

        Raises:
            PeerLost: if a peer is gone or the timeout passed.
        """
        if work is None:
            return
        if isinstance(work, Started):
            work.finish(what)
            return
        if self._host is not None and self._host.progress.pending:
            self._host.progress.beside(lambda: _landed(work.wait, what))
        else:
            _landed(work.wait, what)

    def all_reduce(self, tensor: Tensor, what: str, maximum: bool = False) -> None:
        """Adds up (or takes the maximum of) `tensor` over all workers, in place."""
        self.finish(self.start_all_reduce(tensor, maximum), what)

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """The tensors of all workers, of equal shape and dtype, by rank."""
        if self.world == 1:
            return [tensor]
        if self._shared is not None and SharedGroup.takes(tensor):
            whole = tensor.new_empty((self.world, *tensor.shape))
            self.finish(self._shared.start_all_gather(whole, tensor), what)
            return list(whole)
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        self.finish(self._started(lambda: self._backend(tensor).allgather([gathered], [tensor]), what), what)
        return gathered

    def start_all_gather(self, whole: Tensor, share: Tensor) -> Work | None:
        """Starts gathering the equal shares of all workers, by rank; `finish` waits for it.

        Args:
            whole: contiguous, as many elements as all shares together; is overwritten.
            share: this worker's, contiguous.
        """
        if self.world == 1:
            whole.view(-1).copy_(share.view(-1))
            return None
        if self._shared is not None and SharedGroup.takes(whole):
            return self._shared.start_all_gather(whole, share)
        return self._started(
            lambda: self._backend(whole)._allgather_base(whole.view(-1), share.view(-1)), "an all-gather"
        )

    def start_reduce_scatter(self, target: Tensor, values: Tensor) -> Work | None:
        """Starts adding up the `rank`-th of the `world` equal parts of all workers' `values`, in the order of the
        workers; `finish` waits for it.

        Args:
            target: contiguous, as many elements as one part; is overwritten.
            values: this worker's, contiguous; they stay as they are.
        """
        if self.world == 1:
            target.view(-1).copy_(values.view(-1))
            return None
        if self._shared is not None and _adds(values):
            return self._shared.start_reduce_scatter(target, values)
        received = torch.empty_like(values).view(self.world, -1)
        return _Added(self.start_all_to_all(received, values), target, received)

    def start_all_to_all(self, received: Tensor, sent: Tensor) -> Work | None:
        """Starts sending the r-th of `world` equal parts of `sent` to worker r; `received` gets what the others sent,
        by rank. Both contiguous and of equal size. `finish` waits for it."""
        if self.world == 1:
            received.copy_(sent)
            return None
        return self._started(
            lambda: self._backend(sent).alltoall_base(received.view(-1), sent.view(-1), [], []), "an all-to-all"
        )

    def start_broadcast(self, tensor: Tensor, root: int) -> Work | None:
        """Starts giving worker `root`'s values to all, in place; `finish` waits for it."""
        if self.world == 1:
            return None
        if self._shared is not None and SharedGroup.takes(tensor):
            return self._shared.start_broadcast(tensor, root)
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self._started(lambda: self._backend(tensor).broadcast([tensor], options), "a broadcast")

    def barrier(self, what: str) -> None:
        """Waits until all workers are here."""
        if self._shared is not None:
            self.finish(self._shared.start_barrier(), what)
        else:
            self.all_reduce(torch.zeros(1), what)

    def start_send(self, tensor: Tensor, to: int, tag: int = 0) -> Work | None:
        """Starts sending a contiguous tensor to worker `to`; it must stay as it is until `finish`."""
        return self._started(lambda: self._backend(tensor).send([tensor], to, tag), "a send")

    def start_receive(self, tensor: Tensor, source: int, tag: int = 0) -> Work | None:
        """Starts receiving what worker `source` sends under `tag`, of this shape and dtype; `finish` waits for it."""
        return self._started(lambda: self._backend(tensor).recv([tensor], source, tag), "a receive")

    def receive(self, tensor: Tensor, source: int, tag: int, what: str) -> None:
        """Waits for what worker `source` sends under `tag`; shape and dtype must be what was sent."""
        self.finish(self.start_receive(tensor, source, tag), what)

    def _started(self, start: Callable[[], Any], what: str) -> Any:
        try:
            return start()
        except RuntimeError as error:
            raise PeerLost(f"{what} could not start: {_first_line(error)}") from error

    def all_gather_arrays(self, arrays: dict[str, np.ndarray[Any, Any]], what: str) -> list[dict[str, Any]]:
        """The named arrays of all workers, by rank; names, types and shapes may differ between workers."""
        if self.world == 1:
            return [arrays]
        described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        header = json.dumps(described).encode()
        raw = len(header).to_bytes(8, "little") + header
        raw += b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        # Most records are short: all of one fits into what is told of it first.
        first = torch.zeros(8 + _SHORT, dtype=torch.uint8)
        head = len(raw).to_bytes(8, "little") + raw[:_SHORT]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        told = [t.numpy().tobytes() for t in self.all_gather(first, what)]
        sizes = [int.from_bytes(t[:8], "little") for t in told]
        longest = max(sizes) - _SHORT
        if longest <= 0:
            return [_arrays(t[8 : 8 + n]) for t, n in zip(told, sizes, strict=True)]
        rest = torch.zeros(longest, dtype=torch.uint8)
        if len(raw) > _SHORT:
            rest[: len(raw) - _SHORT] = torch.frombuffer(bytearray(raw[_SHORT:]), dtype=torch.uint8)
        rests = [t.numpy().tobytes() for t in self.all_gather(rest, what)]
        return [_arrays((t[8:] + r)[:n]) for t, r, n in zip(told, rests, sizes, strict=True)]

    def leave(self) -> None:
        """Ends all that this process has under way with the island's workers, in whatever group made from the first.

        Whoever waits for it meets `PeerLost` at once, as if the process had ended: so the news of a loss reaches those
        that wait for others than the one that is lost. No group of these is of use to anybody any more.
        """
        if self._host is not None:
            self._host.leave()
        self._sockets.shut()

    def cut(self) -> None:
        """Breaks off what is under way, from any thread: who waits for it, here too, meets `PeerLost`."""
        self.leave()

    def close(self) -> None:
        """This process needs the group no more; what is under way is broken off."""
        self.leave()

    def _backend(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.is_cuda else self._gloo


class _Added:
    """A reduce-scatter under way over sockets: what arrived is added up when it is waited for."""

    def __init__(self, work: Any, target: Tensor, received: Tensor) -> None:
        self._work, self._target, self._received = work, target, received

    def wait(self) -> None:
        self._work.wait()
        Reducer().into(self._target.view(-1), list(self._received), False)


def _landed(wait: Callable[[], Any], what: str) -> None:
    try:
        wait()
    except RuntimeError as error:
        raise PeerLost(f"{what} broke off: {_first_line(error)}") from error


def _adds(tensor: Tensor) -> bool:
    return tensor.dtype != torch.bool and SharedGroup.takes(tensor)


def _arrays(raw: bytes) -> dict[str, Any]:
    size = int.from_bytes(raw[:8], "little")
    place = 8 + size
    arrays = {}
    for name, dtype, shape in json.loads(raw[8:place]):
        array: np.ndarray[Any, Any] = np.frombuffer(raw, dtype, int(np.prod(shape)), place).reshape(shape)
        place += array.nbytes
        arrays[name] = array
    return arrays


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].strip() if str(error) else type(error).__name__
