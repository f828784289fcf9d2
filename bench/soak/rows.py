"""Rows that anyone can make again from a token's number: the soak's references."""

from __future__ import annotations

import torch

from hiqcache.codecs import get_codec
from hiqcache.record import kv_parts

#: Odd multipliers of xxHash, which spread integers over all of their bits.
_PRIMES = (-7046029288634856825, -4417276706812531889, 1609587929392839161)

#: Codecs whose restored rows are the same bits from every transfer; of the others the codec's own
#: bound must hold (hiqcache/codecs/base.py).
EXACT = ("bf16", "int8")


class Rows:
    """K and V of all layers for tokens of any number; ``layers``, ``heads``, ``dim`` of each."""

    def __init__(self, layers: int, heads: int, dim: int, device: torch.device) -> None:
        self._shape = (2, layers, heads, dim)
        size = 2 * layers * heads * dim
        self._places = torch.arange(size, device=device, dtype=torch.int64) * _PRIMES[0]
        # One head in eight holds outliers.
        widths = torch.arange(2 * layers * heads, device=device) % 8 == 3
        self._scales = torch.where(widths, 200.0, 1.0).repeat_interleave(dim)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """bf16 ``[2, layers, tokens, heads, dim]`` of ``tokens`` (int64), no two of them alike."""
        bits = tokens[:, None] * _PRIMES[1] + self._places
        for shift, prime in ((29, _PRIMES[2]), (32, _PRIMES[0])):
            bits = (bits ^ (bits >> shift)) * prime
        # The sum of four bytes, as near to normal as a codec needs it.
        total = torch.zeros_like(bits)
        for shift in (0, 13, 27, 41):
            total += (bits >> shift) & 255
        values = (total.to(torch.float32) - 510) / 148 * self._scales
        sides, layers, heads, dim = self._shape
        rows = values.to(torch.bfloat16).view(len(tokens), sides, layers, heads, dim)
        return rows.permute(1, 2, 0, 3, 4).contiguous()


class Judge:
    """What a codec must make of rows, by its reference in plain torch: page by page, K and V apart.

    ``heads``, ``dim``, ``page_size``: of the rows, which come by whole pages of tokens.
    """

    def __init__(self, codec: str, heads: int, dim: int, page_size: int) -> None:
        """Raises ValueError for rows that the codec does not serve."""
        self._codecs = () if codec == "bf16" else get_codec(codec).stores(kv_parts(heads, dim))
        self._exact = codec in EXACT
        self._page = (page_size, heads, dim)

    def expected(self, rows: torch.Tensor) -> torch.Tensor:
        """What ``rows`` (of Rows.of) must restore to, where that is one value."""
        if not self._codecs or not self._exact:
            return rows
        sides = [
            codec.decode(*codec.encode(side.unflatten(1, (-1, self._page[0]))), side.dtype)
            for codec, side in zip(self._codecs, rows, strict=True)
        ]
        return torch.stack(sides).view(rows.shape)

    def wrong(self, side: int, expected: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        """Elements of each token that are not as they must be, int64 ``[tokens]``.

        side: 0 for K, 1 for V. Both ``[tokens, heads, dim]``, ``expected`` of the method of that
        name. Where a codec bounds the error of whole heads, heads count in the place of elements.
        """
        if not self._codecs or self._exact:
            differs = expected.view(torch.int16) != restored.view(torch.int16)
            return differs.flatten(1).sum(dim=1)
        pages = [rows.reshape(-1, *self._page) for rows in (expected, restored)]
        differs = ~(self._codecs[side].excess(*pages) <= 0)
        return differs.flatten(2).sum(dim=2).flatten()
