"""K of real model classes: which turn by halves of the whole head in every layer, as int4 wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, DynamicCache, PretrainedConfig

from hiqcache.rotary import HALVES, otherwise

#: Every fourth layer of SmolLM3 and Cohere 2 does not turn.
LAYERS, WIDTH, POSITIONS = 4, 32, 16

OTHERS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("cohere", "ernie4_5")),  # neighbours
    *((kind, {}) for kind in ("glm4", "phi", "gpt_neox")),  # a part of a head
    *((kind, {}) for kind in ("cohere2", "smollm3")),  # not in every layer
    ("gpt2", {}),  # in none
    ("phi3", {"partial_rotary_factor": 0.5}),
]


def configuration(kind: str, **given: Any) -> PretrainedConfig:
    return AutoConfig.for_model(
        kind,
        **{
            "hidden_size": 2 * WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": WIDTH,
            "vocab_size": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "max_position_embeddings": 16384,
            **given,
        },
    )


def turns_by_halves(config: PretrainedConfig) -> bool:
    """Whether channels c and c + D/2 of every layer's K turn together, the faster the smaller c.

    The same token at every position: whatever differs between rows of K is their turning.
    """
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.full((1, POSITIONS), 5), use_cache=True, past_key_values=cache)
    assert len(cache.layers) == LAYERS
    return all(_turns(layer.keys[0].double()) for layer in cache.layers)


def _turns(rows: torch.Tensor) -> bool:
    """Of K ``[heads, positions, D]``."""
    first, second = rows.chunk(2, dim=-1)
    length = torch.hypot(first, second)
    angle = torch.atan2(second, first).diff(dim=1)
    speed = torch.remainder(angle + torch.pi, 2 * torch.pi).sub(torch.pi).abs()
    return bool(
        torch.allclose(length, length[:, :1].expand_as(length), rtol=1e-3, atol=1e-4)
        # Clearly turning, and no channel slower than a later one.
        and (speed[..., 0] > 0.5).all()
        and (speed.mean(dim=1).diff(dim=-1) < 1e-3).all()
    )


@pytest.mark.parametrize("kind", HALVES)
def test_k_of_what_is_known_turns_by_halves_of_the_whole_head(kind: str) -> None:
    config = configuration(kind)
    assert turns_by_halves(config)
    assert otherwise(lambda key: getattr(config, key, None)) == ""


@pytest.mark.parametrize(("kind", "given"), OTHERS, ids=str)
def test_k_that_turns_otherwise_is_named(kind: str, given: dict[str, Any]) -> None:
    config = configuration(kind, **given)
    assert not turns_by_halves(config)
    named = otherwise(lambda key: getattr(config, key, None))
    assert repr(kind) in named
    assert ("partial_rotary_factor 0.5" in named) == bool(given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, ""),
        ({"partial_rotary_factor": 1.0, "rope_is_neox_style": True}, ""),
        ({"rope_is_neox_style": False}, "rope_is_neox_style False"),
        ({"rope_scaling": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25}}}, "factor 0.25"),
    ],
    ids=str,
)
def test_keys_that_turn_a_known_model_otherwise(given: dict[str, Any], named: str) -> None:
    found = otherwise({"model_type": "llama", **given}.get)
    assert named in found
    assert bool(found) == bool(named)


def test_a_configuration_without_a_type_is_named() -> None:
    assert otherwise({}.get) == "K of model type None"
