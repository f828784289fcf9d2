"""Ways to store K rows or V rows, each as what it restores and what it costs.

A quantiser maps fp32 rows ``[heads, tokens, width]`` to what would be restored, in fp32, so that
the arithmetic of a model does not hide the codec. ``bits`` counts everything that it stores: codes,
scales (bf16), and what a page keeps beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from hiqcache.codecs.int8_rot import hadamard, signs

SCALE_BITS = 16
SCALE_MIN = 2.0**-120

#: Lloyd-Max levels of a standard normal distribution, 16 of them (Max, 1960); the negative half
#: mirrors these.
LLOYD_MAX = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)

#: Shares of the largest value that a search tries, and takes the one with the least squared error.
SEARCH = (1.05, 0.95, 0.85, 0.75, 0.65)

Levels = Literal["symmetric", "asymmetric", "lloyd-max"]


class Place(NamedTuple):
    """What a quantiser may know of where its rows come from."""

    layer: int
    layers: int
    rope_theta: float


class Quantiser(Protocol):
    """Rows to restored rows, and bits per element."""

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor: ...

    def bits(self, width: int, layers: int) -> float:
        """Stored bits per element of a head of ``width`` elements, in a model of ``layers``."""
        ...


def bf16(values: torch.Tensor) -> torch.Tensor:
    """``values`` rounded as a stored scale is."""
    return values.to(torch.bfloat16).float()


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """int8-rot's rotation of the last axis, orthonormal."""
    width = rows.shape[-1]
    return hadamard(rows * torch.tensor(signs(width), dtype=torch.float32)) / math.sqrt(width)


def rotate_back(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of ``rotate``."""
    width = rows.shape[-1]
    return hadamard(rows) / math.sqrt(width) * torch.tensor(signs(width), dtype=torch.float32)


def uniform(values: torch.Tensor, bits: int, symmetric: bool, clip: float = 1.0) -> torch.Tensor:
    """Evenly spaced levels for each row of the last axis, over ``clip`` of its range."""
    if symmetric:
        largest = 2 ** (bits - 1) - 1
        scale = bf16(values.abs().amax(-1, keepdim=True) * clip / largest).clamp(min=SCALE_MIN)
        signed: torch.Tensor = (values / scale).round().clamp(-largest, largest)
        return signed * scale
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    middle = bf16((low + high) / 2)
    half_range = torch.maximum(high - middle, middle - low) * clip
    half = (2**bits - 1) / 2
    scale = bf16(half_range / half).clamp(min=SCALE_MIN)
    codes: torch.Tensor = ((values - middle) / scale + half).round().clamp(0, 2 * half)
    restored: torch.Tensor = (codes - half) * scale + middle
    return restored


def lloyd_max(values: torch.Tensor, clip: float = 1.0) -> torch.Tensor:
    """Sixteen levels spaced for a normal distribution, scaled to each row of the last axis."""
    levels = torch.tensor([-x for x in reversed(LLOYD_MAX)] + list(LLOYD_MAX))
    largest = values.abs().amax(-1, keepdim=True) * clip
    scale = bf16(largest / LLOYD_MAX[-1]).clamp(min=SCALE_MIN)
    between = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize((values / scale).contiguous(), between)] * scale


def least_error(
    values: torch.Tensor, quantise: Callable[[float], torch.Tensor], clips: tuple[float, ...]
) -> torch.Tensor:
    """For each row of the last axis, the result of the clip with the least squared error."""
    results = torch.stack([quantise(clip) for clip in clips])
    best = (results - values).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return results.gather(0, best.expand_as(results[:1]))[0]


def pages_of(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Rows as ``[heads, pages, block, width]``."""
    heads, tokens, width = rows.shape
    return rows.reshape(heads, tokens // block, block, width)


@dataclass(frozen=True)
class Exact:
    """As it is, at 16 bits."""

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:  # noqa: ARG002
        return rows

    def bits(self, width: int, layers: int) -> float:  # noqa: ARG002
        return 16.0


@dataclass(frozen=True)
class Float8:
    """FP8 e4m3 at scale 1, as an FP8 KV cache without calibrated scales stores it."""

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:  # noqa: ARG002
        return rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def bits(self, width: int, layers: int) -> float:  # noqa: ARG002
        return 8.0


@dataclass(frozen=True)
class PerToken:
    """A scale for each token and head, or for each ``group`` elements of a head."""

    code_bits: int
    levels: Levels = "symmetric"
    rotated: bool = False
    group: int | None = None
    #: Clips that are tried; one: none is.
    clips: tuple[float, ...] = (1.0,)

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:  # noqa: ARG002
        values = rotate(rows) if self.rotated else rows
        grouped = values.reshape(*values.shape[:-1], -1, self.group or rows.shape[-1])
        result = least_error(grouped, lambda clip: self._at(grouped, clip), self.clips).flatten(-2)
        return rotate_back(result) if self.rotated else result

    def bits(self, width: int, layers: int) -> float:  # noqa: ARG002
        scales = 2 if self.levels == "asymmetric" else 1
        return self.code_bits + scales * SCALE_BITS / (self.group or width)

    def _at(self, values: torch.Tensor, clip: float) -> torch.Tensor:
        if self.levels == "lloyd-max":
            assert self.code_bits == 4
            return lloyd_max(values, clip)
        return uniform(values, self.code_bits, self.levels == "symmetric", clip)


@dataclass(frozen=True)
class FirstLayers:
    """``finer`` in the first ``count`` layers, ``inner`` in all others."""

    finer: Quantiser
    inner: Quantiser
    count: int

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:
        return (self.finer if at.layer < self.count else self.inner)(rows, at)

    def bits(self, width: int, layers: int) -> float:
        share = self.count / layers
        inner, finer = self.inner.bits(width, layers), self.finer.bits(width, layers)
        return share * finer + (1 - share) * inner
