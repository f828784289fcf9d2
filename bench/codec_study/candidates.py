"""The candidates, from FP8 and int8 to three and a half times the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.codec_study.page_quantisers import Kept, MeanFirst, PerChannel, Unturned
from bench.codec_study.quantisers import (
    SEARCH,
    FirstLayers,
    Float8,
    PerToken,
    Place,
    Quantiser,
)


@dataclass(frozen=True)
class Candidate:
    """A codec of K and V.

    ``block``: tokens that are stored together: 1, or a page's. ``behind_fp8``: the rows come from
    an FP8 KV cache, and go back to it.
    """

    name: str
    k: Quantiser
    v: Quantiser
    block: int = 1
    behind_fp8: bool = False

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, at: Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Restored K and V of fp32 rows ``[heads, tokens, width]``."""
        if self.behind_fp8:
            k, v = Float8()(k, at), Float8()(v, at)
        k, v = self.k(k, at), self.v(v, at)
        if self.behind_fp8:
            k, v = Float8()(k, at), Float8()(v, at)
        return k, v

    def times_bf16(self, width: int, layers: int) -> float:
        """Tokens in the memory of one BF16 token."""
        return 32 / (self.k.bits(width, layers) + self.v.bits(width, layers))


INT8 = PerToken(8)
INT8_ROT = PerToken(8, rotated=True)
V4 = PerToken(4, "asymmetric", rotated=True)
V4_GROUPS = PerToken(4, "asymmetric", rotated=True, group=32)
V4_NORMAL = PerToken(4, "lloyd-max", rotated=True, clips=SEARCH)
V5 = PerToken(5, "asymmetric", rotated=True)
K4 = PerChannel((4,))
#: High rotary frequencies first: a code of 3 bits and one of 5 share a byte.
K3_5 = PerChannel((3, 5))

#: What the issue's targets compare with.
FP8 = Candidate("fp8 e4m3, scale 1", Float8(), Float8())
FINEST = Candidate("int8, K mean, rotated", MeanFirst(INT8_ROT), INT8_ROT, 64)
#: hiqcache's int4.
FOUR_BITS = Candidate("K 3/5 bits per channel, 4 kept; V4", Kept(K3_5, 4), V4, 64)

CANDIDATES: tuple[Candidate, ...] = (
    FP8,
    FOUR_BITS,
    FINEST,
    Candidate("int8", INT8, INT8),
    Candidate("int8-rot", INT8_ROT, INT8_ROT),
    # Any page size.
    Candidate("4 bits, groups of 32", PerToken(4, group=32), PerToken(4, group=32)),
    Candidate("4 bits, groups of 32, rotated", V4_GROUPS, V4_GROUPS),
    Candidate("4 bits, Lloyd-Max, rotated", V4_NORMAL, V4_NORMAL),
    Candidate("K int8-rot; V4", INT8_ROT, V4),
    # A page is the block. What V costs, and how:
    Candidate("K int8, mean, rotated; V4", MeanFirst(INT8_ROT), V4, 64),
    Candidate("K int8, mean, rotated; V4 in groups of 32", MeanFirst(INT8_ROT), V4_GROUPS, 64),
    Candidate("K int8, mean, rotated; V5", MeanFirst(INT8_ROT), V5, 64),
    # Per channel (KIVI), and what makes it better or worse:
    Candidate("K4 per channel; V4", K4, V4, 64),
    Candidate("K4 per channel, searched; V4", PerChannel((4,), clips=SEARCH), V4, 64),
    Candidate(
        "K4 per channel, rotated over tokens; V4", PerChannel((4,), tokens_rotated=True), V4, 64
    ),
    Candidate("K4 per channel of 32 tokens; V4", PerChannel((4,), 32), V4, 32),
    Candidate(
        "K4 per channel; V4; first 2 layers int8-rot",
        FirstLayers(INT8_ROT, K4, 2),
        FirstLayers(INT8_ROT, V4, 2),
        64,
    ),
    Candidate("K4 per channel, 4 kept; V4", Kept(K4, 4), V4, 64),
    # The mean taken off:
    Candidate("K4 mean, rotated; V4", MeanFirst(V4), V4, 64),
    Candidate(
        "K4 optional mean before RoPE, rotated; V4",
        MeanFirst(V4, optional=True, unturned=True),
        V4,
        64,
    ),
    # Bits where the frequencies are low:
    Candidate("K 3/5 bits per channel; V4", K3_5, V4, 64),
    Candidate("K 3/5 bits per channel, 4 kept; V4 in groups of 32", FOUR_BITS.k, V4_GROUPS, 64),
    Candidate("K 3/5 bits per channel, 4 kept; V4 Lloyd-Max", FOUR_BITS.k, V4_NORMAL, 64),
    Candidate("K 3/5 bits per channel, 4 kept by range; V4", Kept(K3_5, 4, choose="range"), V4, 64),
    Candidate("K 3/5 bits per channel, 2 kept; V4", Kept(K3_5, 2), V4, 64),
    Candidate("K 3/4/4/5 bits per channel, 4 kept; V4", Kept(PerChannel((3, 4, 4, 5)), 4), V4, 64),
    Candidate("K 3/5 bits per channel before RoPE, 4 kept; V4", Unturned(Kept(K3_5, 4)), V4, 64),
    Candidate("K 4/5 bits per channel, 4 kept; V4", Kept(PerChannel((4, 5)), 4), V4, 64),
    Candidate("K 3/6 bits per channel, 4 kept; V4", Kept(PerChannel((3, 6)), 4), V4, 64),
    Candidate("K6 per channel, 4 kept; V5", Kept(PerChannel((6,)), 4), V5, 64),
    # What an FP8 KV cache keeps behind it.
    Candidate(
        "fp8, then " + FOUR_BITS.name, FOUR_BITS.k, FOUR_BITS.v, FOUR_BITS.block, behind_fp8=True
    ),
)

#: Measured over many cycles of restoring and storing again.
DRIFT = (FINEST, FOUR_BITS)

#: Measured with every row quantised, too: the targets' neighbours.
WHOLE = tuple(
    candidate
    for candidate in CANDIDATES
    if candidate.name
    in {
        FP8.name,
        "int8-rot",
        FINEST.name,
        "4 bits, groups of 32, rotated",
        "K4 per channel; V4",
        FOUR_BITS.name,
        "K 3/6 bits per channel, 4 kept; V4",
    }
)
