"""LSTM, GRU and RNN with dropout between their layers: torch draws that dropout inside one fused call, so the layers
are called one by one and the dropout between them is keyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from verbund.errors import TaskError

Dropout = Callable[[Tensor, int], Tensor]
"""Drops elements of a tensor whose given dimension is the batch."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def forward(module: nn.RNNBase, name: str, dropout: Dropout, x: Tensor | PackedSequence, state: Any = None) -> Any:
    """What `module(x, state)` computes in training.

    Args:
        module: a recurrent module of more than one layer.
        name: its name in the model, for messages.
        dropout: applied to the output of every layer but the last.
        x: [T, B, F], or [B, T, F] with `batch_first`.
        state: as torch's: h, or (h, c) of an LSTM; None is zeros.

    Raises:
        TaskError: for packed sequences, whose rows are not the samples'.
    """
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise TaskError(
            f"`{name}` has dropout between its layers and is called with "
            + ("a sequence without a batch dimension" if isinstance(x, Tensor) else "a packed sequence")
            + ", so its dropout cannot be keyed by the sample",
            where="train.randomness",
            fix='Pad instead of packing, or set train.randomness = "worker" to draw from torch\'s own generator',
        )
    lstm = module.mode == "LSTM"
    y: Tensor = x
    directions = 2 if module.bidirectional else 1
    states = _states(module, x, state, directions, lstm)
    module.check_forward_args(x, states if lstm else states[0], None)  # type: ignore[arg-type]
    call = _FUNCTIONS[module.mode]
    ends = []
    for layer in range(module.num_layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        weights = [getattr(module, key) for keys in module._all_weights[rows] for key in keys]
        first = tuple(part[rows].contiguous() for part in states)
        options = (module.bias, 1, 0.0, module.training, module.bidirectional, module.batch_first)
        y, *end = call(y, first if lstm else first[0], weights, *options)
        ends.append(end)
        if layer < module.num_layers - 1:
            y = dropout(y, 0 if module.batch_first else 1)
    last = tuple(torch.cat(parts) for parts in zip(*ends, strict=True))
    return y, last if lstm else last[0]


def _states(module: nn.RNNBase, x: Tensor, state: Any, directions: int, lstm: bool) -> tuple[Tensor, ...]:
    if state is not None:
        return tuple(state) if lstm else (state,)
    layers, batch = module.num_layers * directions, x.shape[0 if module.batch_first else 1]
    hidden = x.new_zeros(layers, batch, module.proj_size or module.hidden_size)
    return (hidden, x.new_zeros(layers, batch, module.hidden_size)) if lstm else (hidden,)
