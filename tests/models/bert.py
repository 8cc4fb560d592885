"""A tiny BERT that classifies sequences of several lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

ROWS, VOCABULARY, LENGTH, CLASSES = 61, 128, 16, 3


def config() -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        attn_implementation="sdpa",
    )


def model() -> nn.Module:
    return BertForSequenceClassification(config())


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": batch["input_ids"].long(), "attention_mask": batch["attention_mask"].long()}


def raw_job(folder: Path) -> dict[str, Any]:
    """Writes `bert.parquet`, sequences whose first token tells the class, and gives the job."""
    import models

    random = np.random.default_rng(5)
    lengths = random.integers(LENGTH // 2, LENGTH + 1, (ROWS, 1))
    mask = (np.arange(LENGTH) < lengths).astype(np.int8)
    tokens = random.integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int16) * mask
    columns = {
        "input_ids": pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), LENGTH),
        "attention_mask": pa.FixedSizeListArray.from_arrays(pa.array(mask.ravel()), LENGTH),
        "label": pa.array(tokens[:, 0] % CLASSES),
    }
    pq.write_table(pa.table(columns), folder / "bert.parquet")
    return models.raw_job(__file__, folder, {"train": "bert.parquet", "target": "label"}, objective="cross_entropy")
