"""Updates in fewer bytes, with error feedback that each client keeps for itself: what is left out of an update is added
to the client's next one (Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback
fixes SignSGD", 2019). It is kept by parameter name, and moves on only when the update counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verbund.comm.compression.codec import Codec
from verbund.comm.compression.methods import codec
from verbund.data.hashing import key as key_of
from verbund.errors import InputError
from verbund.exchange.federated.client_side import Memory
from verbund.job import Exchange

ERROR = "error/"
"""Before the names of what a client has left out of its parameters' differences so far."""


@dataclass(frozen=True)
class Coded:
    """An update as it travels.

    Args:
        messages: by parameter, uint8.
        plain: what travels as it is, by name: running statistics.
        difference: what the server makes of both.
        kept: what the client keeps for its next update.
    """

    messages: dict[str, Tensor]
    plain: dict[str, Tensor]
    difference: dict[str, Tensor]
    kept: dict[str, Tensor]


class UpdateCompression:
    """What updates travel as. Each parameter is a message of its own, whose size follows from its shape.

    Args:
        exchange: the method, and whether there is error feedback.
        plain: names of running statistics, which are not compressed.
        seed: of stochastic rounding.
    """

    def __init__(self, exchange: Exchange, plain: Sequence[str], seed: int) -> None:
        made = codec(exchange.compression)
        assert made is not None, "the job has asked for a method that has a codec"
        self._codec: Codec = made
        self._feedback, self._plain, self._seed = exchange.error_feedback, frozenset(plain), seed

    @torch.no_grad()
    def encode(self, difference: Mapping[str, Tensor], memory: Memory, client: int, round_: int) -> Coded:
        """An update's messages, and what is left out of them.

        Args:
            difference: of the parameters, by name.
            memory: what the client has kept.
            client: its number, which keys stochastic rounding with the round's.
            round_: likewise.
        """
        coded = Coded({}, {}, {}, {})
        for place, name in enumerate(sorted(difference)):
            values = difference[name]
            if name in self._plain:
                coded.plain[name] = coded.difference[name] = values
                continue
            wanted = values.detach().cpu()
            if self._feedback and (left := memory.get(f"{ERROR}{name}")) is not None:
                wanted = wanted + left.to(wanted.dtype)
            flat = wanted.reshape(-1)
            message = torch.zeros(self._codec.size(len(flat)), dtype=torch.uint8)
            for number, (part, at) in enumerate(self._codec.slices(len(flat))):
                self._codec.encode(flat[part], message[at], key_of(self._seed, client, round_, place, number))
            coded.messages[name] = message
            sent = self._decoded(message, values)
            coded.difference[name] = sent.to(values.device)
            if self._feedback:
                coded.kept[f"{ERROR}{name}"] = wanted - sent
        return coded

    @torch.no_grad()
    def decode(self, messages: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The differences that messages say.

        Args:
            messages: by parameter, uint8; from somebody else.
            expected: tensors of the shape and type that each difference must have, by name.

        Raises:
            InputError: if a message is none of this method, or for a parameter that is not compressed.
        """
        found = {}
        for name, message in messages.items():
            if (like := expected.get(name)) is None or name in self._plain:
                raise InputError(f"`{name[:80]}` is not compressed in this job")
            if message.dtype != torch.uint8 or tuple(message.shape) != (self._codec.size(like.numel()),):
                raise InputError(f"the message of `{name}` is not of the job's method of compression")
            try:
                found[name] = self._decoded(message, like)
            except (RuntimeError, IndexError):
                raise InputError(f"the message of `{name}` names values that it does not have") from None
        return found

    def bytes_of(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of an update's messages, and of what travels as it is."""
        return sum(
            values.nbytes if name in self._plain else self._codec.size(values.numel())
            for name, values in tensors.items()
        )

    def kept_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes that a client keeps."""
        kept = (values.nbytes for name, values in tensors.items() if name not in self._plain)
        return sum(kept) if self._feedback else 0

    def _decoded(self, message: Tensor, like: Tensor) -> Tensor:
        flat = torch.zeros(like.numel(), dtype=like.dtype)
        for part, at in self._codec.slices(like.numel()):
            self._codec.decode(message[at], flat[part])
        return flat.view(like.shape)
