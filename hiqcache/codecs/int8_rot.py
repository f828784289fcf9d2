"""Codec int8-rot: int8 after a fixed random sign flip and a Walsh-Hadamard rotation of the head."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import ClassVar

import torch

from hiqcache.codecs.base import Codec
from hiqcache.codecs.int8 import BF16_ROUNDING, SCALE_MIN, quantise, to_rows

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
def _signs_on(head_dim: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(signs(head_dim), dtype=torch.float32, device=device)


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """``values`` times the (unnormalised, symmetric) Walsh-Hadamard matrix of the last axis.

    Sylvester's construction by butterflies of distance 1, 2, 4, ...: each fp32 result is a sum of
    pairwise sums in that fixed order, which every other implementation may follow bit by bit.
    """
    shape, width = values.shape, 1
    while width < shape[-1]:
        pairs = values.reshape(*shape[:-1], -1, 2, width)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        values = torch.stack((left + right, left - right), dim=-2).reshape(shape)
        width *= 2
    return values


class Int8Rot(Codec):
    """x -> int8 of H(signs * x) / D, and back by signs * (H codes) * scale, with D = head_dim.

    That is the orthonormal rotation H / sqrt(D) with its irrational factor moved into the scale:
    dividing by D is exact, and H codes is a sum of whole numbers below 2^24, exact in any order.

    Bound, in the L2 norm of each finite head:
    ||restored - x|| <= (0.5 + 2^-8) * D * scale + 2^-8 * ||restored|| + sqrt(D) * t, where t is
    half of the dtype's smallest subnormal. The first term is half a code step in each of D
    elements, carried back by H, which stretches by sqrt(D), with room for fp32 rounding in the
    rotation.

    Rotation spreads a head's outliers over its elements, so the scale fits the rest; it needs no
    calibration and no extra bytes. A restored row that is stored again may differ by a code step:
    ten such cycles stay within twice the bound.
    """

    name: ClassVar[str] = "int8-rot"

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim = rows.shape[-1]
        self.row_formats(1, dim)
        # Divided first: a sum of D of the largest bf16 values would overflow fp32.
        values = rows.float() / dim * _signs_on(dim, rows.device)
        return quantise(hadamard(values), SCALE_MIN[rows.dtype])

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sums = hadamard(codes.float()) * _signs_on(codes.shape[-1], codes.device)
        return to_rows(sums * scales.float().unsqueeze(-1), dtype)

    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        _, scales = self.encode(rows)
        dim = rows.shape[-1]
        x, y = rows.double(), restored.double()
        half_step = torch.finfo(rows.dtype).smallest_normal * torch.finfo(rows.dtype).eps / 2
        bound = (
            (0.5 + BF16_ROUNDING) * dim * scales.double()
            + BF16_ROUNDING * y.norm(dim=-1)
            + math.sqrt(dim) * half_step
        )
        excess: torch.Tensor = (y - x).norm(dim=-1) - bound
        return excess
