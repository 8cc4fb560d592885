"""The wire: framed messages over Unix sockets, TCP and TLS.

`listen` and `dial` make connections between processes that trust each other; a `Connection` sends and receives. `Calls`
and `Replies` make requests of it that are done once, whatever is lost on the way.
"""

from verbund.comm.wire.bits import Bits
from verbund.comm.wire.calls import Call, Calls
from verbund.comm.wire.connection import Connection, Peer
from verbund.comm.wire.credentials import Certificates, Credentials, Enrolled, Identity, Pinned, Secret
from verbund.comm.wire.dialler import dial
from verbund.comm.wire.failure import Closed, Deadline, Refused, WireError
from verbund.comm.wire.frames import Array, Message, Payload, Place
from verbund.comm.wire.listener import Listener, listen
from verbund.comm.wire.memory import Memory
from verbund.comm.wire.replies import Replies, Reply

__all__ = [
    "Array",
    "Bits",
    "Call",
    "Calls",
    "Certificates",
    "Closed",
    "Connection",
    "Credentials",
    "Deadline",
    "Enrolled",
    "Identity",
    "Listener",
    "Memory",
    "Message",
    "Payload",
    "Peer",
    "Pinned",
    "Place",
    "Refused",
    "Replies",
    "Reply",
    "Secret",
    "WireError",
    "dial",
    "listen",
]
