"""The wire: framed messages over Unix sockets, TCP and TLS.

`listen` and `dial` make connections between processes that trust each other; a `Connection` sends and receives.
"""

from verbund.comm.wire.bits import Bits
from verbund.comm.wire.connection import Connection, Peer
from verbund.comm.wire.credentials import Certificates, Credentials, Secret
from verbund.comm.wire.dialler import dial
from verbund.comm.wire.failure import Closed, Deadline, Refused, WireError
from verbund.comm.wire.frames import Array, Message, Payload, Place
from verbund.comm.wire.listener import Listener, listen

__all__ = [
    "Array",
    "Bits",
    "Certificates",
    "Closed",
    "Connection",
    "Credentials",
    "Deadline",
    "Listener",
    "Message",
    "Payload",
    "Peer",
    "Place",
    "Refused",
    "Secret",
    "WireError",
    "dial",
    "listen",
]
