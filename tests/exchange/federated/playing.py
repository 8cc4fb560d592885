"""A federation's rounds without a federation: events are applied as they come."""

from __future__ import annotations

from verbund.exchange.federated.round import Event, Rounds

NAMES = [f"owner-{n}" for n in range(6)]


def played(rounds: Rounds, events: list[Event]) -> list[Event]:
    """Applies events and what follows; all of them."""
    done = []
    for event in events:
        rounds.apply(event)
        done.append(event)
        while more := rounds.settle():
            done += played(rounds, more)
    return done
