"""Geometry from Hugging Face configurations, and clear errors for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hiqcache.geometry import GeometryError, KVGeometry

QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {**{k: v for k, v in QWEN3_8B.items() if k not in keys}, **changes}


def test_bytes_of_a_stock_token() -> None:
    assert KVGeometry.from_config(QWEN3_8B).stock_bytes_per_token == 147_456


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_split_or_replicated_over_ranks(tp: int, heads: int) -> None:
    assert KVGeometry.from_config(QWEN3_8B, tp).heads == heads


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (without("head_dim"), KVGeometry(36, 8, 128)),
        (without("num_key_value_heads"), KVGeometry(36, 32, 128)),
        (without("torch_dtype", dtype="float16"), KVGeometry(36, 8, 128, "float16")),
        (without("torch_dtype", dtype="float32"), KVGeometry(36, 8, 128, "float16")),
        ({"text_config": QWEN3_8B}, KVGeometry(36, 8, 128)),
    ],
)
def test_defaults_follow_sglang(config: dict[str, Any], expected: KVGeometry) -> None:
    assert KVGeometry.from_config(config) == expected


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        (without(kv_lora_rank=512), 1, "MLA model.*HIQCACHE_CODEC=bf16"),
        (QWEN3_8B, 3, "8 KV heads cannot be split over --tp 3"),
        (QWEN3_8B, 0, "at least 1"),
        (without("num_hidden_layers"), 1, "num_hidden_layers is None"),
        (without(num_hidden_layers=True), 1, "num_hidden_layers is True"),
        (without(head_dim="128"), 1, "head_dim is '128'"),
        (without("head_dim", hidden_size=4097), 1, "no multiple"),
        (without(torch_dtype="float8_e4m3fn"), 1, "serves bfloat16, float16"),
        (without(layer_types=["linear_attention", "full_attention"]), 1, "linear_attention"),
    ],
)
def test_what_is_not_served_is_said(config: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        KVGeometry.from_config(config, tp)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GeometryError, match=r"config\.json: no such file"):
        KVGeometry.from_path(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GeometryError, match="cannot be read as JSON"):
        KVGeometry.from_path(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(GeometryError, match="no JSON object"):
        KVGeometry.from_path(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert KVGeometry.from_path(tmp_path) == KVGeometry.from_path(tmp_path / "config.json")
