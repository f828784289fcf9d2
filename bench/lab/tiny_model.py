"""A model of three small layers with random weights: a server of it answers in milliseconds.

Its layers are drawn wide enough that every token of a prompt shows in the answer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

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


def write(out: Path, keys: float = 1.0) -> Path:
    """The model's folder ``out``.

    keys: what K's projections are multiplied by. Below 1, attention weighs tokens more evenly, and
    answers feel an error of K less than one of V.
    """
    with tempfile.TemporaryDirectory() as shape:
        Path(shape, "config.json").write_text(json.dumps(CONFIG))
        random_model.write(Path(shape), out)
    if keys != 1:
        file = out / "model.safetensors"
        weights = load_file(file)
        for name, weight in weights.items():
            if "k_proj" in name:
                weight *= keys
        save_file(weights, file, metadata={"format": "pt"})
    return out
