"""The models that are served: each a real one's KV geometry and layers, narrow everywhere else.

What decides the rows that a host pool keeps (layers, their kinds, KV heads, head_dim, latent, rope,
window, recurrent state) is the named model's. Hidden width, feed-forward, experts and vocabulary
are not: random weights are made in seconds, and a server is up in a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.verify.stages import Sizes

_HIDDEN = 1024
#: 1.28 / sqrt(_HIDDEN), which is what Qwen3-8B's 0.02 is at its width of 4,096: scores of attention
#: are then as spread as there, where each token of a prompt shows in the answer
#: (results/h200/server.json).
_SPREAD = 0.04
_NARROW: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": _HIDDEN,
        "initializer_range": _SPREAD,
        "vocab_size": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
)
_EXPERTS = 8
_EXPERT_WIDTH = 256


class Timed(NamedTuple):
    """Restores to be timed: ``prompts`` of ``tokens`` each, more than L1 holds, less than L2."""

    prompts: int
    tokens: int


@dataclass(frozen=True)
class Subject:
    """One model.

    model: whose geometry it is. cut: what of that was left out, beside the narrow rest.
    config: config.json. arms: names of the arms, stock first. sizes: what is asked of each.
    timed: restores, for their time. args: SGLang's arguments.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    arms: tuple[str, ...]
    sizes: Sizes
    timed: tuple[Timed, ...]
    args: tuple[str, ...]
    cut: str = ""

    def on_cpu(self) -> Subject:
        """Three layers of it and a few prompts: tries the measurement where there is no GPU."""
        config = {**self.config, "num_hidden_layers": 3}
        return replace(
            self,
            config=config,
            arms=("bf16", "int8"),
            sizes=Sizes(4, 400, 60, 80, 120, 4, changed=8),
            timed=(Timed(4, 400),),
            args=(
                *("--max-total-tokens", "1024", "--hicache-ratio", "2"),
                # torch_native reads latent rows as they lie, never in chunks of another attention.
                "--disable-chunked-prefix-cache",
            ),
            cut="3 layers of it",
        )


def _args(tokens: int, running: int, gigabytes: int, *further: str) -> tuple[str, ...]:
    return (
        *("--max-total-tokens", str(tokens), "--max-running-requests", str(running)),
        *("--hicache-size", str(gigabytes), *further),
    )


_ARMS = ("bf16", "int8:dma", "int8:fused")

_YARN = {"beta_fast": 32, "beta_slow": 1, "rope_type": "yarn", "type": "yarn"}

MLA = Subject(
    "mla",
    "DeepSeek-V2-Lite",
    {
        **_NARROW,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 1024,
        # Dense throughout; SGLang reads the rest whatever the layers are.
        "first_k_dense_replace": 27,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            **_YARN,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
    (*_ARMS, "int8-rot:dma"),
    Sizes(14, 2048, 600, 160, 2000, 32),
    (Timed(10, 2048), Timed(3, 8192)),
    _args(16_384, 32, 1),
)

GPT_OSS = Subject(
    "gpt-oss",
    "gpt-oss-20b",
    {
        **_NARROW,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "intermediate_size": _EXPERT_WIDTH,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            **_YARN,
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    _ARMS,
    Sizes(14, 2048, 800, 160, 2000, 32),
    (Timed(10, 2048), Timed(3, 8192)),
    # Its default needs a package that comes from a hub.
    _args(16_384, 32, 2, "--moe-runner-backend", "triton"),
)

#: Recurrent state is most of what a prefix takes here, so there are fewer and longer prompts.
_LONG = Sizes(20, 4096, 700, 512, 2000, 8)
_LONG_TIMED = (Timed(18, 4096), Timed(5, 16_384))
_STATES = ("--max-mamba-cache-size", "64")

QWEN3_NEXT = Subject(
    "qwen3-next",
    "Qwen3-Next-80B-A3B",
    {
        **_NARROW,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "intermediate_size": 1024,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": _EXPERT_WIDTH,
        "shared_expert_intermediate_size": _EXPERT_WIDTH,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS,
        "norm_topk_prob": True,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "rope_scaling": None,
    },
    _ARMS,
    _LONG,
    _LONG_TIMED,
    _args(65_536, 8, 3, *_STATES),
    cut="8 of its 48 layers",
)

FALCON_H1 = Subject(
    "falcon-h1",
    "Falcon-H1-0.5B",
    {
        **_NARROW,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000000000.0,
    },
    _ARMS,
    _LONG,
    _LONG_TIMED,
    _args(65_536, 8, 3, *_STATES),
    cut="12 of its 36 layers",
)

SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {subject.name: subject for subject in (MLA, GPT_OSS, QWEN3_NEXT, FALCON_H1)}
)
