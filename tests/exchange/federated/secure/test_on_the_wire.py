"""A round over real connections: what a message is on the wire is what it is in a simulation."""

from __future__ import annotations

import socket
import threading

import numpy as np

from exchange.federated.secure.rounds import Federation
from verbund.comm.wire.connection import Connection
from verbund.exchange.federated.secure import Client, Sent, Server, as_words, whole


def test_clients_and_server_over_sockets() -> None:
    federation = Federation(4, 3001, {"max_weight": 1 << 18})  # 37 bits: two parts
    round_ = federation.round(3)
    assert round_.bits > 32
    vectors = federation.vectors()
    server = Server(round_, federation.roster)
    ends: dict[str, Connection] = {}
    threads = []

    def run(client: Client, connection: Connection) -> None:
        while not client.done:
            sent = client.receive(connection.receive(20.0))
            connection.send(sent.kind, sent.fields, 20.0, **sent.arrays)

    for name in federation.names:
        ours, theirs = (Connection(end) for end in socket.socketpair())
        client = federation.client(name, whole(as_words(vectors[name] * 5, round_.word)), 5)
        threads.append(threading.Thread(target=run, args=(client, theirs), daemon=True))
        threads[-1].start()
        ends[name] = ours
    due: dict[str, Sent] = dict.fromkeys(federation.names, server.invite())
    while server.step is not None:
        for name, sent in due.items():
            before = ends[name].sent_bytes
            ends[name].send(sent.kind, sent.fields, 20.0, **sent.arrays)
            assert ends[name].sent_bytes - before == sent.size
        for name in due:
            server.receive(name, ends[name].receive(20.0))
        due = server.advance()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert server.result is not None
    assert server.result.weight == 20
    np.testing.assert_array_equal(server.result.integers, 5 * np.sum(list(vectors.values()), axis=0))
