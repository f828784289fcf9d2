"""Restore times of latent rows over SGLang's own."""

from __future__ import annotations

from typing import Any

from bench.transfers.latent import ratios


def row(codec: str, ms: float, ahead: float | None) -> dict[str, Any]:
    times = {"ms_median": ms, "ms_ahead": ahead}
    return {"codec": codec, "transfer": "dma", "tokens": 2048, "slots": "random", **times}


def test_a_ratio_is_of_the_same_setting_and_none_without_stock() -> None:
    stock, ours = row("bf16", 2.0, 1.0), row("int8", 1.0, 0.6)
    (found,) = ratios("a model", [stock, ours])
    assert (found["ratio"], found["ratio_ahead"]) == (0.5, 0.6)
    assert ratios("a model", [ours]) == []
    assert ratios("a model", [stock, row("int8", 1.0, None)])[0]["ratio_ahead"] is None
