"""SmolLM2's architecture, shrunk: grouped-query attention, and a head tied to the embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, VOCABULARY, LENGTH = 61, 256, 24


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=1,
        eos_token_id=2,
    )


def model() -> nn.Module:
    return LlamaForCausalLM(config())


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": batch["tokens"][:, :-1].long()}


def raw_job(folder: Path) -> dict[str, Any]:
    """Writes `llama.npz`, rows of tokens that count up in steps of their own, and gives the job."""
    import models

    random = np.random.default_rng(4)
    first, step = random.integers(0, VOCABULARY, (2, ROWS, 1))
    tokens = (first + step % 7 * np.arange(LENGTH + 1)) % VOCABULARY
    np.savez(folder / "llama.npz", tokens=tokens.astype(np.uint8))
    return models.raw_job(__file__, folder, {"train": "llama.npz", "input": "tokens"}, objective="next_token")
