"""Messages that are altered in all kinds of ways lead to errors that name their sender, and to nothing else."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from exchange.federated.secure.rounds import Federation, Play
from verbund.comm.wire.frames import Message
from verbund.errors import VerbundError
from verbund.exchange.federated.secure.terms import STEPS

JUNK = (None, True, -1, 2**70, 1.5, float("nan"), "x", [1, 2], {"a": 1}, [[-1]], [True], [10**9])


def mutated(message: Message, source: random.Random) -> Message:
    fields, arrays = dict(message.fields), dict(message.arrays)
    if fields and source.random() < 0.4:
        fields[source.choice(list(fields))] = source.choice(JUNK)
    elif arrays:
        name = source.choice(list(arrays))
        arrays[name] = array(arrays[name], source)
    return Message(message.kind if source.random() < 0.95 else source.choice(STEPS), fields, arrays)


def array(found: Any, source: random.Random) -> Any:
    flipped = found.copy()
    if flipped.size:
        flipped.reshape(-1)[source.randrange(flipped.size)] ^= flipped.dtype.type(source.randrange(1, 200))
    others = [found[:-1], found[::-1].copy(), np.concatenate([found, found]), np.zeros((), found.dtype), flipped]
    return source.choice([*others, found.astype(np.float32), found.astype(np.uint64), found[:0]])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("side", ["server", "client"])
def test_what_is_altered_is_refused(side: str, step: str) -> None:
    source = random.Random(f"{side} {step}")
    federation = Federation(6, 20)
    for _ in range(8):
        play = Play(federation, federation.vectors())
        with suppress(VerbundError):
            while play.server.step is not None:
                if play.server.step == step:
                    name = source.choice(federation.names)
                    message = play.due.pop(name).message()
                    with suppress(VerbundError):
                        if side == "client":
                            play.clients[name].receive(mutated(message, source))
                        else:
                            answer = play.clients[name].receive(message)
                            play.server.receive(name, mutated(answer.message(), source))
                play.step()
