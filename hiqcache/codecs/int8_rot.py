"""Codec int8-rot: int8 after a fixed random sign flip and a Walsh-Hadamard rotation of the head."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import ClassVar

import torch

from hiqcache.codecs.base import TokenCodec
from hiqcache.codecs.int8 import BF16_ROUNDING, CODE_MAX, FLOOR, SCALE_MIN, quantise, to_rows
from hiqcache.record import Part

#: Part of the format: element i of a head is negated where bit i (least significant first within a
#: byte) of SHA-256("hiqcache int8-rot signs 0"), then of "... 1" and so on, is set. Signs matter:
#: without them, rotation did worse than plain int8 on one text of the study behind this codec.
SIGN_SEED = "hiqcache int8-rot signs"


@lru_cache
def signs(head_dim: int) -> tuple[int, ...]:
    """The published signs, +1 or -1, of a head's ``head_dim`` elements."""
    stream = b"".join(
        hashlib.sha256(f"{SIGN_SEED} {block}".encode()).digest()
        for block in range(-(-head_dim // 256))
    )
    return tuple(-1 if stream[i // 8] >> (i % 8) & 1 else 1 for i in range(head_dim))


@lru_cache
def signs_on(head_dim: int, device: torch.device) -> torch.Tensor:
    """``signs`` as fp32 on ``device``."""
    return torch.tensor(signs(head_dim), dtype=torch.float32, device=device)


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """``values`` times the (unnormalised, symmetric) Walsh-Hadamard matrix of the last axis.

    Sylvester's construction by butterflies of distance 1, 2, 4, ...: each fp32 result is a sum of
    pairwise sums in that fixed order.
    """
    shape, width = values.shape, 1
    while width < shape[-1]:
        pairs = values.reshape(*shape[:-1], -1, 2, width)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        values = torch.stack((left + right, left - right), dim=-2).reshape(shape)
        width *= 2
    return values


class Int8Rot(TokenCodec):
    """x -> int8 of H(signs * x) / D, and back by signs * (H codes) * scale, with D = head_dim.

    That is the orthonormal rotation H / sqrt(D) with its irrational factor moved into the scale:
    dividing by D is exact, and H codes is a sum of whole numbers below 2^24, exact in any order.

    Bound, in the L2 norm of each finite head, with step = max|H(signs * x)| / D / 127:
    ||restored - x|| <= (0.5 + 2^-7) * D * step + 2^-8 * ||restored|| + sqrt(D) * floor. The first
    term is half a code step in each of D elements, carried back by H, which stretches by sqrt(D),
    with room for a scale that bf16 rounded up and for fp32 rounding in the rotation; floor is
    what the smallest scale and subnormals cost each element: as int8's, for bf16 2^-116.

    Rotation spreads a head's outliers over its elements, so the scale fits the rest; it needs no
    calibration and no extra bytes. A restored row that is stored again may differ by a code step:
    ten such cycles stay within twice the bound.
    """

    name: ClassVar[str] = "int8-rot"
    #: int8's, in fp16 divided by the widest head, since values are divided by D first.
    scale_min: ClassVar = {torch.bfloat16: SCALE_MIN[torch.bfloat16], torch.float16: 2.0**-31}
    #: bf16: half of the smallest scale, stretched by sqrt(D) of at most 16, with room.
    _floor: ClassVar = {torch.bfloat16: 2.0**-116, torch.float16: FLOOR[torch.float16]}

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim = rows.shape[-1]
        self.row_formats([Part("these", 1, dim)])
        # Divided first: a sum of D of the largest bf16 values would overflow fp32.
        values = rows.float() / dim * signs_on(dim, rows.device)
        return quantise(hadamard(values), self.scale_min[rows.dtype])

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sums = hadamard(codes.float()) * signs_on(codes.shape[-1], codes.device)
        return to_rows(sums * scales.float().unsqueeze(-1), dtype)

    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        dim = rows.shape[-1]
        x, y = rows.double(), restored.double()
        rotated = hadamard(x * signs_on(dim, rows.device))
        # D * step: the rotated maximum is D times what encode divides by 127.
        reach = rotated.abs().amax(dim=-1) / CODE_MAX
        bound = (
            (0.5 + 2 * BF16_ROUNDING) * reach
            + BF16_ROUNDING * y.norm(dim=-1)
            + math.sqrt(dim) * self._floor[rows.dtype]
        )
        excess: torch.Tensor = (y - x).norm(dim=-1) - bound
        return excess
