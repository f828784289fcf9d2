"""Tiny models of families that no package index carries small: real classes, random weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
)

#: Large enough for answers to differ by prompt.
_SPREAD = 0.08


def tiny(family: str, folder: Path, tokenizer: Path) -> Path:
    """The model of ``family`` (a key of TINY) in ``folder``, with the tokenizer of ``tokenizer``.

    The same weights every time.
    """
    known = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = TINY[family](vocab_size=len(known), initializer_range=_SPREAD)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


def _plain(**given: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        # SGLang splits no model over stages whose embeddings are its head's weights.
        tie_word_embeddings=False,
        **given,
    )


def _gemma3(**given: Any) -> Gemma3TextConfig:
    """Five layers of windows, shorter than the tests' prompts, and one without."""
    return Gemma3TextConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=64,
        max_position_embeddings=4096,
        **given,
    )


def _mla(**given: Any) -> DeepseekV2Config:
    return DeepseekV2Config(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        # SGLang reads these whatever the layers are.
        moe_layer_freq=1,
        first_k_dense_replace=3,
        max_position_embeddings=4096,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        **given,
    )


#: Configurations by family.
TINY: Mapping[str, Callable[..., Any]] = {"plain": _plain, "gemma3": _gemma3, "mla": _mla}
