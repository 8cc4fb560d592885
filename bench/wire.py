"""The wire against gRPC and ZeroMQ: 4 MiB pushed and pulled on one host, and the latency of 4 KiB.

    pip install -e '.[bench]'
    python bench/wire.py [--rounds 40]

A server process for each side; the client asks each in turn, in each round. Ours checks sums and receives into given
memory; ZeroMQ (copy=False) hands out its own frames and checks nothing; gRPC streams chunks of 1 MiB. Prints one JSON
line: gigabytes per second of a push and a pull, microseconds of a round trip (medians over the rounds), and ours as a
share of the speed of a memory copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from verbund.comm.wire import Connection, Secret, WireError, dial, listen

BIG, SMALL, CHUNK = 4 << 20, 4 << 10, 1 << 20
LIMIT = 64 << 20
SECRET = Secret.create()


class Client(Protocol):
    """One side's client; each call returns when its effect is there."""

    def push(self, values: Any) -> None:
        """Sends values; returns when the server has them."""

    def pull(self, into: Any) -> None:
        """Gets as many values as the server has."""

    def small(self, values: Any) -> None:
        """Sends a few values and gets as many back."""


class Wire:
    """Ours."""

    def __init__(self, address: str) -> None:
        self.connection: Connection = dial(address, _credentials(address))

    def push(self, values: Any) -> None:
        self.connection.send("push", x=values)
        self.connection.receive(60.0)

    def pull(self, into: Any) -> None:
        self.connection.send("pull")
        self.connection.receive(60.0, {"x": into})

    def small(self, values: Any) -> None:
        self.connection.send("small", x=values)
        self.connection.receive(60.0)

    @staticmethod
    def serve(address: str, tell: Callable[[str], None]) -> None:
        listener = listen(address, _credentials(address))
        tell(listener.address)
        held, few = np.ones(BIG, np.uint8), np.ones(SMALL, np.uint8)
        connection = listener.accept(60.0)
        while True:
            try:
                message = connection.receive(None, lambda kind, _: {"x": held if kind == "push" else few})
            except WireError:
                return
            if message.kind == "push":
                connection.send("done")
            else:
                connection.send("values", x=held if message.kind == "pull" else few)


def _credentials(address: str) -> Secret | None:
    return SECRET if "localhost" in address else None


class Zmq:
    """ZeroMQ."""

    def __init__(self, address: str) -> None:
        import zmq

        self.socket = zmq.Context().socket(zmq.REQ)
        self.socket.connect(address)

    def push(self, values: Any) -> None:
        self.socket.send_multipart([b"push", values], copy=False)
        self.socket.recv()

    def pull(self, into: Any) -> None:
        self.socket.send_multipart([b"pull"])
        self.socket.recv(copy=False)

    def small(self, values: Any) -> None:
        self.socket.send_multipart([b"small", values], copy=False)
        self.socket.recv(copy=False)

    @staticmethod
    def serve(address: str, tell: Callable[[str], None]) -> None:
        import zmq

        socket = zmq.Context().socket(zmq.REP)
        socket.bind(address)
        tell(str(socket.get_string(zmq.LAST_ENDPOINT)))
        held: Any = np.ones(BIG, np.uint8)
        few: Any = np.ones(SMALL, np.uint8)
        while True:
            parts = socket.recv_multipart(copy=False)
            kind = parts[0].bytes
            if kind == b"push":
                socket.send(b"done")
            else:
                socket.send(held if kind == b"pull" else few, copy=False)


_GRPC: list[tuple[str, Any]] = [("grpc.max_send_message_length", LIMIT), ("grpc.max_receive_message_length", LIMIT)]


class Grpc:
    """gRPC without protobuf: bytes as they are, in streams of chunks."""

    def __init__(self, address: str) -> None:
        import grpc

        channel = grpc.insecure_channel(address, options=_GRPC)
        self._push = channel.stream_unary("/bench/push")
        self._pull = channel.unary_stream("/bench/pull")
        self._small = channel.unary_unary("/bench/small")

    def push(self, values: Any) -> None:
        raw = memoryview(values)
        self._push(bytes(raw[at : at + CHUNK]) for at in range(0, len(raw), CHUNK))

    def pull(self, into: Any) -> None:
        raw, at = memoryview(into), 0
        for chunk in self._pull(b""):
            raw[at : at + len(chunk)] = chunk
            at += len(chunk)

    def small(self, values: Any) -> None:
        self._small(bytes(values))

    @staticmethod
    def serve(address: str, tell: Callable[[str], None]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import grpc

        held, few = memoryview(bytearray(BIG)), bytes(SMALL)

        def push(chunks: Any, _: Any) -> bytes:
            at = 0
            for chunk in chunks:
                held[at : at + len(chunk)] = chunk
                at += len(chunk)
            return b"done"

        def pull(_: bytes, __: Any) -> Any:
            return (bytes(held[at : at + CHUNK]) for at in range(0, BIG, CHUNK))

        server = grpc.server(ThreadPoolExecutor(2), options=_GRPC)
        handlers = {
            "push": grpc.stream_unary_rpc_method_handler(push),
            "pull": grpc.unary_stream_rpc_method_handler(pull),
            "small": grpc.unary_unary_rpc_method_handler(lambda _, __: few),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        port = server.add_insecure_port(address)
        server.start()
        tell(address if address.startswith("unix:") else f"127.0.0.1:{port}")
        server.wait_for_termination()


def start(side: Any, address: str) -> tuple[int, str]:
    """A server process and its address. It ends with its clients, or is killed."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            side.serve(address, lambda text: (os.write(write, text.encode()), None)[1])
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:  # what it tells, as soon as it does
        return pid, os.read(file.fileno(), 1000).decode()


def copy_speed() -> float:
    """Gigabytes per second of copying 4 MiB within one process, median."""
    source, target = np.ones(BIG, np.uint8), np.zeros(BIG, np.uint8)
    taken = [timed(lambda: np.copyto(target, source)) for _ in range(30)]
    return BIG / statistics.median(taken) / 1e9


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    values, place, few = np.ones(BIG, np.uint8), np.zeros(BIG, np.uint8), np.ones(SMALL, np.uint8)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        sides: dict[str, tuple[Any, str]] = {
            "unix": (Wire, f"unix:{folder}/ours"),
            "tcp": (Wire, "tcp:127.0.0.1:0"),
            "tls": (Wire, "tcp:localhost:0"),
            "zmq_ipc": (Zmq, f"ipc://{folder}/zmq"),
            "zmq_tcp": (Zmq, "tcp://127.0.0.1:0"),
            "grpc_unix": (Grpc, f"unix:{folder}/grpc"),
            "grpc_tcp": (Grpc, "127.0.0.1:0"),
        }
        started = {key: start(side, address) for key, (side, address) in sides.items()}
        try:
            clients: dict[str, Client] = {key: sides[key][0](address) for key, (_, address) in started.items()}
            taken: dict[str, dict[str, list[float]]] = {key: {"push": [], "pull": [], "small": []} for key in clients}
            for number in range(rounds + 3):
                for key, client in clients.items():
                    for what, call in (
                        ("push", lambda client=client: client.push(values)),
                        ("pull", lambda client=client: client.pull(place)),
                        ("small", lambda client=client: client.small(few)),
                    ):
                        seconds = timed(call)
                        if number >= 3:
                            taken[key][what].append(seconds)
        finally:
            for pid, _ in started.values():
                os.kill(pid, 9)
                os.waitpid(pid, 0)
    memory = copy_speed()
    rates = {
        key: {
            "push_gb_s": round(BIG / statistics.median(found["push"]) / 1e9, 2),
            "pull_gb_s": round(BIG / statistics.median(found["pull"]) / 1e9, 2),
            "round_trip_us": round(1e6 * statistics.median(found["small"])),
        }
        for key, found in taken.items()
    }
    print(
        json.dumps(
            {
                "bench": "wire",
                "machine": f"{os.cpu_count()} cores, {platform.machine()}",
                **rates,
                "memory_copy_gb_s": round(memory, 2),
                "share_of_copy": round(min(rates["unix"]["push_gb_s"], rates["unix"]["pull_gb_s"]) / memory, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
