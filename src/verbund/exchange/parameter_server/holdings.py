"""What a server has of a model's parameters, and what a push does to it.

A deterministic state machine: the same calls in the same order give the same bits. Reads change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verbund.checkpoint.piece import Piece
from verbund.checkpoint.read import Checkpoint
from verbund.errors import InputError
from verbund.exchange.parameter_server import saved
from verbund.exchange.parameter_server.aggregation import Ticket, scaled
from verbund.exchange.parameter_server.checks import check_beginning, check_head, check_part, wrong_rows
from verbund.exchange.parameter_server.clipping import Clipping, Square
from verbund.exchange.parameter_server.dense import Dense, Sum
from verbund.exchange.parameter_server.held import Held
from verbund.exchange.parameter_server.history import History, compensate
from verbund.exchange.parameter_server.image import Image, Store
from verbund.exchange.parameter_server.ledger import Ledger
from verbund.exchange.parameter_server.plan import Block, Plan
from verbund.exchange.parameter_server.push import Outcome, Part, Push
from verbund.exchange.parameter_server.server_optimizer import ServerOptimizer
from verbund.exchange.parameter_server.tables import Table

__all__ = ["Holdings", "Image"]


@dataclass(frozen=True)
class _Step:
    """A gradient that is there, of a block; of a `sum` block what is to be added."""

    held: Held
    gradient: Tensor
    rows: Tensor | None  # of the block
    rate: float
    borrowed: bool = False  # the gradient is the push's own memory


class Holdings:
    """The blocks of one server. Not thread-safe.

    Args:
        plan: of the run.
        adopt: gives a block that is no table memory with its values in it, for as long as it is here; None: it keeps
            its own.

    Raises:
        JobError: if the plan's optimiser needs whole tensors.
    """

    def __init__(self, plan: Plan, adopt: Callable[[int, Tensor], Tensor | None] = lambda *_: None) -> None:
        self.plan = plan
        self._adopt = adopt
        self._optimizer = ServerOptimizer(plan.optimizer, sorted({block.name for block in plan.blocks}))
        self._held: dict[int, Held] = {}

    def create(
        self, block: int, values: Tensor | None, version: int = 0, optimizer: dict[str, Tensor] | None = None
    ) -> None:
        """Begins a block, or begins it anew.

        Args:
            block: its number.
            values: its first values, of any shape; copied. None or empty: of a table with `born`, whose rows are then
                made when they are needed.
            version: its first version, and under a synchronous rule its first ticket.
            optimizer: what an optimiser had of it elsewhere, by torch's keys; copied.

        Raises:
            InputError: if they do not fit the block.
        """
        found = self._block(block)
        if values is not None and not values.numel() and found.count:
            values = None
        check_beginning(block, found, values, optimizer or {})
        self.drop(block)
        own = None if values is None else values.detach().reshape(-1).clone()
        own_state = {key: value.clone() for key, value in (optimizer or {}).items()}
        store: Store
        if found.kind == "sum":
            assert own is not None
            store = Sum(found, own)
        elif found.kind == "dense":
            assert own is not None
            store = Dense(found, own, self._optimizer, own_state)
        else:
            store = Table(found, self._optimizer, own)
            if own_state:
                store.put(torch.arange(found.length[0]), store.gather(torch.arange(found.length[0])), own_state)
        self._begin(block, store, version)

    def put(self, image: Image) -> None:
        """Takes a block as another server had it, in place of what is here. The image's tensors become the block's."""
        block = self._block(image.block)
        self.drop(image.block)
        held = self._held[image.block] = Held.of(image, block, self.plan.rule, self._optimizer)
        self._settle_in(image.block, held.store)

    def image(self, block: int, copy: bool = True) -> Image:
        """All of a block. Without `copy` its tensors may be the block's own: valid until the next change."""
        return self._here(block).image(block, copy)

    def drop(self, block: int) -> None:
        """Lets go of a block, if it is here."""
        held = self._held.pop(block, None)
        if held is not None:
            held.store.close()

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def version(self, block: int) -> int:
        """How many tickets a block has taken whole, on top of the version that it began with."""
        return self._here(block).version

    def missing(self, block: int) -> list[int]:
        """The shares of a block's next ticket that have not come."""
        held = self._here(block)
        return [share for share in range(self.plan.rule.shares) if (held.version, share) not in held.ledger]

    def check(self, push: Push) -> None:
        """Looks whether `apply` can take a push.

        Raises:
            InputError: saying what is wrong with it.
        """
        check_head(push, self.plan.rule)
        for part in push.parts:
            held = self._here(part.block)
            check_part(push, part, held.store.block, held.version, held.ledger.low, self.plan.rule)

    @torch.no_grad()
    def apply(self, push: Push) -> list[Outcome]:
        """Takes a push that `check` has passed, of blocks that are all here. Its tensors are neither changed nor kept.

        Returns:
            What became of each part.
        """
        held = [self._here(part.block) for part in push.parts]
        return self._added_up(push, held) if self.plan.rule.consistency == "synchronous" else self._at_once(push, held)

    def complete(self, block: int, ticket: int) -> bool:
        """Whether a synchronous ticket of a block has all the shares that it waits for, or was taken."""
        held = self._here(block)
        return held.version > ticket or (held.version == ticket and self._enough(held.tickets.get(ticket)))

    def square(self, block: int, ticket: int) -> Square:
        """What is known of a block's part of the norm of a ticket that is `complete`."""
        held = self._here(block)
        if held.version > ticket:
            return Square(None, held.norm if held.version == ticket + 1 else None)
        return Square(0.0 if isinstance(held.store, Sum) else held.tickets[ticket].square())

    @torch.no_grad()
    def clip(self, clipping: Clipping) -> list[Outcome]:
        """Clips a ticket that is `complete` in these blocks, and takes it; nothing happens where that is done.

        Returns:
            What became of each block's.
        """
        held = [self._here(block) for block in clipping.blocks]
        waiting = [each for each in held if each.version == clipping.ticket]
        for each in waiting:
            each.norm = clipping.norm
            each.tickets[clipping.ticket].norm = clipping.norm
        while self._take_due(waiting):
            pass
        done = {id(each) for each in waiting}
        return [Outcome("applied" if id(each) in done else "known", each.version, None) for each in held]

    def read(self, blocks: Sequence[int], into: Tensor | None = None) -> Tensor:
        """The values of blocks of one dtype that are no tables, flat, one after the other: a copy.

        Args:
            blocks: their numbers.
            into: memory for it, flat.

        Raises:
            InputError: if a block is not here, is a table, or has another dtype than the first.
        """
        found = []
        for number in blocks:
            store = self._here(number).store
            if isinstance(store, Table):
                raise InputError(f"block {number} (`{store.block.name}`) is a table, which is read by rows")
            found.append(store.values)
            if found[0].dtype != found[-1].dtype:
                raise InputError(f"block {number} (`{store.block.name}`) has another dtype than block {blocks[0]}")
        return torch.cat(found, out=into) if found else torch.empty(0)

    def read_rows(self, block: int, rows: Tensor) -> Tensor:
        """Rows of a table, [len(rows), width], in any order: a copy. Those that no push has changed yet may be made for
        it, and are not kept.

        Args:
            block: its number.
            rows: numbers in the whole table, int64.

        Raises:
            InputError: if the block is not here or no table, or rows lie outside of it.
        """
        store = self._here(block).store
        if not isinstance(store, Table):
            raise InputError(f"block {block} (`{store.block.name}`) is no table")
        if wrong := wrong_rows(rows, store.block):
            raise InputError(wrong, where=f"block {block} (`{store.block.name}`)")
        return store.gather(store.local(rows)).view(len(rows), store.block.width)

    def load(self, block: int, checkpoint: Checkpoint, version: int = 0) -> None:
        """Begins a block with what a universal checkpoint has of it: values, and the optimiser's state if it is there.

        Args:
            block: its number.
            checkpoint: of any strategy.
            version: as for `create`.

        Raises:
            CheckpointError: if the checkpoint does not fit.
        """
        self.drop(block)
        self._begin(block, saved.load(self._block(block), checkpoint, self._optimizer), version)

    def pieces(self, blocks: Iterable[int]) -> Iterator[Piece]:
        """Blocks as pieces of a universal checkpoint: parameters, buffers (of sums) and the optimiser's state, and of
        tables whose rows are made when they are needed also which rows there are (kind `exchange`).

        They may be the blocks' own memory: valid until the next change.
        """
        for block in blocks:
            yield from saved.pieces(self._here(block).store)

    def values(self, block: int) -> Tensor | None:
        """A block's values themselves, flat; None of a table."""
        store = self._here(block).store
        return None if isinstance(store, Table) else store.values

    def _settle_in(self, block: int, store: Store) -> None:
        if not isinstance(store, Table) and (own := self._adopt(block, store.values)) is not None:
            store.move(own)

    def _begin(self, block: int, store: Store, version: int) -> None:
        self._settle_in(block, store)
        ledger = Ledger(self.plan.rule.shares, version if self.plan.rule.shared else 0)
        history = History(version) if self.plan.rule.compensation and not isinstance(store, Sum) else None
        self._held[block] = Held(store, version, ledger, history=history)

    def _at_once(self, push: Push, every: list[Held]) -> list[Outcome]:
        """The bounded and the asynchronous rule: each part is a step."""
        outcomes, steps, bounded = [], [], self.plan.rule.shared
        for held, part in zip(every, push.parts, strict=True):
            held.ledger.forget(min(push.low, held.version) if bounded else push.low)
            if not held.ledger.add(push.ticket, push.share):
                outcomes.append(Outcome("known", held.version, None))
                continue
            staleness = push.ticket - part.base if bounded else held.version - part.base
            if step := self._lone_step(push, part, held, staleness):
                steps.append(step)
            held.version = held.ledger.low if bounded else held.version + 1
            outcomes.append(Outcome("applied", held.version, staleness))
        self._take(steps)
        return outcomes

    def _lone_step(self, push: Push, part: Part, held: Held, staleness: int) -> _Step | None:
        if held.history is not None:
            held.history.seen(push.client, part.base)
        if part.values is None:
            return None
        if isinstance(held.store, Sum):
            return _Step(held, scaled(part.values, push.scale, None), None, push.rate)
        if not push.weight:
            return None
        rate = push.rate / max(staleness, 1) if self.plan.rule.staleness_aware else push.rate
        rows = held.store.local(part.rows) if isinstance(held.store, Table) and part.rows is not None else None
        factor = push.scale / push.weight
        if factor == 1.0 and held.history is None and self._optimizer.fused:
            return _Step(held, part.values, rows, rate, borrowed=True)
        gradient = scaled(part.values, factor, _buffer(held))
        if held.history is not None:
            now = held.store.values if isinstance(held.store, Dense) else held.store.gather(_given(rows))
            then = held.history.at(part.base, now, rows)
            if then is not None and staleness:
                compensate(gradient, now.view(-1), then.view(-1), self.plan.rule.compensation)
            held.history.replaced(held.version, now.clone() if rows is None else now, rows)
        return _Step(held, gradient, rows, rate)

    def _added_up(self, push: Push, every: list[Held]) -> list[Outcome]:
        """The synchronous rule: a ticket is taken when its shares are there."""
        states: list[Literal["waiting", "known", "late"]] = []
        for held, part in zip(every, push.parts, strict=True):
            held.ledger.forget(min(push.low, held.version))
            if not held.ledger.add(push.ticket, push.share):
                states.append("known")
                continue
            ticket = held.tickets.get(push.ticket)
            if push.ticket < held.version or (self.plan.rule.clip is not None and self._enough(ticket)):
                states.append("late")  # a norm is of certain shares: which count is settled once there are enough
            else:
                states.append("waiting")
                if ticket is None:
                    ticket = held.tickets[push.ticket] = Ticket(push.rate, _buffer(held))
                rows = held.store.local(part.rows) if isinstance(held.store, Table) and part.rows is not None else None
                ticket.add(push.share, part.values, rows, push.scale, push.weight)
        while self._take_due(every):
            pass
        outcomes: list[Outcome] = []
        for held, part, state in zip(every, push.parts, states, strict=True):
            if state == "waiting" and held.version > push.ticket:
                outcomes.append(Outcome("applied", held.version, push.ticket - part.base))
            else:
                outcomes.append(Outcome(state, held.version, None))
        return outcomes

    def _take_due(self, every: list[Held]) -> bool:
        """Takes the next ticket of each of these blocks whose ticket is there; whether there was one."""
        clip = self.plan.rule.clip
        steps, due = [], False
        for held in every:
            ticket = held.tickets.get(held.version)
            if ticket is None or not self._enough(ticket) or (clip is not None and ticket.norm is None):
                continue
            due = True
            del held.tickets[held.version]
            held.version += 1
            weight = ticket.weight
            total, rows = ticket.total()
            if total is None or not (weight or isinstance(held.store, Sum)):
                continue
            if not isinstance(held.store, Sum) and weight != 1.0:
                total.div_(weight)
            if clip is not None and ticket.norm is not None and ticket.norm > clip and not isinstance(held.store, Sum):
                total.mul_(clip / ticket.norm)
            steps.append(_Step(held, total, rows, ticket.rate))
        self._take(steps)
        return due

    def _enough(self, ticket: Ticket | None) -> bool:
        """Whether a ticket has all the shares that it waits for."""
        return ticket is not None and len(ticket) >= self.plan.rule.shares - self.plan.rule.backup

    def _take(self, steps: list[_Step]) -> None:
        """Steps blocks: one call of the optimiser for all that have the same rate."""
        by_rate: dict[float, list[_Step]] = {}
        for step in steps:
            if isinstance(step.held.store, Sum):
                step.held.store.add(step.gradient)
            else:
                by_rate.setdefault(step.rate, []).append(step)
        for rate, alike in by_rate.items():
            parameters = []
            for step in alike:
                store = step.held.store
                if isinstance(store, Table):
                    store.set_gradient(_given(step.rows), step.gradient)
                    parameters.append(store.parameter)
                elif isinstance(store, Dense):
                    store.set_gradient(step.gradient)
                    parameters.append(store.parameter)
                    step.held.buffer = step.held.buffer if step.borrowed else step.gradient
            self._optimizer.step(parameters, rate)
            for step in alike:
                if isinstance(step.held.store, Table):
                    step.held.store.store()

    def _block(self, number: int) -> Block:
        if not 0 <= number < len(self.plan.blocks):
            raise InputError(f"there is no block {number}: the plan has {len(self.plan.blocks)}")
        return self.plan.blocks[number]

    def _here(self, number: int) -> Held:
        held = self._held.get(number)
        if held is None:
            block = self._block(number)
            raise InputError(f"block {number} (`{block.name}` {block.box}) is not here")
        return held


def _buffer(held: Held) -> Tensor | None:
    """Memory for a gradient that the block does not need at present: the last one's."""
    buffer, held.buffer = held.buffer, None
    return buffer


def _given(rows: Tensor | None) -> Tensor:
    assert rows is not None  # of a table: `check` has seen to it
    return rows
