"""Ways to store K rows that need a whole page: what its tokens share is stored once, beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bench.codec_study.quantisers import (
    SCALE_BITS,
    Place,
    Quantiser,
    bf16,
    least_error,
    pages_of,
    rotate,
    rotate_back,
    uniform,
)

#: A kept token's place in its page.
INDEX_BITS = 8


@dataclass(frozen=True)
class PerChannel:
    """A scale and an offset for each channel over ``block`` tokens.

    ``bands`` are code bits per band of rotary frequencies, the highest frequency first: channel c
    and channel c + width / 2 turn at the same one.
    """

    bands: tuple[int, ...]
    block: int = 64
    clips: tuple[float, ...] = (1.0,)
    #: Rotate each channel over the tokens of its block, its mean taken off.
    tokens_rotated: bool = False

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:  # noqa: ARG002
        channels = pages_of(rows, self.block).transpose(-1, -2)
        result = torch.empty_like(channels)
        band_of = band_of_channel(rows.shape[-1], len(self.bands))
        for band, bits in enumerate(self.bands):
            mine = channels[..., band_of == band, :]
            result[..., band_of == band, :] = self._channels(mine, bits)
        return result.transpose(-1, -2).flatten(1, 2)

    def bits(self, width: int, layers: int) -> float:  # noqa: ARG002
        return sum(self.bands) / len(self.bands) + 2 * SCALE_BITS / self.block

    def _channels(self, channels: torch.Tensor, bits: int) -> torch.Tensor:
        if self.tokens_rotated:
            mean = bf16(channels.mean(-1, keepdim=True))
            turned = rotate(channels - mean)
            result = self._search(turned, bits, True)
            return rotate_back(result) + mean
        return self._search(channels, bits, False)

    def _search(self, values: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
        return least_error(values, lambda clip: uniform(values, bits, symmetric, clip), self.clips)


def band_of_channel(width: int, bands: int) -> torch.Tensor:
    """The band of each of ``width`` channels, 0 with the highest rotary frequencies."""
    return torch.arange(width) % (width // 2) * bands // (width // 2)


@dataclass(frozen=True)
class MeanFirst:
    """The mean over ``block`` tokens taken off, then ``inner``.

    ``optional``: a token that lies nearer to zero than to the mean keeps its own zero; its flag is
    the sign of its scale, so it costs nothing. ``unturned``: the mean is taken after turning each
    token's rotary angle back to that of the block's first, so it also holds what rotates.
    """

    inner: Quantiser
    block: int = 64
    optional: bool = False
    unturned: bool = False

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:
        pages = pages_of(rows, self.block)
        weight = torch.ones_like(pages[..., :1])
        for _ in range(2 if self.optional else 1):
            turned = turn(pages, -1, at.rope_theta) if self.unturned else pages
            mean = bf16((turned * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True))
            offset = mean.expand_as(pages)
            if self.unturned:
                offset = turn(offset, 1, at.rope_theta)
            if self.optional:
                nearer = (pages - offset).norm(dim=-1, keepdim=True)
                weight = (nearer < pages.norm(dim=-1, keepdim=True)).float()
        offset = (offset * weight).flatten(1, 2)
        return self.inner(rows - offset, at) + offset

    def bits(self, width: int, layers: int) -> float:
        return self.inner.bits(width, layers) + SCALE_BITS / self.block


@dataclass(frozen=True)
class Unturned:
    """``inner`` on rows whose rotary angles are turned back to that of their block's first."""

    inner: Quantiser
    block: int = 64

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:
        turned = turn(pages_of(rows, self.block), -1, at.rope_theta).flatten(1, 2)
        restored = pages_of(self.inner(turned, at), self.block)
        return turn(restored, 1, at.rope_theta).flatten(1, 2)

    def bits(self, width: int, layers: int) -> float:
        return self.inner.bits(width, layers)


def turn(pages: torch.Tensor, direction: int, theta: float) -> torch.Tensor:
    """Slot j of each page turned by j positions of a rotary embedding, forth (1) or back (-1)."""
    block, width = pages.shape[-2:]
    frequencies = theta ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.arange(block).float()[:, None] * frequencies * direction
    left, right = pages.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


@dataclass(frozen=True)
class Kept:
    """``count`` tokens of each page and head at 8 bits, the rest by ``inner``.

    A kept token does not widen its page's channels: ``inner`` sees the mean of the others there.
    ``choose``: "shortest" takes the tokens of smallest norm, for keys of small norm draw the most
    attention (Devoto et al., 2024), a sequence's first token above all, and lie far from a page's
    other keys; "range" takes those without which the squared ranges of the channels add up to the
    least, one after the other. A kept token's code row of ``inner`` holds a part of its 8-bit
    codes, so only the rest lies beside the page.
    """

    inner: Quantiser
    count: int
    block: int = 64
    choose: Literal["shortest", "range"] = "shortest"
    #: Bits per element of the inner quantiser's code row, which a kept token uses too.
    reused_bits: int = 4

    def __call__(self, rows: torch.Tensor, at: Place) -> torch.Tensor:
        pages = pages_of(rows, self.block)
        kept = torch.zeros_like(pages[..., :1], dtype=torch.bool)
        for _ in range(self.count):
            kept = kept.scatter(-2, self._next(pages, kept), True)
        rest = (pages * ~kept).sum(-2, keepdim=True) / (self.block - self.count)
        coarse = pages_of(self.inner(torch.where(kept, rest, pages).flatten(1, 2), at), self.block)
        return torch.where(kept, uniform(pages, 8, symmetric=True), coarse).flatten(1, 2)

    def _next(self, pages: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        if self.choose == "shortest":
            norms: torch.Tensor = pages.norm(dim=-1, keepdim=True)
            return norms.masked_fill(kept, torch.inf).argmin(-2, keepdim=True)
        high = pages.masked_fill(kept, -torch.inf).topk(2, dim=-2).values
        low = pages.masked_fill(kept, torch.inf).topk(2, dim=-2, largest=False).values
        without_high = torch.where(pages == high[..., :1, :], high[..., 1:, :], high[..., :1, :])
        without_low = torch.where(pages == low[..., :1, :], low[..., 1:, :], low[..., :1, :])
        without: torch.Tensor = (without_high - without_low).square().sum(-1, keepdim=True)
        return without.masked_fill(kept, torch.inf).argmin(-2, keepdim=True)

    def bits(self, width: int, layers: int) -> float:
        each = 8 - self.reused_bits + (SCALE_BITS + INDEX_BITS) / width
        return self.inner.bits(width, layers) + self.count * each / self.block
