"""A model of three small layers with random weights: a server of it answers in milliseconds.

Its layers are drawn wide enough that every token of a prompt shows in the answer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench.lab import random_model

#: As config.json says it. Ids up to 1,024; head_dim 64, which every transfer serves.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

#: SGLang's arguments for a model without a tokenizer.
ARGS = ("--skip-tokenizer-init",)


def write(out: Path) -> Path:
    """The model's folder ``out``."""
    with tempfile.TemporaryDirectory() as shape:
        Path(shape, "config.json").write_text(json.dumps(CONFIG))
        return random_model.write(Path(shape), out)
