"""How many neighbours a client draws, and how many shares give its secrets back.

Each client draws k others, uniformly and without replacement (Bell et al., CCS 2020, section 4): the server has no
say in it. It divides its secrets among itself and these, and has a mask with each of them and with each client that has
drawn it. The bounds here are tails of the hypergeometric distribution, times the number of clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from verbund.errors import InputError

INSECURE = 2.0**-40
"""Probability with which the drawn graph may leave a client less protected than is said."""
UNFINISHED = 2.0**-10
"""Probability with which a round of the fewest clients may still fail."""


@dataclass(frozen=True)
class Neighbourhood:
    """What all clients of a round reckon with.

    Args:
        degree: others that each client draws.
        shares: how many shares give a secret back.
        against: what server the masks withstand: one that cheats, or one that keeps to the protocol and is curious.
    """

    degree: int
    shares: int
    against: Literal["cheating", "curious"]


@lru_cache(maxsize=64)
def neighbourhood(clients: int, least: int, colluding: float, asked: int | Literal["auto", "all"]) -> Neighbourhood:
    """The neighbourhood of a round.

    Args:
        clients: in the round.
        least: with how many the round must still succeed.
        colluding: the share of clients that may work with the server.
        asked: how many others to draw; `all`; or `auto`: as few as withstand a cheating server.

    Raises:
        InputError: if so few neighbours protect nobody.
    """
    complete = Neighbourhood(clients - 1, least, "cheating")
    corrupt = math.floor(colluding * clients)
    if asked == "all" or (asked != "auto" and asked >= clients - 1):
        return complete
    if asked == "auto":
        low, high = 1, clients - 1
        while low < high:
            middle = (low + high) // 2
            if _guarantee(clients, least, corrupt, middle)[1] == "cheating":
                high = middle
            else:
                low = middle + 1
        return complete if low == clients - 1 else Neighbourhood(low, *_sure(clients, least, corrupt, low))
    shares, against = _guarantee(clients, least, corrupt, asked)
    if against is None:
        raise InputError(
            f"{asked} neighbours among {clients} clients, of which {corrupt} may collude and {clients - least} may "
            "drop out, do not protect a client's update",
            where="strategy.exchange.secure.neighbours",
            fix='Set it to "auto", or to more',
        )
    return Neighbourhood(asked, shares, against)


def _sure(clients: int, least: int, corrupt: int, degree: int) -> tuple[int, Literal["cheating", "curious"]]:
    shares, against = _guarantee(clients, least, corrupt, degree)
    assert against is not None
    return shares, against


def _guarantee(
    clients: int, least: int, corrupt: int, degree: int
) -> tuple[int, Literal["cheating", "curious"] | None]:
    """The shares that are certain enough to remain, and what server so many withstand."""
    alive, _ = _tails(clients - 1, least - 1, degree)
    _, colluders = _tails(clients - 1, min(corrupt, clients - 1), degree)
    shares = max((t for t in range(1, degree + 1) if alive[t] * clients <= UNFINISHED), default=0)

    def safe(fewest: int) -> bool:
        """Whether nobody draws so many colluders."""
        return fewest > degree or (fewest > 0 and colluders[fewest] * clients <= INSECURE)

    if shares < 1 or _disconnected(clients, least - corrupt, degree) > INSECURE or not safe(shares):
        return shares, None
    # Every honest holder gives one of a client's two shares. Who would have both needs twice `shares` of them,
    # and gets two only of colluders.
    return shares, "cheating" if safe(2 * shares - (degree + 1)) else "curious"


def _tails(population: int, marked: int, drawn: int) -> tuple[list[float], list[float]]:
    """P(X < i) and P(X ≥ i) for i from 0 to `drawn`, X the marked ones among so many drawn without replacement."""
    whole = _log_choose(population, drawn)
    each = [
        math.exp(_log_choose(marked, i) + _log_choose(population - marked, drawn - i) - whole)
        if i <= marked and drawn - i <= population - marked
        else 0.0
        for i in range(drawn + 1)
    ]
    below = [0.0, *accumulate(each[:-1])]
    return below, list(accumulate(reversed(each)))[::-1]


def _log_choose(population: int, drawn: int) -> float:
    return math.lgamma(population + 1) - math.lgamma(drawn + 1) - math.lgamma(population - drawn + 1)


def _disconnected(clients: int, honest: int, degree: int) -> float:
    """Bounds the probability that the honest clients that remain fall apart: a set of s of them draws only itself or
    the others, and nobody outside of it draws from it; summed over all sets."""
    if honest < 2:
        return 1.0
    bad, others, total = clients - honest, clients - 1, 0.0
    for size in range(1, honest // 2 + 1):
        inside, outside = (size - 1 + bad) / others, 1.0 - size / others
        if inside <= 0.0 or outside <= 0.0:
            continue
        log = _log_choose(honest, size)
        log += degree * (size * math.log(min(inside, 1.0)) + (honest - size) * math.log(outside))
        total += math.exp(min(log, 0.0))
    return total
