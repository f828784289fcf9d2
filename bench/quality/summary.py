"""From rows to the figures that are quoted: point estimates with 95 % bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.lab.bootstrap import Interval, Sample, bootstrap

Row = dict[str, Any]

#: What issue and README promise; a run says whether it holds.
KL_SHARE_OF_INT8 = 0.5
INT8_PERPLEXITY_RATIO = 1.005


def summarise(windows: Sequence[Row], recalls: Sequence[Row], generate: int) -> dict[str, Any]:
    """The figures of one arm; intervals draw whole windows, since a text's tokens go together."""
    change = [np.subtract(row["nll"], row["reference_nll"]) for row in windows]
    kl = [np.asarray(row["kl"]) for row in windows]
    top1 = [np.asarray(row["top1"], dtype=np.float64) for row in windows]
    greedy = [row for row in windows if row["generated"] == generate and generate > 1]
    whole = [row for row in windows if row["kl_whole"] is not None]
    answered = [row for row in [*windows, *recalls] if row["identical"] is not None]
    tokens = sum(row["prefix"] for row in [*windows, *recalls])
    return {
        "positions": sum(len(row["kl"]) for row in windows),
        "requests": len(windows) + len(recalls),
        "prefix_tokens": tokens,
        "host_share": sum(row["host"] for row in [*windows, *recalls]) / tokens,
        "perplexity_ratio": bootstrap(change, lambda x: math.exp(x.mean())).as_dict(),
        "kl_mean": bootstrap(kl, _mean).as_dict(),
        "kl_p99": bootstrap(kl, lambda x: float(np.percentile(x, 99))).as_dict(),
        "top1_agreement": bootstrap(top1, _mean).as_dict(),
        "greedy": _greedy(greedy, generate),
        "identical": sum(row["identical"] for row in answered),
        "comparable": len(answered),
        "lumping": {
            "positions": sum(len(row["kl"]) for row in whole),
            "kl_lumped": _mean(np.concatenate([row["kl"] for row in whole])) if whole else None,
            "kl_whole": (
                _mean(np.concatenate([row["kl_whole"] for row in whole])) if whole else None
            ),
        },
        "recall": {
            kind: _recall([row for row in recalls if row["kind"] == kind])
            for kind in sorted({row["kind"] for row in recalls})
        },
    }


def by_text(windows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Point estimates of each text alone."""
    result = {}
    for text in sorted({row["text"] for row in windows}):
        own = [row for row in windows if row["text"] == text]
        nll = np.concatenate([row["nll"] for row in own])
        reference = np.concatenate([row["reference_nll"] for row in own])
        kl = np.concatenate([row["kl"] for row in own])
        result[text] = {
            "perplexity": float(math.exp(nll.mean())),
            "perplexity_ratio": float(math.exp((nll - reference).mean())),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.percentile(kl, 99)),
            "top1_agreement": float(np.concatenate([row["top1"] for row in own]).mean()),
        }
    return result


def kl_share(windows: Sequence[Row], against: Sequence[Row]) -> Interval:
    """Mean KL of one arm as a share of another's, over the same windows."""
    pairs = [
        np.stack([row["kl"], other["kl"]], axis=1)
        for row, other in zip(windows, against, strict=True)
    ]
    return bootstrap(pairs, lambda x: float(x[:, 0].mean() / x[:, 1].mean()))


def acceptance(arms: dict[str, dict[str, Any]], share: Interval | None) -> dict[str, Any]:
    """The promises, what was measured, and whether they hold (None: an arm did not run)."""
    int8 = arms["int8"]["perplexity_ratio"]["value"] if "int8" in arms else None
    return {
        "bf16_restored_identical": (
            arms["bf16"]["identical"] == arms["bf16"]["comparable"] if "bf16" in arms else None
        ),
        "int8_rot_kl_share_of_int8": share.as_dict() if share else None,
        "int8_rot_kl_at_most": KL_SHARE_OF_INT8,
        "int8_rot_kl_met": share.value <= KL_SHARE_OF_INT8 if share else None,
        "int8_perplexity_ratio": int8,
        "int8_perplexity_ratio_at_most": INT8_PERPLEXITY_RATIO,
        "int8_perplexity_ratio_met": None if int8 is None else int8 <= INT8_PERPLEXITY_RATIO,
    }


def _mean(values: Sample) -> float:
    return float(np.mean(values))


def _greedy(rows: Sequence[Row], generate: int) -> dict[str, float] | None:
    if not rows:
        return None
    agreed = [row["agreed"] for row in rows]
    return {
        "texts": len(rows),
        "tokens": generate,
        "agreed_mean": float(np.mean(agreed)),
        "agreed_whole": sum(length == generate for length in agreed) / len(agreed),
    }


def _recall(rows: Sequence[Row]) -> dict[str, Any]:
    depths = sorted({round(row["depth"], 2) for row in rows})
    by_depth = {
        str(depth): [row for row in rows if round(row["depth"], 2) == depth] for depth in depths
    }
    return {
        "questions": len(rows),
        "recalled": sum(row["recalled"] for row in rows),
        "reference_recalled": sum(row["reference_recalled"] for row in rows),
        "lost": sum(row["reference_recalled"] and not row["recalled"] for row in rows),
        "answer_nll": float(np.mean([row["nll"] for row in rows])),
        "reference_answer_nll": float(np.mean([row["reference_nll"] for row in rows])),
        "by_depth": {
            depth: {
                "questions": len(own),
                "recalled": sum(row["recalled"] for row in own),
                "reference_recalled": sum(row["reference_recalled"] for row in own),
            }
            for depth, own in by_depth.items()
        },
    }
