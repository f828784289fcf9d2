"""Shapes of rows: parts of different widths, and what they take in SGLang's own pool."""

from __future__ import annotations

import pytest

from hiqcache.geometry import GeometryError, KVGeometry
from hiqcache.record import Part


@pytest.mark.parametrize(
    ("geometry", "bytes_per_token"),
    [
        (KVGeometry.of_heads(36, 8, 128), 147_456),  # Qwen3-8B
        (KVGeometry.of_heads(30, 3, 64, "float16"), 23_040),  # SmolLM2-135M
        (KVGeometry.of_heads(48, 4, 192, v_head_dim=128), 122_880),
        (KVGeometry.of_latent(61, 512, 64), 70_272),  # DeepSeek-V3
        (KVGeometry.of_latent(2, 512, 0), 2_048),
    ],
)
def test_bytes_of_a_stock_token(geometry: KVGeometry, bytes_per_token: int) -> None:
    assert geometry.stock_bytes_per_token == bytes_per_token


def test_a_geometry_reads_as_a_sentence() -> None:
    latent = KVGeometry.of_latent(61, 512, 64)
    assert str(latent) == "61 layers of latent 1 x 512, rope 1 x 64 (bfloat16)"


@pytest.mark.parametrize(
    ("layers", "parts", "dtype", "message"),
    [
        (0, (Part("k", 1, 1),), "bfloat16", "must be positive"),
        (1, (), "bfloat16", "must be positive"),
        (1, (Part("k", 0, 1),), "bfloat16", "must be positive"),
        (1, (Part("k", 1, 0),), "bfloat16", "must be positive"),
        (1, (Part("k", 1, 1),), "float32", "serves bfloat16, float16, float8"),
    ],
)
def test_shapes_that_no_pool_has(
    layers: int, parts: tuple[Part, ...], dtype: str, message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        KVGeometry(layers, parts, dtype)
