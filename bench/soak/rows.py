"""Rows that anyone can make again from a token's number: the soak's references."""

from __future__ import annotations

import torch

from hiqcache.codecs import get_codec
from hiqcache.codecs.base import TokenCodec

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


def token_codec(name: str) -> TokenCodec:
    """The codec called ``name``. Raises ValueError for one whose tokens are not judged alone."""
    codec = get_codec(name)
    if not isinstance(codec, TokenCodec):
        raise ValueError(f"the soak judges tokens one by one, and codec {name} stores whole pages.")
    return codec


class Judge:
    """What a codec must make of rows, by its reference in plain torch."""

    def __init__(self, codec: str) -> None:
        self._codec = None if codec == "bf16" else token_codec(codec)
        self._exact = codec in EXACT

    def expected(self, rows: torch.Tensor) -> torch.Tensor:
        """What ``rows`` (of Rows.of) must restore to, where that is one value."""
        if self._codec is None or not self._exact:
            return rows
        return self._codec.decode(*self._codec.encode(rows), rows.dtype)

    def wrong(self, expected: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        """Elements of each token that are not as they must be, int64 ``[tokens]``.

        Both ``[tokens, heads, dim]``, ``expected`` of the method of that name.
        """
        if self._codec is None or self._exact:
            differs = expected.view(torch.int16) != restored.view(torch.int16)
        else:
            differs = ~(self._codec.excess(expected, restored) <= 0)
        return differs.flatten(1).sum(dim=1)
