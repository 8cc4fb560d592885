"""A whole round of secure aggregation: clients and server in one process, one after the other.

    python bench/secure_aggregation.py --clients 100 --parameters 100000 --lost 0.3

Prints one JSON line: seconds of the round and of its steps, milliseconds of a core for the server and for a client, and
bytes of a client beside the plain vector's and beside the published formula (Bonawitz et al., CCS 2017, section 7.1).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from typing import Any

import numpy as np

from verbund.comm.wire.bits import Bits
from verbund.exchange.federated.secure import Client, FixedPoint, Identity, Round, Sent, Server, Terms, as_words, whole
from verbund.job import Secure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--lost", type=float, default=0.3, help="share of the clients that send no vector")
    parser.add_argument("--neighbours", default="all", help="all, auto, or how many each client draws")
    parser.add_argument("--threshold", type=float, default=0.7)
    parser.add_argument("--colluding", type=float, default=0.1)
    given = parser.parse_args()
    neighbours = int(given.neighbours) if given.neighbours.isdecimal() else given.neighbours
    settings = Secure.model_validate(
        {"threshold": given.threshold, "neighbours": neighbours, "colluding": given.colluding}
    )
    print(json.dumps(measured(given.clients, given.parameters, given.lost, settings)))


def measured(clients: int, parameters: int, lost: float, settings: Secure) -> dict[str, Any]:
    names = [f"client-{i:05}" for i in range(clients)]
    identities = {name: Identity.create() for name in names}
    roster = {name: identity.public for name, identity in identities.items()}
    terms = Terms("bench", settings, parameters)
    round_ = Round(terms, 1, tuple(names))
    random, fixed = np.random.default_rng(0), FixedPoint(settings.bits, settings.range, settings.rounding)
    vectors = {name: fixed.round(random.uniform(-1.0, 1.0, parameters)) for name in names}
    members = {
        name: Client(name, identities[name], roster, terms, whole(as_words(vectors[name], round_.word)))
        for name in names
    }
    gone = set(random.permutation(names)[: int(lost * clients)].tolist())
    server = Server(round_, roster)
    due: dict[str, Sent] = dict.fromkeys(names, server.invite())
    of_client = dict.fromkeys(names, 0.0)
    sizes = {name: {"up": 0, "down": 0, "payload_bits": 0} for name in names}
    of_server, steps = 0.0, {}
    begun, computed = time.perf_counter(), time.process_time()
    while (step := server.step) is not None:
        started = time.perf_counter()
        for name, sent in due.items():
            message = sent.message()
            sizes[name]["down"] += sent.size
            sizes[name]["payload_bits"] += payload_bits(sent)
            if step == "masked" and name in gone:
                continue
            at = time.process_time()
            answer = members[name].receive(message)
            of_client[name] += time.process_time() - at
            sizes[name]["up"] += answer.size
            sizes[name]["payload_bits"] += payload_bits(answer)
            arrived = answer.message()
            at = time.process_time()
            server.receive(name, arrived)
            of_server += time.process_time() - at
        at = time.process_time()
        due = server.advance()
        of_server += time.process_time() - at
        steps[step] = round(time.perf_counter() - started, 3)
    seconds, computed = time.perf_counter() - begun, time.process_time() - computed
    assert server.result is not None
    exact = np.sum([vectors[name] for name in names if name not in gone], axis=0)
    assert np.array_equal(server.result.integers, exact), "the sum is not exact"
    left = [name for name in names if name not in gone]
    most = clients * (2**16 - 1) + 1
    published = 2 * clients * 256 + (5 * clients - 4) * 256 + parameters * (most - 1).bit_length()
    median = {key: statistics.median(sizes[name][key] for name in left) for key in ("up", "down", "payload_bits")}
    return {
        "benchmark": "secure_aggregation",
        "clients": clients,
        "parameters": parameters,
        "lost": len(gone),
        "neighbours": round_.near.degree,
        "withstands": f"a {round_.near.against} server",
        "modulus_bits": round_.bits,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(computed, 2),
        "seconds_by_step": steps,
        "server_ms": round(of_server * 1e3),
        "client_ms": round(statistics.median(of_client[name] for name in left) * 1e3, 1),
        "client_bytes": {"up": median["up"], "down": median["down"], "plain_16_bit": 2 * parameters},
        "payload_bits": median["payload_bits"],
        "published_bits": published,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def payload_bits(sent: Sent) -> int:
    """Keys, shares without their tags, and the vector: what the published formula counts."""
    bits = 0
    for name, array in sent.arrays.items():
        if isinstance(array, Bits):
            bits += array.values.size * array.width if sent.kind == "masked" else 0
        elif name in ("keys", "seeds"):
            bits += array.nbytes * 8
        elif name == "sealed":
            bits += (array.nbytes - 16 * len(array)) * 8
    return bits


if __name__ == "__main__":
    main()
