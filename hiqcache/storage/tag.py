"""The format tag: everything that makes the bytes of two pages mean the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from hiqcache.record import Part, RecordLayout

#: Counts up whenever bytes of the same record come to mean another thing: a codec's arithmetic, the
#: order of rows, the seal.
FORMAT_VERSION = 1


class PageFormat(NamedTuple):
    """What a page of storage holds.

    layers: the model's layers that this rank holds, from the first to one past the last.
    parts: heads and widths of one rank.
    dtype: of the rows that the codec encoded.
    ranks: tensor-parallel ranks that share a token's heads.
    """

    codec: str
    layout: RecordLayout
    layers: tuple[int, int]
    parts: Sequence[Part]
    dtype: str
    ranks: int

    @property
    def tag(self) -> str:
        """Its name in storage keys: 12 hexadecimal digits behind what a person wants to read.

        The order of the arena is none of it: layer_first and page_first share pages.
        """
        facts = {
            "version": FORMAT_VERSION,
            "codec": self.codec,
            "format": self.layout.format,
            "page_size": self.layout.page_size,
            "page_bytes": self.layout.page_bytes,
            "rows": self.layout.rows,
            "layers": self.layers,
            "parts": tuple(map(tuple, self.parts)),
            "dtype": self.dtype,
            "ranks": self.ranks,
        }
        text = json.dumps(facts, sort_keys=True)
        return f"hiq{FORMAT_VERSION}-{self.codec}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
