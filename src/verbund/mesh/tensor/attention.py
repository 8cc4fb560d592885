"""nn.MultiheadAttention of whose heads each worker computes some."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verbund.mesh.held import Cut
from verbund.mesh.tensor.exchange import Axis
from verbund.randomness.override import Override


class Attention(Override):
    """The forward of a cut nn.MultiheadAttention; arguments and results are those of the whole one.

    Args:
        module: its projections hold this worker's heads.
        axis: the workers.
        heads: how the inputs of the output projection, and so the heads, are cut.
    """

    def __init__(self, module: nn.MultiheadAttention, axis: Axis, heads: Cut) -> None:
        super().__init__(module)
        self._axis = axis
        self._width = module.embed_dim // module.num_heads
        ((low, high),) = heads.ranges()
        self._first, self._heads = low // self._width, (high - low) // self._width
        self._all = module.num_heads

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = self.module
        assert isinstance(module, nn.MultiheadAttention)
        single = query.dim() == 2
        first = module.batch_first or single
        arguments = [x.unsqueeze(0) if single else x for x in (query, key, value)]
        if not first:
            arguments = [x.transpose(0, 1) for x in arguments]
        if key_padding_mask is not None and single:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._projected(module, arguments, query is key and key is value)
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        out, weights = self._attend(module, q, k, v, mask, need_weights)
        y = out.transpose(1, 2).flatten(2)
        y = self._axis.leave(functional.linear(y, module.out_proj.weight))
        if module.out_proj.bias is not None:
            y = y + module.out_proj.bias
        if not first:
            y = y.transpose(0, 1)
        if weights is not None:
            weights = self._gathered(weights, average_attn_weights)
        if single:
            y, weights = y.squeeze(0), weights.squeeze(0) if weights is not None else None
        return y, weights

    def _projected(self, module: nn.MultiheadAttention, arguments: list[Tensor], same: bool) -> list[Tensor]:
        arguments = [self._axis.enter(arguments[0])] * 3 if same else [self._axis.enter(x) for x in arguments]
        if module.in_proj_weight is not None:
            matrices = list(module.in_proj_weight.chunk(3))
        else:
            assert module.q_proj_weight is not None
            matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        biases: Any = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else [None] * 3
        found = []
        for x, matrix, bias in zip(arguments, matrices, biases, strict=True):
            y = functional.linear(x, matrix, bias)
            found.append(y.view(*y.shape[:2], self._heads, self._width).transpose(1, 2))
        return found

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as one that is added to the scores; shape [B or 1, heads or 1, T, S]."""
        total: Tensor | None = None
        if mask is not None:
            mask = _added(mask, q.dtype)
            if mask.requires_grad:  # each worker's heads make a part of its gradient
                mask = self._axis.enter(mask)
            if mask.dim() == 3:  # [B · all heads, T, S]
                mask = mask.view(q.shape[0], self._all, *mask.shape[1:]).narrow(1, self._first, self._heads)
            total = mask if mask.dim() == 4 else mask[None, None]
        if padding is not None:
            padding = _added(padding, q.dtype)[:, None, None, :]
            total = padding if total is None else total + padding
        return total

    def _attend(
        self,
        module: nn.MultiheadAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        drops = module.training and module.dropout > 0.0
        if not drops and not need_weights:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), None
        scores = (q / math.sqrt(self._width)) @ k.transpose(-2, -1)
        weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        if drops:
            weights = functional.dropout(weights, module.dropout, True)
        return weights @ v, weights if need_weights else None

    def _gathered(self, weights: Tensor, average: bool) -> Tensor:
        axis = self._axis
        bounds = [self._all * worker // axis.workers for worker in range(axis.workers + 1)]
        lengths = [high - low for low, high in pairwise(bounds)]
        whole = axis.gather(weights, 1, lengths)
        return whole.mean(dim=1) if average else whole


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)
