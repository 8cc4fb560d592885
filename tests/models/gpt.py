"""A small GPT in plain torch: fused projections of query, key and value, and a head tied to the embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, DROPOUT = 61, 256, 24, 32, 4, 4, 0.0


class Attention(nn.Module):
    """Causal self-attention. The number of heads follows from the projection's width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.lm_head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def model() -> nn.Module:
    return GPT()


def tensor_plan() -> dict[str, Any]:
    """How the axis `tensor` cuts the blocks: by whole heads."""
    return {
        "blocks.*.attention.qkv": {"cut": "column", "parts": 3, "units": HEADS},
        "blocks.*.attention.out": {"cut": "row", "units": HEADS},
        "blocks.*.up": "column",
        "blocks.*.down": "row",
        "tokens": "embedding",
        "lm_head": "column+gather",
    }


def raw_job(folder: Path) -> dict[str, Any]:
    """Writes `gpt.npz`, rows of tokens that count up in steps of their own, and gives the job."""
    import models

    random = np.random.default_rng(3)
    first, step = random.integers(0, VOCABULARY, (2, ROWS, 1))
    tokens = (first + step % 7 * np.arange(LENGTH + 1)) % VOCABULARY
    np.savez(folder / "gpt.npz", tokens=tokens.astype(np.uint8))
    return models.raw_job(__file__, folder, {"train": "gpt.npz", "input": "tokens"}, objective="next_token")
