"""A group whose members are joined by the wire.

A thread does the collectives in the order in which they were started; so computing goes on meanwhile. Large sums go
round a ring: each member adds its part to what came from the left and passes it on to the right, in blocks, and what is
complete goes round once more. Small ones are sent to everybody, who adds them up in the order of ranks. Either way all
members come to the same bits.
"""

from __future__ import annotations

import queue
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbund.comm.peer_lost import PeerLost
from verbund.comm.ring.meeting import Store, connect
from verbund.comm.ring.peer import Key, Peer, Sending
from verbund.comm.wire import Credentials, Message, Payload, Place, WireError

_DIRECT = 1 << 16  # bytes up to which a tensor is sent to everybody
_BLOCK = 1 << 20  # bytes that go round at a time: one is added while the next one travels
_FLUSH_SECONDS = 5.0
_ENDED = select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP


class Work:
    """A collective under way."""

    def __init__(self, name: str, do: Callable[[], None], landed: Callable[[], None] | None = None) -> None:
        self.name = name
        self.do = do
        self._landed = landed
        self.over = threading.Event()
        self.error: PeerLost | None = None

    def wait(self) -> None:
        """Waits for its end.

        Raises:
            PeerLost: naming who is gone or silent.
        """
        self.over.wait()  # each step of it has a deadline
        if self.error is not None:
            raise self.error
        if self._landed is not None:
            self._landed()
            self._landed = None


class WireGroup:
    """Members that exchange tensors over connections of their own. Those on a device go by way of the host.

    All start the group's collectives in the same order. Tensors must stay as they are until a collective is over.

    Args:
        store: through which the members find each other; reached by all.
        rank: this member's number, 0 … world − 1.
        world: how many there are.
        address: where this member listens for the others until they have come, e.g. `tcp:10.0.0.1:0`.
        credentials: why they trust each other.
        timeout: seconds after which a member that says nothing counts as lost.
        name: of the group; another one for each group and generation of a store.
        device: where the tensors lie.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        address: str = "tcp:127.0.0.1:0",
        credentials: Credentials = None,
        timeout: float = 60.0,
        name: str = "islands",
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        self.device = device or torch.device("cpu")
        self._timeout = timeout
        found = connect(store, name, rank, world, address, credentials, timeout) if world > 1 else {}
        self._peers = {other: Peer(other, connection, timeout) for other, connection in sorted(found.items())}
        self._started = 0
        self._last: Work | None = None
        self._lost: PeerLost | None = None
        self._sendings: list[Sending] = []
        """What the collective under way has sent; it is over when that has left."""
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"collectives of {name}", daemon=True)
        self._thread.start()

    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent so far, by the rank they went to."""
        return {rank: peer.connection.sent_bytes for rank, peer in self._peers.items()}

    def received_bytes(self) -> dict[int, int]:
        """Bytes received so far, by the rank they came from."""
        return {rank: peer.connection.received_bytes for rank, peer in self._peers.items()}

    def start_all_reduce(self, tensor: Tensor, maximum: bool = False) -> Work | None:
        """Starts adding up (or taking the maximum of) a contiguous tensor over all members, in place."""
        add = torch.maximum if maximum else torch.add
        flat, landed = _on_host(tensor)
        small = flat.nbytes <= _DIRECT
        do = self._reduce_directly if small else self._reduce_in_a_ring
        return self._start("an all-reduce", do, flat, add, landed=landed)

    def start_all_gather(self, whole: Tensor, share: Tensor) -> Work | None:
        """Starts gathering the equal shares of all members, by rank, into the contiguous `whole`."""
        flat, landed = _on_host(whole)
        shares = self._parts(flat)
        shares[self.rank].copy_(share.detach().view(-1))
        return self._start("an all-gather", self._gather, shares, landed=landed)

    def start_all_to_all(self, received: Tensor, sent: Tensor) -> Work | None:
        """Starts sending the r-th of `world` equal parts of `sent` to member r; `received` gets what the others sent,
        by rank. Both contiguous and of equal size."""
        flat, landed = _on_host(received)
        parts, own = self._parts(flat), self._parts(sent.cpu())
        parts[self.rank].copy_(own[self.rank])
        return self._start("an all-to-all", self._deal, parts, own, landed=landed)

    def start_reduce_scatter(self, target: Tensor, values: Tensor) -> Work | None:
        """Starts adding up the r-th of `world` equal parts of `values` for member r, in the order of ranks."""
        parts = self._parts(values)
        if self.world == 1:
            target.view(-1).copy_(parts[0])
        return self._start("a reduce-scatter", self._add_dealt, target.detach().view(-1), parts)

    def start_broadcast(self, tensor: Tensor, root: int) -> Work | None:
        """Starts giving all members the contiguous tensor that member `root` has."""
        return self._start("a broadcast", self._pass_on, tensor.detach().view(-1), root)

    def start_send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        """Starts sending a tensor to a member; it must stay as it is until `finish`."""
        self._check()
        return self._peers[to].send(("send", tag, 0), {"x": tensor})

    def finish(self, work: Work | Sending | None, what: str) -> None:
        """Waits for a collective under way.

        Raises:
            PeerLost: naming who is gone or silent.
        """
        if work is None:
            return
        try:
            work.wait()
        except PeerLost as error:
            raise PeerLost(f"{what} broke off: {error}") from None

    def all_reduce(self, tensor: Tensor, what: str, maximum: bool = False) -> None:
        """Adds up (or takes the maximum of) a contiguous tensor over all members, in place."""
        self.finish(self.start_all_reduce(tensor, maximum), what)

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """The tensors of all members, of equal shape and dtype, by rank."""
        whole = torch.empty((self.world, *tensor.shape), dtype=tensor.dtype)
        self.finish(self.start_all_gather(whole, tensor.contiguous()), what)
        return list(whole)

    def all_gather_arrays(self, arrays: dict[str, np.ndarray[Any, Any]], what: str) -> list[dict[str, Any]]:
        """The named arrays of all members, by rank; names, types and shapes may differ."""
        gathered: list[dict[str, Any]] = [{} for _ in range(self.world)]
        gathered[self.rank] = arrays
        self.finish(self._start(what, self._gather_arrays, gathered), what)
        return gathered

    def broadcast(self, tensor: Tensor, root: int, what: str) -> None:
        """Gives all members the contiguous tensor that member `root` has."""
        self.finish(self.start_broadcast(tensor, root), what)

    def barrier(self, what: str) -> None:
        """Waits until all members have come here."""
        self.all_gather_arrays({}, what)

    def receive(self, tensor: Tensor, source: int, tag: int, what: str) -> None:
        """Waits for what member `source` sends under `tag`; shape and dtype must be what was sent."""
        self.finish(self._start(what, self._receive_sent, tensor, source, tag), what)

    def leave(self, seconds: float = 1.0) -> None:
        """Tells the others that this member needs nothing more of them, unless something is under way.

        Args:
            seconds: within which what was sent has left; the connections stay.
        """
        if self._last is not None and not self._last.over.is_set():
            return
        for peer in self._peers.values():
            if not peer.left and self._lost is None:
                peer.send(("leave", 0, 0), {})
            peer.finish()
        deadline = time.monotonic() + seconds
        for peer in self._peers.values():
            peer.flush(deadline)

    def cut(self) -> None:
        """Breaks off what is under way, from any thread: all members that wait for it meet `PeerLost`."""
        self._lost = self._lost or PeerLost("this process has left the group")
        for peer in self._peers.values():
            peer.connection.end()

    def close(self) -> None:
        """Leaves the group; what was started is done before, or fails by its deadlines."""
        self._works.put(None)
        self._thread.join()
        self.leave(_FLUSH_SECONDS)
        for peer in self._peers.values():
            peer.close()

    # The collectives; all run in the group's thread.

    def _reduce_directly(self, op: int, flat: Tensor, add: Any) -> None:
        own = flat.clone()
        for peer in self._peers.values():
            self._send(peer, ("reduce", op, 0), {"x": own})
        parts = [torch.empty_like(flat) if rank != self.rank else own for rank in range(self.world)]
        for rank in self._peers:
            self._receive(rank, ("reduce", op, 0), {"x": parts[rank]})
        flat.copy_(parts[0])
        for part in parts[1:]:
            add(flat, part, out=flat)

    def _reduce_in_a_ring(self, op: int, flat: Tensor, add: Any) -> None:
        shares = [_blocks(share) for share in flat.tensor_split(self.world)]
        left, right = (self.rank - 1) % self.world, self._peers[(self.rank + 1) % self.world]
        scratch = torch.empty(max(block.numel() for share in shares for block in share), dtype=flat.dtype)
        number = 0  # of messages sent; the left one's are numbered alike
        for block in shares[self.rank]:
            self._send(right, ("ring", op, number), {"x": block})
            number += 1
        received = 0
        for step in range(2 * (self.world - 1)):
            share = shares[(self.rank - 1 - step) % self.world]
            for block in share:
                adding = step < self.world - 1
                place = scratch[: block.numel()] if adding else block
                self._receive(left, ("ring", op, received), {"x": place})
                received += 1
                if adding:
                    add(place, block, out=block)
                if step < 2 * (self.world - 1) - 1:
                    self._send(right, ("ring", op, number), {"x": block})
                    number += 1

    def _gather(self, op: int, shares: list[Tensor]) -> None:
        for number, block in enumerate(_blocks(shares[self.rank])):
            for peer in self._peers.values():
                self._send(peer, ("gather", op, number), {"x": block})
        for rank in self._peers:
            for number, block in enumerate(_blocks(shares[rank])):
                self._receive(rank, ("gather", op, number), {"x": block})

    def _deal(self, op: int, received: list[Tensor], sent: list[Tensor]) -> None:
        for rank, peer in self._peers.items():
            for number, block in enumerate(_blocks(sent[rank])):
                self._send(peer, ("deal", op, number), {"x": block})
        for rank in self._peers:
            for number, block in enumerate(_blocks(received[rank])):
                self._receive(rank, ("deal", op, number), {"x": block})

    def _add_dealt(self, op: int, target: Tensor, parts: list[Tensor]) -> None:
        received = [part if rank == self.rank else torch.empty_like(target) for rank, part in enumerate(parts)]
        self._deal(op, received, parts)
        target.copy_(received[0])
        for part in received[1:]:
            target += part

    def _gather_arrays(self, op: int, gathered: list[dict[str, Any]]) -> None:
        for peer in self._peers.values():
            self._send(peer, ("arrays", op, 0), gathered[self.rank])
        for rank in self._peers:
            gathered[rank] = self._receive(rank, ("arrays", op, 0), {}).arrays

    def _pass_on(self, op: int, flat: Tensor, root: int) -> None:
        """Small tensors go from the root to everybody, large ones from each member to the next one, in blocks."""
        place = (self.rank - root) % self.world
        small = flat.nbytes <= _DIRECT
        source = root if small else (self.rank - 1) % self.world
        targets = range(1, self.world) if place == 0 else range(0)
        if not small:
            targets = range(1, 2) if place < self.world - 1 else range(0)
        for number, block in enumerate(_blocks(flat)):
            if place:
                self._receive(source, ("broadcast", op, number), {"x": block})
            for step in targets:
                self._send(self._peers[(self.rank + step) % self.world], ("broadcast", op, number), {"x": block})

    def _receive_sent(self, op: int, tensor: Tensor, source: int, tag: int) -> None:
        self._receive(source, ("send", tag, 0), {"x": tensor})

    def _send(self, peer: Peer, key: Key, arrays: Mapping[str, Payload]) -> None:
        self._sendings.append(peer.send(key, arrays))

    def _parts(self, whole: Tensor) -> list[Tensor]:
        return list(whole.detach().view(self.world, whole.numel() // self.world))

    # How they are started, and wait.

    def _start(
        self, name: str, do: Callable[..., None], *arguments: Any, landed: Callable[[], None] | None = None
    ) -> Work | None:
        self._check()
        if self.world == 1:
            if landed is not None:
                landed()
            return None
        op = self._started
        self._started += 1
        work = self._last = Work(name, lambda: do(op, *arguments), landed)
        self._works.put(work)
        return work

    def _check(self) -> None:
        if self._lost is not None:
            raise PeerLost(f"the group has lost a member before: {self._lost}")

    def _work(self) -> None:
        while (work := self._works.get()) is not None:
            if self._lost is None:
                try:
                    work.do()
                    for sending in self._sendings:
                        sending.wait()
                except PeerLost as error:
                    self._give_up(error)
                except Exception as error:
                    self._give_up(PeerLost(f"{work.name} failed: {type(error).__name__}: {error}"))
            self._sendings.clear()
            work.error = self._lost
            work.over.set()

    def _give_up(self, error: PeerLost) -> None:
        """Tells all others why this group has come to its end, so that they name the same member."""
        self._lost = error
        for peer in self._peers.values():
            peer.send(("lost", 0, 0), {}, {"why": str(error)})

    def _receive(self, source: int, key: Key, places: Mapping[str, Place]) -> Message:
        """The message of a member under a key; others that come meanwhile are kept for when they are asked for."""
        peer = self._peers[source]
        if (early := peer.take(key)) is not None:
            return _placed(early, places)
        start = time.monotonic()
        told = False
        while True:
            waited = time.monotonic() - start
            if waited >= self._timeout:
                raise self._silent(source)
            if not told and waited >= self._timeout / 2:
                told = True
                for other in self._peers.values():
                    other.send(("waiting", 0, 0), {}, {"for": source})
            limit = self._timeout if told else self._timeout / 2
            if not self._comes(peer, limit - waited):
                continue
            if (message := self._next(peer, start + self._timeout, key, places)) is not None:
                return message

    def _comes(self, peer: Peer, seconds: float) -> bool:
        """Whether something comes of a member. Meanwhile it looks whether another one is gone."""
        if peer.connection.ready(0.0):
            return True
        poll = select.poll()
        poll.register(peer.connection, select.POLLIN)
        others = {other.connection.fileno(): other for other in self._peers.values() if other is not peer}
        for descriptor, other in others.items():
            if not other.left:
                poll.register(descriptor, _ENDED)
        events = dict(poll.poll(max(seconds, 0.0) * 1000))
        for descriptor in events:
            if descriptor in others:
                self._read_to_the_end(others[descriptor])
        return peer.connection.fileno() in events

    def _read_to_the_end(self, peer: Peer) -> None:
        """Reads what a member has said before its connection ended; it is lost unless it has said that it leaves."""
        while not peer.left:
            self._next(peer, time.monotonic() + self._timeout)

    def _next(
        self, peer: Peer, deadline: float, key: Key | None = None, places: Mapping[str, Place] | None = None
    ) -> Message | None:
        """Reads a message of a member; returns it if it is the one that is asked for, and else keeps or heeds it."""

        def into(kind: str, fields: dict[str, Any]) -> Mapping[str, Place]:
            return places or {} if _key(kind, fields) == key else {}

        try:
            message = peer.connection.receive(max(deadline - time.monotonic(), 1e-3), into)
            found = _key(message.kind, message.fields)
            if message.kind == "lost":  # whom it had waited for till then still counts: see `_silent`
                raise PeerLost(str(message.fields.get("why")))
            peer.waits_for = None
            if found == key:
                return message
            if message.kind == "leave":
                peer.left = True
            elif message.kind == "waiting":
                whom = message.fields.get("for")
                peer.waits_for = whom if isinstance(whom, int) else None
            else:
                peer.keep(found, message)
        except WireError as error:
            if peer.left:
                raise PeerLost(f"rank {peer.rank} has left the group") from None
            raise PeerLost(f"rank {peer.rank} is lost: {error}") from None
        return None

    def _silent(self, source: int) -> PeerLost:
        """Who keeps everybody waiting: from whom one waits for, to whom that one waits for, and so on."""
        for peer in self._peers.values():
            with suppress(PeerLost):
                while not peer.left and peer.connection.ready(0.0):
                    self._next(peer, time.monotonic() + 1.0)
        culprit, passed = source, {self.rank}
        while culprit not in passed and (following := self._peers[culprit].waits_for) in self._peers:
            passed.add(culprit)
            culprit = following
        if culprit in passed or self._peers[culprit].waits_for == self.rank:
            return PeerLost(f"members have waited for each other for {self._timeout:g} s: they do different things")
        return PeerLost(f"rank {culprit} has said nothing for {self._timeout:g} s")


def _key(kind: str, fields: dict[str, Any]) -> Key:
    numbers = fields.get("key")
    if not isinstance(numbers, list) or len(numbers) != 2 or not all(type(number) is int for number in numbers):
        raise WireError("a message is of no collective")
    return kind, numbers[0], numbers[1]


def _on_host(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """A tensor's values in the host's memory, flat; and where that is another one, what brings them back."""
    flat = tensor.detach().view(-1)
    host = flat.cpu()

    def back() -> None:
        flat.copy_(host)

    return host, None if host.data_ptr() == flat.data_ptr() else back


def _placed(message: Message, places: Mapping[str, Place]) -> Message:
    """Puts what came early where it is wanted."""
    for name, array in message.arrays.items():
        place: Any = places.get(name)
        if place is not None:
            if tuple(place.shape) != array.shape:
                raise WireError(f"array {name} is {list(array.shape)}, not {list(place.shape)}")
            place.copy_(torch.from_numpy(array))
    return message


def _blocks(flat: Tensor) -> list[Tensor]:
    """A flat tensor in parts of at most `_BLOCK` bytes; one empty part of an empty one."""
    size = max(1, _BLOCK // flat.element_size())
    return [flat[start : start + size] for start in range(0, max(flat.numel(), 1), size)]
