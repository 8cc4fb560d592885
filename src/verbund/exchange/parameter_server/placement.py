"""Which servers have which block: the same answer everywhere, and few blocks move when a server comes or goes.

Rendezvous hashing: every server draws a number for a block from a hash of both, and the highest have it (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", 1998; with weights: Schindler and Schomaker, 2005). Who
would have more than its share goes without, and the next one has it (Mirrokni, Thorup and Zadimoghaddam, "Consistent
hashing with bounded loads", 2018).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from verbund.checkpoint.manifest import DTYPES
from verbund.errors import InputError
from verbund.exchange.parameter_server.plan import Block, Plan

BOUND = 1.25
"""What a server has at most, as a multiple of its share, as far as the sizes of blocks allow."""


def place(plan: Plan, servers: int, replicas: int, weights: Sequence[float] | None = None) -> list[tuple[int, ...]]:
    """The servers of each block, its primary first.

    Args:
        plan: the blocks.
        servers: how many servers there are.
        replicas: how many servers have a block besides its primary.
        weights: of the servers' shares; default: all alike.

    Raises:
        InputError: if there are fewer servers than a block needs, or weights that make no shares.
    """
    if servers <= replicas:
        raise InputError(
            f"{replicas} replicas besides the primary need {replicas + 1} servers, and there are {servers}",
            where="strategy.exchange",
        )
    weights = [1.0] * servers if weights is None else list(weights)
    if len(weights) != servers or not all(weight > 0.0 and math.isfinite(weight) for weight in weights):
        raise InputError(f"{servers} servers need as many weights above 0, not {weights}", where="strategy.exchange")
    sizes = [block.count * DTYPES[block.dtype][1] for block in plan.blocks]
    preferred = [_preferred(block, weights) for block in plan.blocks]
    # The largest first, so that the small ones fill what is left.
    order = sorted(range(len(sizes)), key=lambda block: (-sizes[block], _key(plan.blocks[block])))
    chosen: list[list[int]] = [[] for _ in sizes]
    held = [0] * servers
    for copies in range(1, replicas + 2):  # all primaries, then all first replicas, …: each row is even for itself
        share = BOUND * copies * sum(sizes) / sum(weights)
        for block in order:
            free = [server for server in preferred[block] if server not in chosen[block]]
            size = sizes[block]
            fits = (server for server in free if held[server] + size <= share * weights[server])
            server = next(fits, None)
            if server is None:  # large blocks: whoever is fullest then is so by the least
                server = min(free, key=lambda server: (held[server] + size) / weights[server])
            chosen[block].append(server)
            held[server] += size
    return [tuple(some) for some in chosen]


def _key(block: Block) -> bytes:
    """What tells one block from another, in every plan of the model."""
    return repr((block.name, block.offset)).encode()


def _preferred(block: Block, weights: Sequence[float]) -> list[int]:
    """All servers, in the order of the numbers that they draw."""
    key = _key(block)

    def drawn(server: int) -> float:
        word = hashlib.blake2b(key, digest_size=8, salt=server.to_bytes(16, "little")).digest()
        uniform = ((int.from_bytes(word, "little") >> 11) + 0.5) * 2.0**-53  # never 0 or 1
        return -weights[server] / math.log(uniform)

    return sorted(range(len(weights)), key=drawn, reverse=True)
