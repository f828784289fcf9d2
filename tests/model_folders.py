"""Configurations as model folders carry them, some with what their class fills in left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QWEN3_8B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B: Mapping[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GEMMA2_2B: Mapping[str, Any] = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
STARCODER: Mapping[str, Any] = {
    "model_type": "gpt_bigcode",
    "architectures": ["GPTBigCodeForCausalLM"],
    "n_layer": 40,
    "n_head": 48,
    "n_embd": 6144,
    "multi_query": True,
    "torch_dtype": "float32",
}
#: Plain heads, of which a part turns: its class says 0.5 where this says nothing.
PHI2: Mapping[str, Any] = {
    "model_type": "phi",
    "architectures": ["PhiForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
CHATGLM3: Mapping[str, Any] = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "num_layers": 28,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 32768,
    "padded_vocab_size": 65024,
    "torch_dtype": "float16",
}
DEEPSEEK_V3: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
GLM5: Mapping[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 78,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT: Mapping[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "torch_dtype": "bfloat16",
}
MAMBA2: Mapping[str, Any] = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "num_hidden_layers": 64,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "torch_dtype": "bfloat16",
}


#: A plain model whose V is narrower than its K. No published one that SGLang serves is known.
UNEQUAL: Mapping[str, Any] = {**QWEN3_8B, "num_hidden_layers": 2, "v_head_dim": 64}
KIMI_LINEAR: Mapping[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "torch_dtype": "bfloat16",
}
INKLING: Mapping[str, Any] = {
    "model_type": "inkling_mm_model",
    "architectures": ["InklingForConditionalGeneration"],
    "text_config": {
        "model_type": "inkling_model",
        "num_hidden_layers": 4,
        "local_layer_ids": [0, 1, 2],
        "use_sconv": True,
    },
    "torch_dtype": "bfloat16",
}
DOTS3_NOTE: Mapping[str, Any] = {
    "model_type": "dots3_note",
    "architectures": ["Dots3NoteForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V4: Mapping[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "kv_source_layer_ids": [],
    "torch_dtype": "bfloat16",
}
MINIMAX_M3: Mapping[str, Any] = {
    "model_type": "minimax_m3_vl",
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "text_config": {
        "model_type": "minimax_m2",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 512,
        "max_position_embeddings": 2048,
        "vocab_size": 256,
        "sparse_attention_config": {
            "sparse_index_dim": 64,
            "sparse_attention_freq": [0, 1, 1],
            "sparse_disable_index_value": [0, 1, 1],
        },
    },
    "torch_dtype": "bfloat16",
}

#: One of each family of the table (hiqcache/compatibility.py), and the tokens per page it needs.
OF_FAMILY: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "plain": (QWEN3_8B, 1),
    "unequal": (UNEQUAL, 1),
    "mla": (DEEPSEEK_V3, 1),
    "dsa": (GLM5, 64),
    "sliding": (GPT_OSS_20B, 1),
    "linear": (QWEN3_NEXT, 1),
    "linear_mla": (KIMI_LINEAR, 1),
    "linear_sliding": (INKLING, 1),
    "mla_sliding": (DOTS3_NOTE, 1),
    "deepseek_v4": (DEEPSEEK_V4, 256),
    "sparse": (MINIMAX_M3, 1),
    "state": (MAMBA2, 1),
}


def without(config: Mapping[str, Any], *keys: str, **changes: Any) -> dict[str, Any]:
    """``config`` without ``keys``, and with ``changes``."""
    return {**{k: v for k, v in config.items() if k not in keys}, **changes}


def write(folder: Path, config: Mapping[str, Any]) -> Path:
    """``folder`` with ``config`` as its config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder
